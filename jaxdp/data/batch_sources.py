"""Batches of images of one size: decoded on a pool of threads, or in memory."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import numpy as np
from PIL import Image

from jaxdp.cores import usable_cores
from jaxdp.data import progress
from jaxdp.data.decode import MIN_SIDE, ImageError, Scratch, decode, rgb
from jaxdp.errors import OneLine, StorageError
from jaxdp.targets import ClassLabel, Target

OnBadImage = Literal["stop", "skip", "ignore"]

Transform = Callable[[np.ndarray, np.ndarray, int], None]
"""transform(pixels [H, W, 3] uint8, out [S, S, 3] uint8, position) fills `out`."""


class DataError(OneLine, RuntimeError):
    """An unusable image in a run that stops at such images: its name, the reason and a hint on one line."""


class ItemSource(Protocol):
    """A data set of single items. Several threads ask for items at a time. `name(index)` is optional."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """(image, label) or {"image", "label"}; image: encoded bytes, a Pillow image, or uint8 [H, W, 3] or [H, W]."""


def default_threads() -> int:
    """Number of cores that this process may use."""
    return usable_cores()


class DecodedImages:
    """Batches from a source of single items, each image brought to [size, size, 3] by `transform`.

    target: what the source gives for an image; a number of classes means one class. on_bad_image, for images that cannot be
    read: "stop" raises DataError, "skip" takes the next good image instead, "ignore" returns the target `ignored`. kind: names
    images of a source without `name`, such as "training image". bad_images: name -> reason of those that could not be read.
    """

    def __init__(
        self,
        source: ItemSource,
        *,
        transform: Transform,
        size: int,
        target: Target | int,
        threads: int | None = None,
        on_bad_image: OnBadImage = "stop",
        kind: str = "image",
    ) -> None:
        self.source, self.transform, self.size = source, transform, size
        self.target = ClassLabel(classes=target) if isinstance(target, int) else target
        self.on_bad_image, self.kind = on_bad_image, kind
        self.threads = threads or default_threads()
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")
        self.scratch = Scratch()
        self.bad_images: dict[str, str] = {}
        self.cumulative: np.ndarray | None = None
        self.loading_seconds = 0.0  # of all threads
        self.lock = threading.Lock()
        # A source that fetches images over a network gets the coming order; threads that wait for images fail.
        self.read_ahead: Callable[[Iterable[np.ndarray]], None] = getattr(source, "read_ahead", lambda order: None)
        self.stop_reading: Callable[[], None] = getattr(source, "stop_reading", lambda: None)

    @property
    def labels(self) -> np.ndarray | None:
        """The labels of all images, if the source has them in its attribute `labels`."""
        labels, relabel = getattr(self.source, "labels", None), getattr(self.target, "relabel", None)
        return labels if labels is None or relabel is None else relabel[np.asarray(labels)]

    @property
    def storage_share(self) -> float:
        """The share of the threads' time that they waited for images from a network."""
        waited = getattr(self.source, "wait_seconds", 0.0)
        return min(1.0, waited / self.loading_seconds) if self.loading_seconds else 0.0

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        images, labels = self.batch(np.array([index]), np.array([index]))
        return images[0], labels[0]

    def batch(self, indices: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(images [B, S, S, 3] uint8, labels [B] int32), freshly allocated. positions: [B] samples seen before each image."""
        images = np.empty((len(indices), self.size, self.size, 3), np.uint8)
        labels = self.target.empty(len(indices))
        rows_of: dict[int, list[int]] = {}  # image -> its rows; it is read and decoded once for all of them
        for row, index in enumerate(indices.tolist()):
            rows_of.setdefault(index, []).append(row)
        wanted = iter(rows_of.items())  # shared by the threads: each takes the next image

        def fill_rows(_: int) -> None:
            for index, rows in wanted:
                began = time.monotonic()
                labels[rows] = self._load(index, [(images[row], int(positions[row])) for row in rows])
                with self.lock:
                    self.loading_seconds += time.monotonic() - began
                progress.report()

        try:
            for _ in self.pool.map(fill_rows, range(min(self.threads, len(indices)))):
                pass
        except Exception:
            raise
        except BaseException:  # an interrupt of this thread
            self.stop_reading()
            raise
        return images, labels

    def _load(self, index: int, copies: list[tuple[np.ndarray, int]]) -> np.ndarray | np.generic:
        """Fill each (out, position) and return the label, following `on_bad_image` where the image cannot be read."""
        for offset in range(len(self.source)):
            candidate = (index + offset) % len(self.source)
            try:
                image, label = self._item(candidate)
                pixels = decode(image, self.scratch) if isinstance(image, bytes) else image
                for out, position in copies:
                    self.transform(pixels, out, position)
                return label
            except ImageError as error:
                name = self._name(candidate)
                if self.on_bad_image == "stop":
                    raise DataError(f"{name} cannot be used: {error}; {error.hint}") from None
                self.bad_images[name] = str(error)
                if self.on_bad_image == "ignore":
                    for out, _ in copies:
                        out[:] = 0
                    return self.target.ignored
        reasons = "; ".join(list(self.bad_images.values())[:3])
        raise DataError(f"no image of the data set can be used; the first reasons: {reasons}")

    def _item(self, index: int) -> tuple[bytes | np.ndarray, np.ndarray | np.generic]:
        """(encoded bytes or uint8 pixels [H, W, 3], label) of an item in any of the accepted forms."""
        try:
            item = self.source[index]
            image, label = (item["image"], item["label"]) if isinstance(item, dict) else item
        except ImageError:
            raise
        except StorageError as error:  # no image is bad because it could not be fetched
            raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            raise DataError(f"{self._name(index)}: the source raised {raised}; it must return (image, label)") from error
        try:
            found = self.target.read(label)
        except ValueError as error:
            raise DataError(f"{self._name(index)}: the label {label!r} {error}") from None
        if isinstance(image, (bytearray, memoryview)):
            image = bytes(image)
        if isinstance(image, Image.Image):
            image = rgb(image)
        return image if isinstance(image, bytes) else _check_pixels(image), found

    def _name(self, index: int) -> str:
        return self.source.name(index) if hasattr(self.source, "name") else f"{self.kind} {index}"


def _check_pixels(image: object) -> np.ndarray:
    """Pixels of a source as contiguous uint8 [H, W, 3]; they may be [H, W] or [H, W, 1] for gray."""
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)):
        raise ImageError(
            f"expected uint8 pixels of shape [H, W, 3] or [H, W], got {pixels.dtype} of shape {pixels.shape}",
            hint="return uint8 [H, W, 3], without ToTensor and Normalize; jaxdp normalizes",
        )
    if pixels.ndim == 2 or pixels.shape[2] == 1:
        pixels = np.repeat(pixels.reshape(*pixels.shape[:2], 1), 3, axis=2)
    if min(pixels.shape[:2]) < MIN_SIDE:
        raise ImageError(f"{pixels.shape[1]}x{pixels.shape[0]} pixels, fewer than {MIN_SIDE}x{MIN_SIDE}")
    return np.ascontiguousarray(pixels)


class ArraySource:
    """Images and labels in memory. images: uint8 [N, H, W, 3]; labels: [N] as `Target` has them; bad_images: as of
    `DecodedImages`.

    source: the items whose images were decoded, in the same order.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        bad_images: Mapping[str, str] | None = None,
        *,
        source: ItemSource | None = None,
    ) -> None:
        self.source = source
        self.images = np.ascontiguousarray(images, np.uint8)
        is_target = labels.dtype == np.float32 or labels.dtype.names
        self.labels = np.ascontiguousarray(labels, None if is_target else np.int32)
        self.bad_images = dict(bad_images or {})
        self.cumulative: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        return self.images[index], self.labels[index]

    def batch(self, indices: np.ndarray, positions: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(images [B, H, W, 3] uint8, labels [B] int32), freshly allocated; positions have no effect."""
        return self.images[indices], self.labels[indices]
