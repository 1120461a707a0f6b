"""Tables of image paths and labels: CSV and TSV in UTF-8, and Parquet.

The first line of a CSV or TSV file names the columns. Paths are relative to the folder of the table. A column `split` divides
a table; without it a table is one split.
"""

import csv
import os
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data import progress
from jaxdp.data.decode import ImageError, read_image
from jaxdp.data.file_format import Format, numbered
from jaxdp.data.image_folder import file_size, identity
from jaxdp.errors import ConfigError, first_line, plural, printable

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SPLIT_COLUMN = "split"
TEXT_TYPES = ("string", "large_string", "string_view")  # of Parquet
CHECKED = 10_000  # rows of a split, evenly spaced, whose files must exist at the start; others are found when they are read
ROWS_AT_A_TIME = 2**16

Row = tuple[int, str, Any, str]
"""(number in the file, path, label, split)"""


@dataclass
class Rows:
    """Rows of a table. numbers: of their lines in the file; paths: texts; labels: see `numbered`."""

    numbers: array = field(default_factory=lambda: array("q"))
    paths: list[str] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)


class Table(Format):
    """A table on a disk, read once."""

    has_columns = matches_classes = True

    @cached_property
    def splits(self) -> dict[str, Rows]:
        """The rows of each split; "" is the whole of a table without a column `split`."""
        return self._read(divided=True)

    def names(self) -> Sequence[str]:
        if "" in self.splits:
            hint = "add it, with train or val in each row, or give a folder with train.csv and val.csv"
            raise self.error(f"no column {SPLIT_COLUMN!r}", hint)
        return list(self.splits)

    def read(self, name: str, classes: list[str] | None) -> "TableItems":
        return TableItems(self, self.splits[name], classes)

    def whole(self, classes: list[str] | None) -> "TableItems":
        """The images of a file that is a single split; see `Splits.open`."""
        return TableItems(self, self._read(divided=False)[""], classes)

    def _read(self, *, divided: bool) -> dict[str, Rows]:
        splits: dict[str, Rows] = defaultdict(Rows)
        delimiter = DELIMITERS.get(self.path.suffix.lower())
        for number, path, label, split in self._csv(delimiter) if delimiter else self._parquet():
            if not path:
                raise self.error(f"row {number} has no path", "add it, or remove the row")
            rows = splits[split if divided else ""]
            rows.numbers.append(number)
            rows.paths.append(path)
            rows.labels.append(sys.intern(label) if isinstance(label, str) else label)
            if number % ROWS_AT_A_TIME == 0:
                progress.report()
        if not splits:
            raise self.error("it has no rows")
        return splits

    def _columns(self, header: list[str]) -> list[int]:
        """Positions of the path, of the label and, if there is one, of the split."""
        split = [position for position, name in enumerate(header) if name.lower() == SPLIT_COLUMN]
        return [header.index(self.column(header, kind)) for kind in ("image", "label")] + split[:1]

    def _csv(self, delimiter: str) -> Iterator[Row]:
        number = 0
        try:
            with open(self.path, newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
                header = [name.strip() for name in next(reader, [])]
                image, label, *split = self._columns(header)
                for row in filter(None, reader):  # without empty lines
                    number = reader.line_num
                    if len(row) != len(header):
                        reason = f"row {number} has {plural(len(row), 'value')}, the first row {len(header)}"
                        raise self.error(reason, "put values that contain the separator in double quotes")
                    yield number, row[image], row[label].strip(), row[split[0]].strip() if split else ""
        except csv.Error as error:
            raise self.error(f"row {reader.line_num}: {error}", "check the quotes") from None
        except UnicodeDecodeError:
            raise self.error(f"it is not UTF-8, after row {number}", "save the file as UTF-8") from None
        except OSError as error:
            raise self.error(error.strerror or str(error)) from None

    def _parquet(self) -> Iterator[Row]:
        try:
            from pyarrow import parquet
        except ImportError:
            raise self.error("the package pyarrow is not installed", "pip install -e '.[hf]'") from None
        number = 0
        try:
            with parquet.ParquetFile(self.path) as file:
                schema = file.schema_arrow
                names = [schema.names[position] for position in self._columns(schema.names)]
                if str(kind := schema.field(names[0]).type) not in TEXT_TYPES:
                    hint = "load images inside Parquet with the package datasets, and save them with save_to_disk"
                    raise self.error(f"the column {names[0]!r} has the type {kind}, not text", hint)
                for batch in file.iter_batches(ROWS_AT_A_TIME, columns=names):
                    for row in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                        number += 1
                        path, *split = ("" if value is None else str(value).strip() for value in (row[0], *row[2:]))
                        yield number, path, row[1].strip() if isinstance(row[1], str) else row[1], split[0] if split else ""
        except ConfigError:
            raise
        except Exception as error:  # OSError, ArrowInvalid, ..., by damage
            raise self.error(f"damaged or not a Parquet file: {first_line(error)}", "write it again") from None


class TableItems:
    """The encoded images of some rows of a table. classes: see `EncodedItems`; labels: [N] int32."""

    def __init__(self, table: Table, rows: Rows, classes: list[str] | None) -> None:
        self.table, self.rows = table, rows
        self.labels, self.classes = numbered(rows.labels, classes, row_name=self._row, error=table.error)
        self.warnings = self._duplicates()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """(encoded image, label). Raises what `read_image` raises."""
        try:
            return read_image(self._path(index)), int(self.labels[index])
        except ImageError:
            raise
        except ValueError as error:  # a null byte in the path
            raise ImageError(first_line(error)) from None

    def _path(self, index: int) -> Path:
        return self.table.path.parent / self.rows.paths[index]

    def _row(self, index: int) -> str:
        return f"row {self.rows.numbers[index]}"

    def name(self, index: int) -> str:
        """The image's path and row, printable."""
        return printable(f"{self._path(index)} ({self._row(index)} of {self.table.path.name})", 4096)

    def identity(self) -> list[str]:
        """What tells these rows from others, wherever the table lies: see `identity`."""
        return identity(self.rows.paths, lambda index: file_size(self._path(index)))

    def start(self) -> None:
        """Look for the files, before images are read. Raises ConfigError for the first of CHECKED rows without a file."""
        for index in np.unique(np.linspace(0, len(self) - 1, CHECKED).astype(np.int64)):
            progress.report()
            if not os.path.exists(self._path(index)):
                reason = f"{self._row(index)}: no file {str(self._path(index))!r}"
                raise self.table.error(reason, "fix the path, which is relative to the folder of the table, or remove the row")

    def _duplicates(self) -> list[str]:
        """A warning of paths that several rows have. Raises ConfigError if their labels differ."""
        first_with: dict[str, int] = {}
        for index, path in enumerate(self.rows.paths):
            first = first_with.setdefault(path, index)
            if self.labels[first] != self.labels[index]:
                reason = f"{self._row(first)} and {self._row(index)} give {path!r} different labels"
                raise self.table.error(reason, "remove one of them")
        repeated = len(self) - len(first_with)
        text = f"{self.table.path.name} names an image again in {plural(repeated, 'row')}; it counts each time"
        return [text] if repeated else []
