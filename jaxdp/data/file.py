"""The data source `file`: a table of paths and labels, arrays, CIFAR as published, or a data set of Hugging Face on a disk.

`data.directory` names a file with all splits, or a folder with one file for each split, such as train.csv and val.csv.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxdp.config import Config, Data
from jaxdp.data.cifar import Cifar
from jaxdp.data.datasets import EncodedItems, FileSource
from jaxdp.data.file_format import Format
from jaxdp.data.hugging_face import HuggingFace
from jaxdp.data.npz import Npz
from jaxdp.data.table import Table
from jaxdp.errors import ConfigError
from jaxdp.files import check_local

FORMATS: dict[str, type[Table] | type[Npz]] = {".csv": Table, ".tsv": Table, ".parquet": Table, ".npz": Npz}


class File(FileSource):
    """Data sets in the formats of others."""

    def data_set(self, config: Config) -> Format:
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
    if path.is_file() and path.suffix.lower() in FORMATS:
        return FORMATS[path.suffix.lower()](path, data)
    if path.is_dir():
        for folder_format in (HuggingFace, Cifar):
            if folder_format.is_in(path):
                return folder_format(path, data)
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in FORMATS and not file.name.startswith("."))
        if files:
            return SplitFiles(path, data, files)
    reason = "it has no known format" if path.exists() else "no such file or folder"
    hint = f"give a {', '.join(FORMATS)} file, a folder with a file for each split, such as train.csv and val.csv, "
    hint += "an extracted archive of CIFAR, or a saved DatasetDict; images in SPLIT/CLASS/ are --data.source folder"
    if path.is_file() and path.suffix.lower() in (".gz", ".tgz", ".zip", ".tar"):
        hint = "extract it, and give the folder"
    inside = [folder for folder in sorted(path.glob("*/")) if HuggingFace.is_in(folder) or Cifar.is_in(folder)]
    if inside:
        hint = f"use --data.directory {inside[0]}"
    raise ConfigError("data.directory", str(path), reason=reason, hint=hint)


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
        return list(self.files)

    def read(self, name: str, classes: list[str] | None) -> EncodedItems:
        file = self.files[name]
        return FORMATS[file.suffix.lower()](file, self.data).whole(classes)
