"""Folders of images at a URL: URL/SPLIT/CLASS/IMAGE, in the order of the same folders on a disk."""

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from jaxdp.cloud.location import ObjectInfo
from jaxdp.cloud.read_ahead import ReadAhead
from jaxdp.cloud.source import RemoteData
from jaxdp.data.datasets import SplitReader, has_splits
from jaxdp.data.decode import ImageError
from jaxdp.data.image_folder import below_common_folder, class_images, identity, ignored_warnings, is_image, match_classes
from jaxdp.errors import ConfigError, printable
from jaxdp.files import LARGEST


class RemoteFolders(SplitReader):
    """Splits at a URL."""

    matches_classes = True

    def __init__(self, remote: RemoteData) -> None:
        self.remote, self.place = remote, remote.url

    @cached_property
    def _names(self) -> list[str]:
        with self.remote.opening():
            return self.remote.ask(lambda location: location.list_folder())[0]

    def names(self) -> list[str]:
        return self._names

    def undivided(self, train: str) -> "RemoteFolder | None":
        return None if has_splits(self._names, train) else RemoteFolder.open(self.remote, "")

    def open(self, name: str, classes: list[str] | None = None) -> "RemoteFolder":
        if name not in self._names:
            raise self.no_split(name)
        return RemoteFolder.open(self.remote, name, classes)


@dataclass(frozen=True)
class RemoteFolder:
    """The encoded images of a split at a URL, ordered by class and name. labels: indices into `classes`."""

    remote: RemoteData
    paths: list[str]
    objects: list[ObjectInfo]
    labels: list[int]
    classes: list[str]
    warnings: list[str]
    ahead: ReadAhead = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ahead", ReadAhead(self._read, lambda index: self.objects[index].size, self.remote.daemons))

    @classmethod
    def open(cls, remote: RemoteData, split: str, classes: list[str] | None = None) -> "RemoteFolder":
        """List a split, or "" for class folders alone: one request for it, and one for every 1,000 images of each folder.

        classes: the training split's classes, which this split must have too. Raises ConfigError like `ImageFolder.open`.
        """

        def error(reason: str, hint: str = "") -> ConfigError:
            return ConfigError("data.directory", remote.url, reason=reason, hint=hint)

        with remote.opening():
            folders, beside = remote.ask(lambda location: location.list_folder(split))
            names = [name for name in folders if not name.startswith(".")]
            names = match_classes(names, classes, split=split, error=error)
            below = [f"{split}/{name}" if split else name for name in names]
            listed = remote.list_below(below)
        by_class: dict[str, list[str]] = {folder: [] for folder in below}
        for path in sorted(listed, key=lambda path: path.split("/")):  # as on a disk, where each folder is sorted
            by_class["/".join(path.split("/")[: 1 + bool(split)])].append(path)
        images = class_images(below, by_class.__getitem__, error)
        strays = sorted(f"{split}/{name}".lstrip("/") for name in beside if is_image(name) and not name.startswith("."))
        unused = ([remote.url_of(name) for name in some] for some in (strays, images.ignored))
        objects = [listed[path] for path in images.paths]
        warnings = ignored_warnings(remote.url_of(split), *unused)
        warnings += remote.size_warnings(sum(info.size for info in objects), len(objects))
        return cls(remote, images.paths, objects, images.labels, classes or names, warnings)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """(encoded image, label). Raises StorageError if the object cannot be read."""
        return self.ahead[index], self.labels[index]

    def _read(self, index: int) -> bytes:
        info = self.objects[index]
        if info.size > LARGEST:
            raise ImageError(os.strerror(errno.EFBIG))
        return self.remote.read(self.paths[index], info)

    @property
    def wait_seconds(self) -> float:
        """How long threads have waited for images."""
        return self.ahead.wait_seconds

    def read_ahead(self, order: Iterable[np.ndarray]) -> None:
        """Fetch images in this order from now on. order: arrays of indices."""
        self.ahead.follow(order)

    def stop_reading(self) -> None:
        """Let threads that wait for an image raise InterruptedError."""
        self.ahead.stop()

    def name(self, index: int) -> str:
        """The image's URL, printable."""
        return printable(self.remote.url_of(self.paths[index]), 4096)

    def identity(self) -> list[str]:
        """The identity of the same folder on a disk."""
        return identity(self.relative_names(), lambda index: self.objects[index].size)

    def relative_names(self) -> list[str]:
        """The names of the same folder on a disk."""
        return below_common_folder(self.paths)

    def __copy__(self) -> "RemoteFolder":
        """The same images, fetched in an order of their own."""
        return replace(self)
