"""The data source `file`: a table of paths and labels, arrays, CIFAR as published, or a data set of Hugging Face on a disk.

`data.directory` names a file with all splits, or a folder with one file for each split, such as train.csv and val.csv.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxdp.config import Config, Data
from jaxdp.data.cifar import Cifar, version_in
from jaxdp.data.datasets import EncodedItems, FileSource
from jaxdp.data.file_format import Format
from jaxdp.data.hugging_face import HuggingFace
from jaxdp.data.npz import Npz
from jaxdp.data.table import Table
from jaxdp.errors import ConfigError
from jaxdp.files import check_local

FORMATS: dict[str, type[Table] | type[Npz]] = {".csv": Table, ".tsv": Table, ".parquet": Table, ".npz": Npz}
ARCHIVES = (".gz", ".tgz", ".zip", ".tar")


class File(FileSource):
    """Data sets in the formats of others."""

    def data_set(self, config: Config) -> Format:
        """See `FileSource.data_set`."""
        directory = config.data.directory or ""
        check_local(directory, "data.directory")
        try:
            return open_format(Path(directory), config.data)
        except OSError as error:  # a folder that this user must not list
            raise ConfigError("data.directory", error.filename, reason=error.strerror or str(error)) from None

    def splits(self, config: Config) -> Sequence[tuple[str, EncodedItems]]:
        """See `FileSource.splits`; also raises ConfigError if only one of them has names as labels."""
        (train_name, train), (name, evaluation) = found = super().splits(config)
        if isinstance(train.classes, list) != isinstance(evaluation.classes, list):
            kinds = ("names", "numbers") if isinstance(train.classes, list) else ("numbers", "names")
            reason = f"the labels of {train_name} are {kinds[0]}, those of {name} {kinds[1]}"
            raise ConfigError("data.directory", config.data.directory, reason=reason, hint="use the same labels in both")
        return found


def open_format(path: Path, data: Data) -> Format:
    """The data set at a path. Raises ConfigError if there is none of a known format."""

    def error(reason: str, hint: str) -> ConfigError:
        return ConfigError("data.directory", str(path), reason=reason, hint=hint)

    def unknown(hint: str) -> ConfigError:
        return error("it has no known format", hint)

    known = f"give a {', '.join(FORMATS)} file, or a folder with a file for each split, such as train.csv and val.csv"
    if path.is_file():
        if path.suffix.lower() not in FORMATS:
            raise unknown("extract it, and give the folder" if path.suffix.lower() in ARCHIVES else known)
        return FORMATS[path.suffix.lower()](path, data)
    if not path.is_dir():
        reason = "not a regular file" if path.exists() else "no such file or folder"
        raise error(reason, "a relative path starts in the current directory")
    if HuggingFace.is_in(path):
        return HuggingFace(path, data)
    if version := version_in(path):
        return Cifar(path, data, version)
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in FORMATS and not file.name.startswith("."))
    if not files:
        folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
        inside = [folder for folder in folders if HuggingFace.is_in(folder) or version_in(folder)]
        hint = f"use --data.directory {inside[0]}" if inside else f"{known}; images in SPLIT/CLASS/ are --data.source folder"
        raise unknown(hint)
    return SplitFiles(path, data, files)


class SplitFiles(Format):
    """A folder with a file for each split, SPLIT.SUFFIX."""

    has_columns = matches_classes = True  # if its files have columns and names as labels

    def __init__(self, path: Path, data: Data, files: Sequence[Path]) -> None:
        super().__init__(path, data)
        self.files = {file.stem: file for file in files}
        for file in files:
            if self.files[file.stem] != file:
                reason = f"it has both {file.name} and {self.files[file.stem].name}"
                raise self.error(reason, "remove one of them, or move it to another folder")

    def names(self) -> Sequence[str]:
        """See `Splits.names`."""
        return list(self.files)

    def read(self, name: str, classes: list[str] | None) -> EncodedItems:
        """See `Format.read`."""
        file = self.files[name]
        return FORMATS[file.suffix.lower()](file, self.data).whole(classes)
