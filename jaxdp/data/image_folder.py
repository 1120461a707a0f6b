"""Reads images from folders: ROOT/SPLIT/CLASS/IMAGE, where the class names are the folder names in alphabetical order.

Images may lie in folders below CLASS. Folders 0, 1, ... N - 1 are in the order of their numbers, as in ImageNet-V2.
"""

import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxdp.data import progress
from jaxdp.data.decode import read_image
from jaxdp.errors import ConfigError, plural, printable
from jaxdp.files import check_local, expand_user

EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm")
SIZED = 1000


@dataclass(frozen=True)
class ImageFolder:
    """The encoded images of a split, ordered by class and file name. labels: indices into `classes`."""

    paths: list[str]
    labels: list[int]
    classes: list[str]
    warnings: list[str]

    @classmethod
    def open(cls, split: Path, classes: list[str] | None = None) -> "ImageFolder":
        """List a split. classes: of the training split, which this split must have too.

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

        top = os.path.realpath(split)

        def files(name: str) -> Iterator[str]:
            for path, reason in _walk(name, top, visited={top}):  # no class is a link to the split, or to what contains it
                if reason and os.path.isdir(path):
                    raise ConfigError("data.directory", path, reason=reason)
                yield path

        entries = [entry for entry in os.scandir(split) if not entry.name.startswith(".")]
        for entry in entries:
            if entry.is_symlink() and not os.path.exists(entry.path):
                raise error(f"dangling link {entry.path!r}", "fix or remove it")
        names = [entry.name for entry in entries if entry.is_dir()]
        for name in names:
            if name.encode(errors="replace").decode() != name:  # Python represents other bytes as surrogates
                raise error(f"class folder name {name!r} is not UTF-8", "rename it")
        names = match_classes(names, classes, split=split.name, error=error)
        images = class_images([str(split / name) for name in names], files, error)
        strays = sorted(entry.path for entry in entries if not entry.is_dir() and is_image(entry.name))
        return cls(images.paths, images.labels, classes or names, ignored_warnings(str(split), strays, images.ignored))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """(encoded image, label). Raises what `read_image` raises."""
        return read_image(self.paths[index]), self.labels[index]

    def name(self, index: int) -> str:
        """The image's path, printable."""
        return printable(self.paths[index], 4096)

    def identity(self) -> list[str]:
        """What tells this split from others, wherever it lies: see `identity`."""
        return identity(self.relative_names(), lambda index: file_size(self.paths[index]))

    def relative_names(self) -> list[str]:
        """CLASS/IMAGE for each image."""
        return below_common_folder(self.paths)


def identity(names: list[str], size_of: Callable[[int], int]) -> list[str]:
    """The names of all files, and the sizes of SIZED of them, evenly spaced: asking for a size may take a millisecond."""
    step = -(-len(names) // SIZED) or 1
    return [*names, *(str(size_of(index)) for index in range(0, len(names), step))]


def below_common_folder(paths: list[str]) -> list[str]:
    """Paths without the folder that all have in common, which the first and the last in alphabetical order have."""
    common = os.path.commonpath([os.path.dirname(min(paths)), os.path.dirname(max(paths))])
    return [path[len(common) :] if common else f"/{path}" for path in paths]


def file_size(path: str | Path) -> int:
    """The size of a file in bytes; -1 if there is none."""
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return -1


def is_image(name: str) -> bool:
    """Whether a file is taken for an image because of its extension."""
    return name.lower().endswith(EXTENSIONS)


class ClassImages(NamedTuple):
    """The images of class folders, with labels by the order of these. ignored: files without an image extension."""

    paths: list[str]
    labels: list[int]
    ignored: list[str]


def class_images(folders: list[str], files: Callable[[str], Iterable[str]], error: Callable[[str], ConfigError]) -> ClassImages:
    """The images of class folders. files: folder -> the files below it, in order. Raises `error` for one without images."""
    found = ClassImages([], [], [])
    for label, folder in enumerate(folders):
        before = len(found.paths)
        for file in files(folder):
            (found.paths if is_image(file) else found.ignored).append(file)
        if len(found.paths) == before:
            raise error(f"class folder {folder!r} has no images ({', '.join(EXTENSIONS)})")
        found.labels.extend([label] * (len(found.paths) - before))
    return found


def ignored_warnings(split: str, strays: list[str], others: list[str]) -> list[str]:
    """What users should know about files of a split that are not used. strays: images beside the class folders."""
    kinds = ((strays, "image", "without a class, directly in"), (others, "file", "without an image extension in"))
    return [
        f"ignored {plural(len(files), kind)} {why} {split}, {printable(files[0])} first" for files, kind, why in kinds if files
    ]


def match_classes(
    names: list[str], classes: list[str] | None, *, split: str, error: Callable[[str, str], ConfigError]
) -> list[str]:
    """The class folders `names` of a split in the order of `classes`, from the training split (None: of their labels).

    Names that differ only in their Unicode form (NFC, NFD) are equal. error: (reason, hint) -> error; raised if there are none,
    if the names differ, or are equal within a split.
    """
    if not names:
        raise error(f"{split!r} has no class folders", "arrange images as SPLIT/CLASS/IMAGE")
    if same := same_names(names):
        reason = (
            f"{split!r} has two class folders {same[0]!r} that differ only in their Unicode form, {same[0]!a} and {same[1]!a}"
        )
        raise error(reason, "merge them into one")
    by_class = {normalized(name): name for name in names}
    if classes is None:
        return class_order(names)
    expected = list(map(normalized, classes))
    if unknown := sorted(by_class.keys() - set(expected)):
        reason = f"{split!r} has the class {unknown[0]!r}, which the training split lacks"
        raise error(reason, "add it to the training split, or remove it")
    if missing := sorted(set(expected) - by_class.keys()):
        raise error(
            f"{split!r} has no folder for {len(missing)} of {len(classes)} training classes, such as {missing[0]!r}",
            "add the folders with their images, or remove these classes from the training split",
        )
    return [by_class[name] for name in expected]


def normalized(name: str) -> str:
    """A class name in the Unicode form for comparisons: macOS decomposes letters with accents, Linux does not."""
    return unicodedata.normalize("NFC", name)


def same_names(names: Iterable[str]) -> tuple[str, str] | None:
    """The first two class names that differ only in their Unicode form."""
    first_of: dict[str, str] = {}
    pairs = ((first_of.setdefault(normalized(name), name), name) for name in names)
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def class_order(names: list[str]) -> list[str]:
    """Class names in the order of their labels."""
    numbers = list(map(str, range(len(names))))
    return numbers if set(names) == set(numbers) else sorted(names)


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
