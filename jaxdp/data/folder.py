"""A folder of images: ROOT/SPLIT/CLASS/IMAGE, classes being the names of the folders in alphabetical order."""

import os
from pathlib import Path

from jaxdp.config import ConfigError
from jaxdp.data.decode import ImageError

ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm")
EVALUATION_NAMES = ("val", "validation", "valid", "test")


class ImageFolder:
    """The encoded images of one split and their labels, in the order of class and file name."""

    def __init__(self, split: Path, classes: list[str] | None = None):
        """classes: those of the training split, where this is another. Raises ConfigError for what cannot be trained on."""
        try:
            self._read(split, classes)
        except OSError as error:
            raise ConfigError(f"data.directory: {error.filename!r} cannot be read: {error.strerror}") from None

    def _read(self, split: Path, classes: list[str] | None):
        if not split.parent.is_dir():
            raise ConfigError(f"data.directory: {str(split.parent)!r} is not allowed; there is no such folder")
        if not split.is_dir():
            raise ConfigError(f"data.directory: {str(split.parent)!r} is not allowed; it has no folder {split.name!r}")
        entries = [entry for entry in os.scandir(split) if not entry.name.startswith(".")]
        for entry in entries:
            if entry.is_symlink() and not os.path.exists(entry.path):
                raise ConfigError(f"data.directory: {entry.path!r} is a link to nothing; mend or remove it")
        found = sorted(entry.name for entry in entries if entry.is_dir())
        if not found:
            raise ConfigError(f"data.directory: {str(split)!r} has no class folders; put images into SPLIT/CLASS/IMAGE")
        self.classes = found if classes is None else classes
        if strangers := sorted(set(found) - set(self.classes)):
            raise ConfigError(f"data.directory: {str(split)!r} has the class {strangers[0]!r}, which training has not")
        if missing := sorted(set(self.classes) - set(found)):
            raise ConfigError(
                f"data.directory: {str(split)!r} lacks {len(missing)} of {len(self.classes)} classes, {missing[0]!r} first; "
                "an accuracy over the others would say too much"
            )
        self.paths, self.labels, others = [], [], []
        for label, name in enumerate(self.classes):
            files = sorted(entry.path for entry in os.scandir(split / name) if not entry.name.startswith("."))
            here = [path for path in files if path.lower().endswith(ENDINGS)]
            others += [path for path in files if not path.lower().endswith(ENDINGS)]
            if not here:
                raise ConfigError(f"data.directory: the class folder {str(split / name)!r} has no image ({', '.join(ENDINGS)})")
            self.paths += here
            self.labels += [label] * len(here)
        self.remarks = []
        if others:
            self.remarks.append(f"{len(others)} files in {split} do not end as images do and are left out, {others[0]} first")

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index) -> tuple[bytes, int]:
        try:
            with open(self.paths[index], "rb") as file:
                return file.read(), self.labels[index]
        except OSError as error:
            raise ImageError(error.strerror) from None

    def name(self, index) -> str:
        return self.paths[index]


def image_files(paths) -> tuple[list[str], list[str], dict[str, str]]:
    """(files, those left out, name -> reason of what cannot be read): each path that is a file, and what in each that is a
    folder, however deep, ends as images do. Links are followed; what is hidden is not looked at, as in training.

    Raises ConfigError for a path that is neither a file nor a folder, and for a folder without an image.
    """
    found, left_out, bad = [], [], {}
    for path in map(str, paths):
        if not os.path.isdir(path):
            if not os.path.isfile(path):
                what = "it is no regular file" if os.path.exists(path) else "there is no such file or folder"
                raise ConfigError(f"images: {path!r} is not allowed; {what}")
            found.append(path)
            continue
        inside = dict(_inside(path))
        unread = {file: reason for file, reason in inside.items() if reason}
        here = [file for file in inside if file not in unread and file.lower().endswith(ENDINGS)]
        if not here:
            told = "".join(f"; {file} cannot be read: {reason}" for file, reason in list(unread.items())[:1])
            raise ConfigError(f"images: the folder {path!r} has no image ({', '.join(ENDINGS)}){told}")
        found += here
        left_out += [file for file in inside if file not in unread and not file.lower().endswith(ENDINGS)]
        bad |= unread
    return found, left_out, bad


def _inside(folder: str, above: tuple[str, ...] = ()):
    """(path, None or why it cannot be read) of each file in a folder and those within it. above: folders that led here."""
    here = os.path.realpath(folder)
    if here in above:  # a link back: what it leads to is found without it
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield folder, error.strerror
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if os.path.isdir(entry.path):
            yield from _inside(entry.path, (*above, here))
        elif os.path.isfile(entry.path):
            yield entry.path, None
        else:
            yield entry.path, "it is a link to nothing" if entry.is_symlink() else "it is no regular file"


def evaluation_split(root: Path, asked: str | None) -> str:
    """The name of the evaluation split: as asked for, or the first of val, validation, valid, test that is there."""
    if asked is not None:
        return asked
    found = [name for name in EVALUATION_NAMES if (root / name).is_dir()]
    if not found:
        raise ConfigError(
            f"data.eval_split: None is not allowed; {str(root)!r} has none of {', '.join(EVALUATION_NAMES)}; name the folder"
        )
    return found[0]
