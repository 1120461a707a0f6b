"""Tables of image paths and labels: CSV and TSV in UTF-8.

The first line names the columns. Paths are relative to the folder of the table. A column `split` divides a table; without it a
table is one split.
"""

import csv
import sys
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from jaxdp.data.decode import ImageError
from jaxdp.data.file_format import Format, numbered
from jaxdp.errors import first_line, plural, printable
from jaxdp.files import read_regular

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SPLIT_COLUMN = "split"


@dataclass
class Rows:
    """Rows of a table. numbers: of their lines in the file; paths, labels: their texts."""

    numbers: array = field(default_factory=lambda: array("q"))
    paths: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


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
        number = 0
        try:
            with open(self.path, newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file, delimiter=DELIMITERS[self.path.suffix.lower()], skipinitialspace=True, strict=True)
                header = [name.strip() for name in next(reader, [])]
                image, label = (header.index(self.column(header, kind)) for kind in ("image", "label"))
                lower = [name.lower() for name in header]
                split = lower.index(SPLIT_COLUMN) if divided and SPLIT_COLUMN in lower else None
                for row in filter(None, reader):  # without empty lines
                    number = reader.line_num
                    if len(row) != len(header):
                        reason = f"row {number} has {plural(len(row), 'value')}, the first row {len(header)}"
                        raise self.error(reason, "put values that contain the separator in double quotes")
                    if not row[image]:
                        raise self.error(f"row {number} has no path", "add it, or remove the row")
                    rows = splits["" if split is None else row[split].strip()]
                    rows.numbers.append(number)
                    rows.paths.append(row[image])
                    rows.labels.append(sys.intern(row[label].strip()))
        except csv.Error as error:
            raise self.error(f"row {reader.line_num}: {error}", "check the quotes") from None
        except UnicodeDecodeError:
            raise self.error(f"it is not UTF-8, after row {number}", "save the file as UTF-8") from None
        except OSError as error:
            raise self.error(error.strerror or str(error)) from None
        if not splits:
            raise self.error("it has no rows")
        return splits


class TableItems:
    """The encoded images of some rows of a table. classes: see `EncodedItems`; labels: [N] int32."""

    def __init__(self, table: Table, rows: Rows, classes: list[str] | None) -> None:
        self.table, self.rows = table, rows
        self.labels, self.classes = numbered(rows.labels, classes, row_name=self._row, error=table.error)
        self.warnings = self._duplicates()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """(encoded image, label). Raises ImageError for a file that cannot be read."""
        try:
            return read_regular(self._path(index)), int(self.labels[index])
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise ImageError(getattr(error, "strerror", None) or first_line(error)) from None

    def _path(self, index: int) -> Path:
        return self.table.path.parent / self.rows.paths[index]

    def _row(self, index: int) -> str:
        return f"row {self.rows.numbers[index]}"

    def name(self, index: int) -> str:
        """The image's path and row, printable."""
        return printable(f"{self._path(index)} ({self._row(index)} of {self.table.path.name})", 4096)

    def file_name(self, index: int) -> str:
        """The name of the image's file."""
        return self._path(index).name

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
