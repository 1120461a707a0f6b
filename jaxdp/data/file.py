"""The data source `file`: a table of paths and labels, arrays, CIFAR as published, or a data set of Hugging Face on a disk.

`data.directory` names a file with all splits, or a folder with one file for each split, such as train.csv and val.csv, or with
its shards, such as train-00000-of-00002.parquet.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxdp.config import Config, Data
from jaxdp.data.cifar import Cifar
from jaxdp.data.datasets import EncodedItems, FileSource, listed
from jaxdp.data.file_format import FileFormat, Format
from jaxdp.data.hugging_face import HuggingFace
from jaxdp.data.npz import Npz
from jaxdp.data.table import Table
from jaxdp.errors import ConfigError
from jaxdp.files import check_local
from jaxdp.targets import Target, own_target

FORMATS: dict[str, type[FileFormat]] = {".csv": Table, ".tsv": Table, ".parquet": Table, ".npz": Npz}
SHARD = r"(?P<split>.+)-(?P<number>\d+)-of-(?P<total>\d+)(-[0-9a-f]{8,})?"  # as Hugging Face names them


class File(FileSource):
    """Data sets in the formats of others."""

    def data_set(self, config: Config) -> Format:
        directory = config.data.directory or ""
        check_local(directory, "data.directory")
        try:
            return open_format(Path(directory), config.data, own_target(config.task))
        except OSError as error:  # a folder that this user must not list
            raise ConfigError("data.directory", error.filename, reason=error.strerror or str(error)) from None

    def splits(self, config: Config) -> Sequence[tuple[str, EncodedItems]]:
        """See `FileSource.splits`; also raises ConfigError if only one of them has names as labels."""
        (train_name, train), (name, evaluation) = found = super().splits(config)
        if isinstance(train.classes, list) != isinstance(evaluation.classes, list):
            kinds = ("names", "numbers") if isinstance(train.classes, list) else ("numbers", "names")
            reason = f"the labels of {train_name} are {kinds[0]}, the labels of {name} {kinds[1]}"
            raise ConfigError("data.directory", config.data.directory, reason=reason, hint="use the same labels in both")
        return found


def open_format(path: Path, data: Data, target: Target | None = None) -> Format:
    """The data set at a path. target: of a registered task. Raises ConfigError if there is none of a known format."""
    if path.is_file() and path.suffix.lower() in FORMATS:
        if Shard.of(path).total > 1:
            raise ConfigError(
                "data.directory", str(path), reason="it is one shard of several", hint=f"give the folder {path.parent}"
            )
        return FORMATS[path.suffix.lower()](path, data, target)
    if path.is_dir():
        for folder_format in (HuggingFace, Cifar):
            if folder_format.is_in(path):
                return folder_format(path, data, target)
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in FORMATS and not file.name.startswith("."))
        if files:
            return SplitFiles(path, data, target, files=files)
    reason = "it has no known format" if path.exists() else "no such file or folder"
    hint = f"give a {', '.join(FORMATS)} file, a folder with a file for each split, such as train.csv and val.csv, "
    hint += "an extracted archive of CIFAR, or a saved DatasetDict; images in SPLIT/CLASS/ are --data.source folder"
    if path.is_file() and path.suffix.lower() in (".gz", ".tgz", ".zip", ".tar"):
        hint = "extract it, and give the folder"
    inside = [
        folder for folder in sorted(path.glob("*/")) if HuggingFace.is_in(folder) or Cifar.is_in(folder) or _shards(folder)
    ]
    if inside:
        hint = f"use --data.directory {inside[0]}"
    raise ConfigError("data.directory", str(path), reason=reason, hint=hint)


def _shards(folder: Path) -> bool:
    """Whether a folder, such as `data` of a Hugging Face repository, has shards of splits."""
    return any(file.suffix.lower() in FORMATS and Shard.of(file).total for file in folder.iterdir())


class Shard(NamedTuple):
    """What the name of a file says: SPLIT.SUFFIX, or SPLIT-NUMBER-of-TOTAL.SUFFIX. total: 0 for a whole split."""

    split: str
    number: int
    total: int
    file: Path

    @classmethod
    def of(cls, file: Path) -> "Shard":
        match = re.fullmatch(SHARD, file.stem)
        return cls(match["split"], int(match["number"]), int(match["total"]), file) if match else cls(file.stem, 0, 0, file)

    def name_of(self, number: int) -> str:
        """The name of another shard of the set."""
        return f"{self.split}-{number:05}-of-{self.total:05}{self.file.suffix}"


class SplitFiles(Format):
    """A folder with a file for each split, or with its shards."""

    has_columns = matches_classes = True  # if its files have columns and names as labels

    def __init__(self, path: Path, data: Data, target: Target | None, *, files: Sequence[Path]) -> None:
        super().__init__(path, data, target)
        self.shards = [Shard.of(file) for file in files]

    def names(self) -> Sequence[str]:
        return list(dict.fromkeys(shard.split for shard in self.shards))

    def read(self, name: str, classes: list[str] | None) -> EncodedItems:
        files = self._files(name)
        file_format = FORMATS[files[0].suffix.lower()]
        return file_format.whole([file_format(file, self.data, self.target) for file in files], classes)

    def _files(self, name: str) -> list[Path]:
        """The files of a split in order. Raises ConfigError unless they are one file, or each shard of one set once."""
        first, *others = shards = sorted(shard for shard in self.shards if shard.split == name)
        numbers = {shard.number: shard for shard in shards}
        for shard in others:
            if (shard.total, shard.file.suffix) != (first.total, first.file.suffix) or numbers[shard.number] != shard:
                reason = f"it has both {first.file.name} and {shard.file.name}"
                raise self.error(reason, "remove one of them, or move it to another folder")
        start = 0 if 0 in numbers else 1
        if missing := [first.name_of(number) for number in range(start, start + first.total) if number not in numbers]:
            raise self.error(f"it lacks {listed(missing)}", "a split is all of its shards; add what is missing")
        return [shard.file for shard in shards]
