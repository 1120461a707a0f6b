"""Tables of images and labels: CSV and TSV in UTF-8 with paths, and Parquet with paths or with the encoded images.

The first line of a CSV or TSV file names the columns. Paths are relative to the folder of the table. A column `split` divides
a table; without it a table is one split.
"""

import contextlib
import csv
import os
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numpy as np

from jaxdp.data import progress
from jaxdp.data.datasets import HOLDOUT_HINT, listed
from jaxdp.data.decode import ImageError, read_image
from jaxdp.data.file_format import FileFormat, measured, numbered, several
from jaxdp.data.image_folder import file_size, identity
from jaxdp.errors import ConfigError, first_line, plural, printable

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SPLIT_COLUMN = "split"
IMAGE_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")  # of Parquet
IMAGE_PARTS = ("bytes", "path")  # of a struct, as Hugging Face has it
LONGEST_PATH = 4096
CHECKED = 10_000  # rows of a split, evenly spaced, whose files must exist at the start; others are found when they are read
ROWS_AT_A_TIME = 2**10
MEMORY_SHARE = 0.5  # of the machine's memory that tables may take

Row = tuple[int, str | bytes, Any, str | None]
"""(number in the file, path or encoded image, label, split; None without a column `split`)"""


@dataclass
class TableRows:
    """Rows of a table, or of all shards of a split.

    numbers: of their lines in the file; images: paths, or encoded images; labels: see `numbered`; tables: the shards.
    """

    numbers: array = field(default_factory=lambda: array("q"))
    images: list[str | bytes] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    tables: list["Table"] = field(default_factory=list)

    def add(self, other: "TableRows") -> None:
        """Append the rows of a shard."""
        for column in fields(self):
            getattr(self, column.name).extend(getattr(other, column.name))


class Table(FileFormat):
    """A table on a disk, read once."""

    has_columns = matches_classes = True

    @cached_property
    def splits(self) -> dict[str, TableRows]:
        """The rows of each split; "" is the whole of a table without a column `split`."""
        _check_size([self])
        return self._read(divided=True)

    def names(self) -> Sequence[str]:
        if "" in self.splits:
            hint = f"add it, with train or val in each row, give a folder with train.csv and val.csv, or {HOLDOUT_HINT}"
            raise self.error(f"no column {SPLIT_COLUMN!r}", hint)
        return list(self.splits)

    def undivided(self, train: str) -> "TableItems | None":
        return self.read("", None) if "" in self.splits else None

    def read(self, name: str, classes: list[str] | None) -> "TableItems":
        return TableItems(self, self.splits[name], classes)

    @classmethod
    def whole(cls, files: Sequence[Self], classes: list[str] | None) -> "TableItems":
        _check_size(files)
        rows = TableRows()
        for table in files:
            rows.add(table._read(divided=False)[""])
        return TableItems(files[0], rows, classes)

    def _read(self, *, divided: bool) -> dict[str, TableRows]:
        splits: dict[str, TableRows] = defaultdict(TableRows)
        delimiter = DELIMITERS.get(self.path.suffix.lower())
        for number, image, label, split in self._csv(delimiter) if delimiter else self._parquet():
            if not image or (divided and split == ""):
                kind = SPLIT_COLUMN if image else "path" if delimiter else "image"
                raise self.error(f"row {number} has no {kind}", "add it, or remove the row")
            rows = splits[split or "" if divided else ""]
            rows.numbers.append(number)
            rows.images.append(image)
            rows.labels.append(sys.intern(label) if isinstance(label, str) else label)
            rows.tables.append(self)
            if number % ROWS_AT_A_TIME == 0:
                progress.report()
        if not splits:
            raise self.error("it has no rows")
        return splits

    def _columns(self, header: list[str]) -> tuple[int, list[int], int | None]:
        """Positions of the image, of the labels and, if there is one, of the split."""
        split = [position for position, name in enumerate(header) if name.lower() == SPLIT_COLUMN]
        try:
            image = self.column(header, "image", self.data.image_column)
            return header.index(image), [header.index(name) for name in self.label_columns(header)], next(iter(split), None)
        except ConfigError:
            if any(name and self._is_file(name) for name in header):
                hint = f"add path{DELIMITERS.get(self.path.suffix.lower(), ',')}label or the like in front of it"
                raise self.error(f"its first line does not name the columns, but is {listed(header)}", hint) from None
            delimiter = DELIMITERS.get(self.path.suffix.lower())
            if delimiter and len(header) == 1:
                reason = f"with the separator {delimiter!r} it has only the column {printable(repr(header[0]), 80)}"
                raise self.error(reason, "separate the columns by commas in .csv, and by tabs in .tsv") from None
            raise

    def _csv(self, delimiter: str) -> Iterator[Row]:
        number = 0
        try:
            with open(self.path, newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
                header = [name.strip() for name in next(reader, [])]
                image, labels, split = self._columns(header)
                for row in filter(None, reader):  # without empty lines
                    number = reader.line_num
                    if len(row) != len(header):
                        reason = f"row {number} has {plural(len(row), 'value')}, the first row {len(header)}"
                        raise self.error(reason, "put values that contain the separator in double quotes")
                    own = [row[label].strip() for label in labels]
                    yield number, row[image], own if len(own) > 1 else own[0], None if split is None else row[split].strip()
        except csv.Error as error:
            raise self.error(f"row {reader.line_num}: {error}", "check the quotes") from None
        except UnicodeDecodeError:
            raise self.error(f"it is not UTF-8, after row {number}", "save the file as UTF-8") from None
        except OSError as error:
            raise self.error(error.strerror or str(error)) from None

    def _parquet(self) -> Iterator[Row]:
        try:
            from pyarrow import parquet, types
        except ImportError:
            raise self.error("the package pyarrow is not installed", "pip install -e '.[hf]'") from None
        number = 0
        try:
            with parquet.ParquetFile(self.path) as file:
                schema = file.schema_arrow
                image_column, label_columns, split_column = self._columns(schema.names)
                positions = [image_column, *label_columns, *([] if split_column is None else [split_column])]
                names = [schema.names[position] for position in positions]
                kind = schema.field(names[0]).type
                inner = kind.value_type if types.is_dictionary(kind) else kind
                parts = [part.type for part in inner if part.name in IMAGE_PARTS] if types.is_struct(inner) else [inner]
                if not {*map(str, parts)} & {*IMAGE_TYPES}:
                    hint = "store paths, encoded images, or both as Hugging Face does: struct<bytes, path>"
                    raise self.error(f"the column {names[0]!r} has the type {kind}, not text or bytes", hint)
                for batch in file.iter_batches(ROWS_AT_A_TIME, columns=[*dict.fromkeys(names)]):
                    for image, *row in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                        number += 1
                        values = [value.strip() if isinstance(value, str) else value for value in row]
                        own, split = values[: len(label_columns)], values[len(label_columns) :]
                        label = own if len(own) > 1 else own[0]
                        yield number, _image(image), label, ("" if split[0] is None else str(split[0])) if split else None
        except ConfigError:
            raise
        except Exception as error:  # OSError, ArrowInvalid, ..., by damage
            raise self.error(f"damaged or not a Parquet file: {first_line(error)}", "write it again") from None

    def _is_file(self, path: str) -> bool:
        try:
            return (self.path.parent / path).is_file()
        except (OSError, ValueError):  # too long, or with a null byte
            return False


def _check_size(tables: Sequence[Table]) -> None:
    """Raise ConfigError for files that are too large for the memory, such as Parquet with all images of ImageNet."""
    size = sum(table.path.stat().st_size for table in tables if table.path.is_file())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > MEMORY_SHARE * memory:
        hint = "load them with Hugging Face's package datasets, and save them with save_to_disk; or write the images into files"
        reason = f"tables are read into memory, and these take {size / 2**30:,.1f} GiB; the machine has {memory / 2**30:,.1f}"
        raise tables[0].error(reason, hint)


def _image(value: Any) -> str | bytes:
    """The path or the encoded image in a value of a Parquet column; empty without one."""
    if isinstance(value, dict):  # of Hugging Face: the image, or else its path
        return value.get("bytes") or (value.get("path") or "").strip()
    if isinstance(value, bytes) and len(value) <= LONGEST_PATH:
        with contextlib.suppress(UnicodeDecodeError):  # of an image
            text = value.decode("utf-8")
            value = text if text.isprintable() else value
    return value.strip() if isinstance(value, str) else value or b""


class TableItems:
    """The encoded images of some rows of tables in a folder. classes: see `EncodedItems`; labels: [N] int32, or
    [N, C] float32 for several labels."""

    def __init__(self, table: Table, rows: TableRows, classes: list[str] | None) -> None:
        self.table, self.rows = table, rows
        self.labels: np.ndarray
        self.classes: int | list[str]
        if table.target is not None:
            self.labels = measured(rows.labels, table.target, row_name=self._row, error=self.error)
            self.classes = 0
        elif table.has_several_labels:
            data = table.data
            options: dict[str, Any] = {"columns": data.label_column, "separator": data.label_separator}
            self.labels, self.classes = several(rows.labels, classes, **options, row_name=self._row, error=self.error)
        else:
            self.labels, self.classes = numbered(rows.labels, classes, row_name=self._row, error=self.error)
        self.warnings = self._duplicates()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        """(encoded image, label). Raises what `read_image` raises."""
        image = self.rows.images[index]
        try:
            return image if isinstance(image, bytes) else read_image(self._path(image)), self.labels[index]
        except ImageError:
            raise
        except ValueError as error:  # a null byte in the path
            raise ImageError(first_line(error)) from None

    def _path(self, image: str) -> Path:
        return self.table.path.parent / image

    def error(self, reason: str, hint: str) -> ConfigError:
        """An error of the table, or of the folder of the shards."""
        place = self.table.path.parent if self._has_shards else self.table.path
        return ConfigError("data.directory", str(place), reason=reason, hint=hint)

    @property
    def _has_shards(self) -> bool:
        return self.rows.tables[-1] is not self.table

    def _row(self, index: int) -> str:
        return self._row_of_file(index) if self._has_shards else f"row {self.rows.numbers[index]}"

    def _row_of_file(self, index: int) -> str:
        return f"row {self.rows.numbers[index]} of {self.rows.tables[index].path.name}"

    def name(self, index: int) -> str:
        """The image's path and row, printable."""
        image, row = self.rows.images[index], self._row_of_file(index)
        return printable(row if isinstance(image, bytes) else f"{self._path(image)} ({row})", 4096)

    def identity(self) -> list[str]:
        """What tells these rows from others, wherever the table lies: see `identity`."""
        return identity(self.relative_names(), lambda index: self._size(self.rows.images[index]))

    def relative_names(self) -> list[str]:
        """The path of each image below the folder of the table, or the checksum of an encoded one."""
        images, folder = self.rows.images, f"{self.table.path.parent}/"
        return [image.removeprefix(folder) if isinstance(image, str) else str(google_crc32c.value(image)) for image in images]

    def _size(self, image: str | bytes) -> int:
        return len(image) if isinstance(image, bytes) else file_size(self._path(image))

    def start(self) -> None:
        """Look for the files, before images are read. Raises ConfigError for the first of CHECKED rows without a file."""
        for index in np.unique(np.linspace(0, len(self) - 1, CHECKED).astype(np.int64)):
            progress.report()
            image = self.rows.images[index]
            if isinstance(image, str) and not os.path.exists(self._path(image)):
                reason = f"{self._row(index)}: no file {str(self._path(image))!r}"
                raise self.error(reason, "fix the path, which is relative to the folder of the table, or remove the row")

    def _duplicates(self) -> list[str]:
        """A warning of paths that several rows have. Raises ConfigError if their labels differ."""
        first_with: dict[str, int] = {}
        repeated = 0
        for index, path in enumerate(self.rows.images):
            if isinstance(path, bytes):
                continue
            first = first_with.setdefault(path, index)
            repeated += first != index
            if not np.array_equal(self.labels[first], self.labels[index]):
                reason = f"{self._row(first)} and {self._row(index)} give {path!r} different labels"
                raise self.error(reason, "remove one of them")
        text = f"{self.table.path.name} names an image again in {plural(repeated, 'row')}; it counts each time"
        return [text] if repeated else []
