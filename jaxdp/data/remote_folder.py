"""Folders of images at a URL: URL/SPLIT/CLASS/IMAGE, in the order of the same folders on a disk."""

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxdp.cloud.objects import ObjectInfo
from jaxdp.cloud.read_ahead import ReadAhead
from jaxdp.cloud.source import Source
from jaxdp.data.decode import ImageError
from jaxdp.data.image_folder import (
    EXTENSIONS,
    LAYOUT_HINT,
    Folders,
    class_order,
    ignored_warnings,
    is_image,
    match_classes,
    similar_splits,
)
from jaxdp.errors import ConfigError, printable
from jaxdp.files import LARGEST


class RemoteFolders(Folders):
    """Splits at a URL."""

    def __init__(self, remote: Source) -> None:
        self.remote, self.place = remote, remote.url

    @cached_property
    def _names(self) -> list[str]:
        with self.remote.opening():
            return self.remote.ask(lambda location: location.list_folder())[0]

    def names(self) -> list[str]:
        return self._names

    def open(self, name: str, classes: list[str] | None = None) -> "RemoteFolder":
        if not self.has(name):
            hint = similar_splits(self.names()) or LAYOUT_HINT
            raise ConfigError("data.directory", self.remote.url, reason=f"it has no folder {name!r}", hint=hint)
        return RemoteFolder.open(self.remote, name, classes)


@dataclass(frozen=True)
class RemoteFolder:
    """The encoded images of a split at a URL, ordered by class and name. labels: indices into `classes`."""

    remote: Source
    paths: list[str]
    objects: list[ObjectInfo]
    labels: list[int]
    classes: list[str]
    warnings: list[str]
    ahead: ReadAhead = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ahead", ReadAhead(self._read, lambda index: self.objects[index].size, self.remote.daemons))

    @classmethod
    def open(cls, remote: Source, split: str, classes: list[str] | None = None) -> "RemoteFolder":
        """List a split: one request for it, and one for every 1,000 images of a class and each of its folders.

        classes: those of the training split, which this split must have too. Raises ConfigError as `ImageFolder.open`.
        """

        def error(reason: str, hint: str = "") -> ConfigError:
            return ConfigError("data.directory", remote.url, reason=reason, hint=hint)

        with remote.opening():
            folders, beside = remote.ask(lambda location: location.list_folder(split))
            names = class_order([name for name in folders if not name.startswith(".")])
            if not names:
                raise error(f"{split!r} has no class folders", "arrange images as SPLIT/CLASS/IMAGE")
            names = match_classes(names, classes, split=split, error=error)
            below = [f"{split}/{name}" for name in names]
            listed = remote.list_below(below)
        by_class: dict[str, list[str]] = {folder: [] for folder in below}
        for path in sorted(listed, key=lambda path: path.split("/")):  # as on a disk, where each folder is sorted
            by_class["/".join(path.split("/", 2)[:2])].append(path)
        paths, labels, ignored = [], [], []
        for label, (folder, files) in enumerate(by_class.items()):
            images = [file for file in files if is_image(file)]
            if not images:
                raise error(f"class folder {folder!r} has no images ({', '.join(EXTENSIONS)})")
            ignored += [file for file in files if not is_image(file)]
            paths += images
            labels += [label] * len(images)
        objects = [listed[path] for path in paths]
        strays = sorted(f"{split}/{name}" for name in beside if is_image(name) and not name.startswith("."))
        warnings = ignored_warnings(
            remote.url_of(split), *([remote.url_of(name) for name in some] for some in (strays, ignored))
        )
        warnings += remote.size_warnings(sum(info.size for info in objects), len(objects))
        return cls(remote, paths, objects, labels, classes or names, warnings)

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
        """For how long threads have waited for images."""
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

    def file_name(self, index: int) -> str:
        """The name of the image's file."""
        return self.paths[index].rpartition("/")[2]
