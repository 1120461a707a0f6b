"""Tables of image paths and labels: CSV and TSV in UTF-8, and Parquet.

The first line of a CSV or TSV file names the columns. Paths are relative to the folder of the table. A column `split` divides
a table; without it a table is one split.
"""

import csv
import os
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxdp.data import progress
from jaxdp.data.decode import ImageError
from jaxdp.data.file_format import Format
from jaxdp.data.labels import Labels
from jaxdp.errors import ConfigError, first_line, plural, printable
from jaxdp.files import read_regular

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SPLIT_COLUMN = "split"
TEXT_TYPES = ("string", "large_string", "string_view")  # of Parquet
CHECKED = 10_000  # rows of a split, evenly spaced, whose files must exist at the start; others are found when they are read
ROWS_AT_A_TIME = 2**16

Row = tuple[int, str, str, str]
"""(number in the file, path, label, split)"""


class Table(Format):
    """A table on a disk, read once."""

    has_columns = matches_classes = True

    @cached_property
    def rows(self) -> "Rows":
        """All rows."""
        delimiter = DELIMITERS.get(self.path.suffix.lower())
        return Rows(self, _parquet_rows(self) if delimiter is None else _csv_rows(self, delimiter))

    def names(self) -> Sequence[str]:
        """See `Splits.names`."""
        if list(self.rows.splits) == [""]:
            hint = "add it, with train or val in each row, or give a folder with train.csv and val.csv"
            raise self.error(f"no column {SPLIT_COLUMN!r}", hint)
        return list(self.rows.splits)

    def read(self, name: str, classes: list[str] | None) -> "TableItems":
        """See `Format.read`."""
        of_row = np.asarray(self.rows.split_of_row, np.int32)
        return TableItems(self, np.flatnonzero(of_row == self.rows.splits[name]), classes)

    def whole(self, classes: list[str] | None) -> "TableItems":
        """The images of a file that is a single split; see `Splits.open`."""
        return TableItems(self, np.arange(len(self.rows.paths)), classes)

    def columns(self, header: Sequence[str]) -> tuple[int, int, int | None]:
        """Positions of the path, the label and the split. Raises ConfigError for a column that is missing or not unique."""
        image, label = (header.index(self.column(header, kind)) for kind in ("image", "label"))
        lower = [name.lower() for name in header]
        return image, label, lower.index(SPLIT_COLUMN) if SPLIT_COLUMN in lower else None


class Rows:
    """The rows of a table. splits: name -> number."""

    def __init__(self, table: Table, rows: Iterator[Row]) -> None:
        self.paths: list[str] = []
        self.numbers, self.split_of_row = array("q"), array("i")
        self.splits: dict[str, int] = {}
        self.labels = Labels(self.name, table.error)
        for number, path, label, split in rows:
            self.numbers.append(number)
            if not path:
                raise table.error(f"row {number} has no path", "add it, or remove the row")
            self.paths.append(path)
            self.labels.append(label)
            self.split_of_row.append(self.splits.setdefault(split, len(self.splits)))
            if len(self.numbers) % ROWS_AT_A_TIME == 0:
                progress.report()
        if not self.numbers:
            raise table.error("it has no rows")

    def name(self, row: int) -> str:
        """A row, counted from 0, as users count it: in CSV by its line, of which the first names the columns."""
        return f"row {self.numbers[row]}"


class TableItems:
    """The encoded images of some rows of a table. classes: see `EncodedItems`; labels: [N] int32; paths: as in the table."""

    def __init__(self, table: Table, rows: np.ndarray, classes: list[str] | None) -> None:
        self.table, self.rows, self.folder = table, rows, table.path.parent
        self.labels, self.classes = table.rows.labels.of(rows, classes)
        self.warnings = self._duplicates()

    @property
    def paths(self) -> Iterator[str]:
        """The paths of the images."""
        return (self.table.rows.paths[row] for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """(encoded image, label). Raises ImageError for a file that cannot be read."""
        try:
            return read_regular(self._path(index)), int(self.labels[index])
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise ImageError(getattr(error, "strerror", None) or first_line(error)) from None

    def _path(self, index: int) -> Path:
        return self.folder / self.table.rows.paths[self.rows[index]]

    def name(self, index: int) -> str:
        """The image's path and row, printable."""
        return printable(f"{self._path(index)} ({self.table.rows.name(self.rows[index])} of {self.table.path.name})", 4096)

    def file_name(self, index: int) -> str:
        """The name of the image's file."""
        return self._path(index).name

    def start(self) -> None:
        """Look for the files, before images are read. Raises ConfigError for the first of CHECKED rows without a file."""
        for index in np.unique(np.linspace(0, len(self) - 1, CHECKED).astype(np.int64)):
            progress.report()
            if not os.path.exists(self._path(index)):
                reason = f"{self.table.rows.name(self.rows[index])}: no file {str(self._path(index))!r}"
                raise self.table.error(reason, "fix the path, which is relative to the folder of the table, or remove the row")

    def _duplicates(self) -> list[str]:
        """A warning of paths that several rows have. Raises ConfigError if their labels differ."""
        repeated, first_with = 0, dict[str, int]()
        for index, path in enumerate(self.paths):
            first = first_with.setdefault(path, index)
            if first == index:
                continue
            repeated += 1
            if self.labels[first] != self.labels[index]:
                rows = " and ".join(self.table.rows.name(self.rows[one]) for one in (first, index))
                raise self.table.error(f"{rows} give {path!r} different labels", "remove one of them")
        if not repeated:
            return []
        return [f"{self.table.path.name} names an image again in {plural(repeated, 'row')}; it counts each time"]


def _csv_rows(table: Table, delimiter: str) -> Iterator[Row]:
    try:
        with open(table.path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
            header = [name.strip() for name in _utf8(table, next(reader, []), 1)]
            if not header:
                return
            image, label, split = table.columns(header)
            for row in filter(None, reader):  # without empty lines
                if len(row) != len(header):
                    reason = f"row {reader.line_num} has {plural(len(row), 'value')}, the first row {len(header)}"
                    raise table.error(reason, "put values that contain the separator in double quotes")
                _utf8(table, row, reader.line_num)
                yield reader.line_num, row[image], row[label].strip(), "" if split is None else row[split].strip()
    except csv.Error as error:
        raise table.error(f"row {reader.line_num}: {error}", "check the quotes") from None
    except OSError as error:
        raise table.error(error.strerror or str(error)) from None


def _utf8(table: Table, row: list[str], number: int) -> list[str]:
    """The row. Raises ConfigError if it was not UTF-8: Python represents other bytes as surrogates."""
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        raise table.error(f"row {number} is not UTF-8", "save the file as UTF-8") from None
    return row


def _parquet_rows(table: Table) -> Iterator[Row]:
    parquet, number = table.package("pyarrow.parquet"), 0
    try:
        with parquet.ParquetFile(table.path) as file:
            schema = file.schema_arrow
            columns = [schema.names[position] for position in table.columns(schema.names) if position is not None]
            if str(kind := schema.field(columns[0]).type) not in TEXT_TYPES:
                hint = "load images inside Parquet with the package datasets, and save them with save_to_disk"
                raise table.error(f"the column {columns[0]!r} has the type {kind}, not text", hint)
            for batch in file.iter_batches(ROWS_AT_A_TIME, columns=columns):
                values = [batch.column(name).to_pylist() for name in columns]
                for row in zip(*values, strict=True):
                    number += 1
                    texts = ["" if value is None else str(value).strip() for value in row]
                    path, label, split = (*texts, "")[:3]
                    yield number, path, label, split
    except ConfigError:
        raise
    except Exception as error:  # OSError, ArrowInvalid, ..., by damage
        raise table.error(f"damaged or not a Parquet file: {first_line(error)}", "write it again") from None
