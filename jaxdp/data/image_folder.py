"""Reads images from folders: ROOT/SPLIT/CLASS/IMAGE, where the class names are the folder names in alphabetical order.

Images may lie in folders below CLASS. Folders 0, 1, ... N - 1 are in the order of their numbers, as in ImageNet-V2.
"""

import os
import re
import shlex
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jaxdp.data import progress
from jaxdp.data.datasets import EVALUATION_NAMES, Splits
from jaxdp.data.decode import ImageError
from jaxdp.errors import ConfigError, plural, printable
from jaxdp.files import check_local, expand_user, read_regular

EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm")
LAYOUT_HINT = "arrange images as train/CLASS/IMAGE and val/CLASS/IMAGE (docs/data.md divides a folder of classes)"
SIMILAR_NAMES = {  # flag -> (names of the split, names that only look like one)
    "--data.train-split": (("train",), r"(train|training)([ _-].*)?"),
    "--data.eval-split": (EVALUATION_NAMES, r"(val|valid|validation|test|testing|eval|dev)([ _-].*)?"),
}


@dataclass(frozen=True)
class ImageFolder:
    """The encoded images of a split, ordered by class and file name. labels: indices into `classes`."""

    paths: list[str]
    labels: list[int]
    classes: list[str]
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, split: Path, classes: list[str] | None = None) -> "ImageFolder":
        """List a split. classes: those of the training split, which this split must have too.

        Raises ConfigError for a missing or unreadable folder, dangling links, and empty, missing or additional classes.
        """
        try:
            return cls._list(split, classes)
        except OSError as error:
            raise ConfigError("data.directory", error.filename, reason=error.strerror or str(error)) from None

    @classmethod
    def _list(cls, split: Path, classes: list[str] | None) -> "ImageFolder":
        def error(reason: str, hint: str = "") -> ConfigError:
            return ConfigError("data.directory", str(split.parent), reason=reason, hint=hint)

        root = split.parent
        if root.is_file():
            raise error("is a file, not a directory", "give the folder of the images, or use --data.source file")
        if not root.is_dir():
            raise error("directory not found", "give it with --data.directory; a relative path starts in the current directory")
        if not split.is_dir():
            above = f"use --data.directory {root.parent}" if (root.parent / split.name).is_dir() else ""
            raise error(f"it has no folder {split.name!r}", above or similar_splits(LocalFolders(root).names()) or LAYOUT_HINT)
        entries = [entry for entry in os.scandir(split) if not entry.name.startswith(".")]
        for entry in entries:
            if entry.is_symlink() and not os.path.exists(entry.path):
                raise error(f"dangling link {entry.path!r}", "fix or remove it")
        folders = [entry.name for entry in entries if entry.is_dir()]
        strays = sorted(entry.path for entry in entries if not entry.is_dir() and is_image(entry.name))
        names = class_order(folders)
        if not names:
            raise error(f"{split.name!r} has no class folders", "arrange images as SPLIT/CLASS/IMAGE")
        for name in names:
            if not _is_valid(name):
                raise error(f"class folder name {name!r} is not UTF-8", "rename it")
        names = match_classes(names, classes, split=split.name, error=error, is_empty=lambda name: not os.listdir(split / name))
        paths: list[str] = []
        labels: list[int] = []
        ignored: list[str] = []
        top = os.path.realpath(split)
        for label, name in enumerate(names):
            folder = str(split / name)
            images: list[str] = []
            for path, reason in _walk(folder, top, visited={top}):  # no class is a link to the split, or to what contains it
                if reason and os.path.isdir(path):
                    raise ConfigError("data.directory", path, reason=reason)
                (images if is_image(path) else ignored).append(path)
            if not images:
                raise error(f"class folder {folder!r} has no images ({', '.join(EXTENSIONS)})")
            paths += images
            labels += [label] * len(images)
        return cls(paths, labels, classes or names, ignored_warnings(str(split), strays, ignored))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """(encoded image, label). Raises ImageError for a file that cannot be read."""
        try:
            return read_regular(self.paths[index]), self.labels[index]
        except OSError as error:
            raise ImageError(error.strerror) from None

    def name(self, index: int) -> str:
        """The image's path, printable."""
        return printable(self.paths[index], 4096)

    def file_name(self, index: int) -> str:
        """The name of the image's file."""
        return os.path.basename(self.paths[index])


class Folders(Splits):
    """Splits that are folders. place: the directory or URL in which they are."""

    matches_classes, place = True, ""

    def no_evaluation_split(self) -> ConfigError:
        reason = f"{self.place!r} has none of the folders {', '.join(EVALUATION_NAMES)}"
        hint = similar_splits(self.names()) or f"name one with --data.eval-split FOLDER, or {LAYOUT_HINT}"
        return ConfigError("data.eval_split", None, reason=reason, hint=hint)


class LocalFolders(Folders):
    """Splits on a disk."""

    def __init__(self, root: Path) -> None:
        self.root, self.place = root, str(root)

    def names(self) -> list[str]:
        return [entry.name for entry in os.scandir(self.root) if entry.is_dir()] if self.root.is_dir() else []

    def has(self, name: str) -> bool:
        return (self.root / name).is_dir()

    def open(self, name: str, classes: list[str] | None = None) -> ImageFolder:
        return ImageFolder.open(self.root / name, classes)


def is_image(name: str) -> bool:
    """Whether a file is taken for an image because of its extension."""
    return name.lower().endswith(EXTENSIONS)


def ignored_warnings(split: str, strays: list[str], others: list[str]) -> list[str]:
    """What users should know about files of a split that are not used. strays: images beside the class folders."""
    return [
        f"ignored {plural(len(files), kind)} {why} {split}, {printable(files[0])} first"
        for files, kind, why in (
            (strays, "image", "without a class, directly in"),
            (others, "file", "without an image extension in"),
        )
        if files
    ]


def match_classes(
    names: list[str],
    classes: list[str] | None,
    *,
    split: str,
    error: Callable[[str, str], ConfigError],
    is_empty: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """The class folders `names` of a split in the order of `classes`, those of the training split (None: as they are).

    Names that differ only in their Unicode form (NFC, NFD) are equal.
    error: (reason, hint) -> error; raised if the names differ, or are equal within a split. is_empty: of a class folder.
    """
    by_class: dict[str, str] = {}
    for name in names:
        same = by_class.setdefault(normalized(name), name)
        if same != name:
            reason = f"{split!r} has two class folders {name!r} that differ only in their Unicode form, {same!a} and {name!a}"
            raise error(reason, "merge them into one")
    if classes is None:
        return names
    expected = list(map(normalized, classes))
    if unknown := sorted(by_class.keys() - set(expected)):
        empty = "empty " if is_empty(by_class[unknown[0]]) else ""
        reason = f"{split!r} has the {empty}class {unknown[0]!r}, which the training split lacks"
        raise error(reason, "add it to the training split, or remove it")
    if missing := sorted(set(expected) - by_class.keys()):
        raise error(
            f"{split!r} has no folder for {len(missing)} of {len(classes)} training classes, such as {missing[0]!r}",
            "add the folders with their images, or remove these classes from the training split",
        )
    return [by_class[name] for name in expected]


def normalized(name: str) -> str:
    """A class name in the Unicode form in which names are compared: macOS decomposes letters with accents, Linux does not."""
    return unicodedata.normalize("NFC", name)


def class_order(names: list[str]) -> list[str]:
    """Folder names in the order of their labels."""
    numbers = list(map(str, range(len(names))))
    return numbers if set(names) == set(numbers) else sorted(names)


def _is_valid(name: str) -> bool:
    """Whether a name is valid UTF-8; Python represents other bytes as surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class ImageFiles(NamedTuple):
    """The result of `find_images`. ignored: files without an image extension; unreadable: name -> reason."""

    images: list[str]
    ignored: list[str]
    unreadable: dict[str, str]


def find_images(paths: Iterable[str | Path]) -> ImageFiles:
    """The files among `paths`, and the image files in the folders among them at any depth.

    Links are followed; hidden files are skipped. Raises ConfigError for a path that is neither a file nor a folder, and for a
    folder without images.
    """
    found = ImageFiles([], [], {})
    for path in map(str, paths):
        check_local(path, "images")
        path = expand_user(path, "images")
        if not os.path.isdir(path):
            if not os.path.isfile(path):
                reason = "not a regular file" if os.path.exists(path) else "no such file or folder"
                raise ConfigError("images", path, reason=reason)
            found.images.append(path)
            continue
        files = dict(_walk(path, os.path.realpath(path)))
        unreadable = {file: reason for file, reason in files.items() if reason}
        images = [file for file in files if file not in unreadable and is_image(file)]
        if not images:
            first = [f"; cannot read {printable(file)}: {reason}" for file, reason in unreadable.items()][:1]
            raise ConfigError("images", path, reason=f"the folder has no images ({', '.join(EXTENSIONS)}){''.join(first)}")
        found.images.extend(images)
        found.ignored.extend(file for file in files if file not in unreadable and not is_image(file))
        found.unreadable.update(unreadable)
    return found


def _walk(folder: str, inside: str, visited: set[str] | None = None) -> Iterator[tuple[str, str | None]]:
    """(path, None or the reason why it cannot be read) of the files below a folder, in the order of their names.

    Links are followed, but not to a folder that contains `inside`, which contains the images. Each folder is listed once.
    inside, visited: real paths of a folder and of those listed so far.
    """
    real = os.path.realpath(folder)
    visited = set() if visited is None else visited
    if real in visited or inside.startswith(real.rstrip(os.sep) + os.sep):
        return
    visited.add(real)
    progress.report()
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield folder, error.strerror
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            is_folder, is_file = entry.is_dir(), entry.is_file()
        except OSError:  # links in a circle
            is_folder = is_file = False
        if is_folder:
            yield from _walk(entry.path, inside, visited)
        elif is_file:
            yield entry.path, None
        else:
            yield entry.path, "dangling link" if entry.is_symlink() else "not a regular file"


def similar_splits(folders: Sequence[str]) -> str:
    """A hint with the flags for folders that look like splits of other names, such as Train and Val; "" without any."""
    flags = []
    for flag, (names, similar) in SIMILAR_NAMES.items():
        found = sorted(name for name in folders if re.fullmatch(similar, name, re.IGNORECASE))
        if found and not set(names) & set(found):
            flags.append(f"{flag} {shlex.quote(found[0])}")
    return f"use {' '.join(flags)}" if flags else ""
