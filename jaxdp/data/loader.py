"""Encoded images to batches of one size, by a pool of threads that write into freshly allocated memory."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxdp.data.decode import ImageError, Scratch, decode, rgb
from jaxdp.errors import OneLine

LEFT_OUT = -1  # label of an image that cannot be used and does not count


class DataError(OneLine, RuntimeError):
    """An image that cannot be used, in a run that stops at such: one line with its name, the reason and what to do."""


def default_threads() -> int:
    return len(os.sched_getaffinity(0))


class Loader:
    """Batches from a source of (encoded bytes or uint8 pixels, label), each image shaped by `shape(pixels, out, position)`.

    source: `__len__` and `__getitem__`, which several threads call at a time; `name(index)` where it can name an image. size:
    height and width of the rows. classes: labels are 0 up to below it. on_bad_image, for one that cannot be read: "stop",
    "skip" to put the next good one in its place, or "leave_out" to give it the label LEFT_OUT. `bad`: name -> reason of such
    images. what: names images of a source that cannot, "training image" or "evaluation image".
    """

    def __init__(
        self,
        source,
        shape,
        size: int,
        classes: int,
        threads: int | None = None,
        on_bad_image: str = "stop",
        what: str = "image",
    ):
        self.source, self.shape, self.size, self.classes = source, shape, size, classes
        self.on_bad_image, self.what = on_bad_image, what
        self.threads = threads or default_threads()
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")
        self.scratch = Scratch()
        self.bad: dict[str, str] = {}

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        images, labels = self.batch(np.array([index]), np.array([index]))
        return images[0], labels[0]

    def batch(self, indices, positions):
        """(images [B, S, S, 3] uint8, labels [B] int32), freshly allocated. positions: [B], where the run is at each image."""
        images = np.empty((len(indices), self.size, self.size, 3), np.uint8)
        labels = np.empty(len(indices), np.int32)
        rows = iter(range(len(indices)))  # shared: each thread takes the next row when it is done with one

        def fill(_):
            for row in rows:
                labels[row] = self._one(int(indices[row]), images[row], int(positions[row]))

        for _ in self.pool.map(fill, range(min(self.threads, len(indices)))):
            pass
        return images, labels

    def _one(self, index: int, out, position: int) -> int:
        """Fill `out`; the label. An image that cannot be used is replaced by the one after it, or left out, if it may be."""
        for step in range(len(self.source)):
            here = (index + step) % len(self.source)
            try:
                data, label = self._item(here)
                self.shape(decode(data, self.scratch) if isinstance(data, bytes) else data, out, position)
                return label
            except ImageError as error:
                name = self._name(here)
                if self.on_bad_image == "stop":
                    raise DataError(
                        f"{name} cannot be used: {error}; mend or remove it, or give --data.on-bad-image skip"
                    ) from None
                self.bad[name] = str(error)
                if self.on_bad_image == "leave_out":
                    out[:] = 0
                    return LEFT_OUT
        raise DataError("no image of the data set can be used; the first reasons: " + "; ".join(list(self.bad.values())[:3]))

    def _item(self, index: int):
        """(encoded bytes or uint8 pixels [H, W, 3], label) of a source's item: a pair, or a dict with image and label."""
        try:
            item = self.source[index]
            image, label = (item["image"], item["label"]) if isinstance(item, dict) else item
        except ImageError:
            raise
        except Exception as error:
            raise DataError(
                f"{self._name(index)}: the source raised {type(error).__name__}: {error}; it must give (image, label)"
            ) from error
        number = np.asarray(label)
        if number.size != 1 or number.dtype.kind not in "iu" or not 0 <= number.item() < self.classes:
            raise DataError(
                f"{self._name(index)}: the label {label!r} is not allowed; whole numbers from 0 to {self.classes - 1} are "
                "(model.classes is one more)"
            )
        if isinstance(image, (bytearray, memoryview)):
            image = bytes(image)
        if hasattr(image, "convert"):  # Pillow's
            image = rgb(image)
        return image if isinstance(image, bytes) else _checked(image), number.item()

    def _name(self, index: int) -> str:
        return self.source.name(index) if hasattr(self.source, "name") else f"{self.what} {index}"


def _checked(pixels):
    """Pixels that a source gives itself: uint8 [H, W, 3], or [H, W] and [H, W, 1] for grey."""
    pixels = np.asarray(pixels)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)):
        raise ImageError(f"it is {pixels.dtype} of shape {pixels.shape}, and uint8 of [H, W, 3] or [H, W] is needed")
    if pixels.ndim == 2 or pixels.shape[2] == 1:
        pixels = np.repeat(pixels.reshape(*pixels.shape[:2], 1), 3, axis=2)
    if min(pixels.shape[:2]) < 2:
        raise ImageError(f"it has {pixels.shape[1]}x{pixels.shape[0]} pixels, and 2x2 are the least")
    return np.ascontiguousarray(pixels)
