"""Reads images from folders: ROOT/SPLIT/CLASS/IMAGE, where the class names are the folder names in alphabetical order.

Folders 0, 1, ... N - 1 are in the order of their numbers, as in ImageNet-V2.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jaxdp.data.decode import ImageError
from jaxdp.distributed import status
from jaxdp.errors import ConfigError, plural, printable
from jaxdp.files import check_local, read_regular

EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm")
LAYOUT_HINT = "arrange images as train/CLASS/IMAGE and val/CLASS/IMAGE (docs/data.md divides a folder of classes)"
EVALUATION_NAMES = ("val", "validation", "valid", "test")


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
            table = "; docs/data.md#labels-in-a-csv-file has labels in a CSV file" if root.suffix.lower() == ".csv" else ""
            raise error("is a file, not a directory", f"give the folder of the images{table}")
        if not root.is_dir():
            raise error("directory not found", "give it with --data.directory; a relative path starts in the current directory")
        if not split.is_dir():
            above = f"use --data.directory {root.parent}" if (root.parent / split.name).is_dir() else ""
            raise error(f"it has no folder {split.name!r}", above or LAYOUT_HINT)
        entries = [entry for entry in os.scandir(split) if not entry.name.startswith(".")]
        for entry in entries:
            if entry.is_symlink() and not os.path.exists(entry.path):
                raise error(f"dangling link {entry.path!r}", "fix or remove it")
        names = class_order([entry.name for entry in entries if entry.is_dir()])
        if not names:
            raise error(f"{split.name!r} has no class folders", "arrange images as SPLIT/CLASS/IMAGE")
        for name in names:
            if not _is_utf8(name):
                raise error(f"class folder name {name!r} is not UTF-8", "rename it")
        classes = match_classes(
            names, classes, split=split.name, error=error, is_empty=lambda name: not os.listdir(split / name)
        )
        paths, labels, ignored = [], [], []
        for label, name in enumerate(classes):
            status.current().record_progress()
            files = sorted(entry.path for entry in os.scandir(split / name) if not entry.name.startswith("."))
            images = [path for path in files if path.lower().endswith(EXTENSIONS)]
            ignored += [path for path in files if not path.lower().endswith(EXTENSIONS)]
            if not images:
                raise error(f"class folder {str(split / name)!r} has no images ({', '.join(EXTENSIONS)})")
            paths += images
            labels += [label] * len(images)
        warnings = [
            f"ignored {plural(len(ignored), 'file')} without an image extension in {split}, {printable(path)} first"
            for path in ignored[:1]
        ]
        return cls(paths, labels, classes, warnings)

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


def match_classes(
    names: list[str],
    classes: list[str] | None,
    *,
    split: str,
    error: Callable[[str, str], ConfigError],
    is_empty: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """The classes of a split with class folders `names`: `classes`, those of the training split, or `names` where that is None.

    error: (reason, hint) -> error; raised if the names differ. is_empty: of a class folder.
    """
    if classes is None:
        return names
    if unknown := sorted(set(names) - set(classes)):
        empty = "empty " if is_empty(unknown[0]) else ""
        reason = f"{split!r} has the {empty}class {unknown[0]!r}, which the training split lacks"
        raise error(reason, "add it to the training split, or remove it")
    if missing := sorted(set(classes) - set(names)):
        raise error(
            f"{split!r} has no folder for {len(missing)} of {len(classes)} training classes, such as {missing[0]!r}",
            "add the folders with their images, or remove these classes from the training split",
        )
    return classes


def class_order(names: list[str]) -> list[str]:
    """Folder names in the order of their labels."""
    numbers = list(map(str, range(len(names))))
    return numbers if set(names) == set(numbers) else sorted(names)


def _is_utf8(name: str) -> bool:
    """Whether a file name is valid UTF-8; Python represents other bytes as surrogates."""
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
        if not os.path.isdir(path):
            if not os.path.isfile(path):
                reason = "not a regular file" if os.path.exists(path) else "no such file or folder"
                raise ConfigError("images", path, reason=reason)
            found.images.append(path)
            continue
        files = dict(_walk(path))
        unreadable = {file: reason for file, reason in files.items() if reason}
        images = [file for file in files if file not in unreadable and file.lower().endswith(EXTENSIONS)]
        if not images:
            first = [f"; cannot read {printable(file)}: {reason}" for file, reason in unreadable.items()][:1]
            raise ConfigError("images", path, reason=f"the folder has no images ({', '.join(EXTENSIONS)}){''.join(first)}")
        found.images.extend(images)
        found.ignored.extend(file for file in files if file not in unreadable and not file.lower().endswith(EXTENSIONS))
        found.unreadable.update(unreadable)
    return found


def _walk(folder: str, root: str | None = None, visited: set[str] | None = None) -> Iterator[tuple[str, str | None]]:
    """(path, None or the reason why it cannot be read) of the files below a folder; each folder is listed once.

    root: real path of the top folder; visited: real paths of the folders listed so far.
    """
    real = os.path.realpath(folder)
    root, visited = root or real, set() if visited is None else visited
    if real in visited:
        return
    visited.add(real)
    status.current().record_progress()
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield folder, error.strerror
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if os.path.isdir(entry.path):
            if not (entry.is_symlink() and _is_listed_without_links(os.path.realpath(entry.path), root)):
                yield from _walk(entry.path, root, visited)
        elif os.path.isfile(entry.path):
            yield entry.path, None
        else:
            yield entry.path, "dangling link" if entry.is_symlink() else "not a regular file"


def _is_listed_without_links(folder: str, root: str) -> bool:
    """Whether a folder lies below `root` and is not hidden there, so that the walk reaches it anyway. Both: real paths."""
    inside = os.path.commonpath((folder, root)) == root
    return inside and not any(name.startswith(".") for name in os.path.relpath(folder, root).split(os.sep) if name != os.curdir)


def evaluation_split(root: Path, requested: str | None) -> str:
    """The evaluation split of a folder: the requested name, or the first of EVALUATION_NAMES that exists."""
    if requested is not None:
        return requested
    existing = [name for name in EVALUATION_NAMES if (root / name).is_dir()]
    if not existing:
        raise missing_evaluation_split(str(root))
    return existing[0]


def missing_evaluation_split(root: str) -> ConfigError:
    """The error for a folder without a split to evaluate on."""
    return ConfigError(
        "data.eval_split",
        None,
        reason=f"{root!r} has none of the folders {', '.join(EVALUATION_NAMES)}",
        hint=f"name one with --data.eval-split FOLDER, or {LAYOUT_HINT}",
    )
