"""Labels of a table: whole numbers from 0, or names of classes in alphabetical order."""

import re
from array import array
from collections.abc import Callable

import numpy as np

from jaxdp.config import MAX_CLASSES
from jaxdp.data.image_folder import class_order, normalized
from jaxdp.errors import ConfigError, printable

NUMBER = r"[+-]?[0-9]{1,9}"
ErrorOf = Callable[[str, str], ConfigError]
"""(reason, hint) -> the error"""


class Labels:
    """The labels of the rows of a table, which are counted from 0.

    row_name: row -> how errors name it. error: raised for what is no label.
    """

    def __init__(self, row_name: Callable[[int], str], error: ErrorOf) -> None:
        self.row_name, self.error = row_name, error
        self.numbers: dict[str, int] = {}  # text -> its number in the order of appearance
        self.of_row = array("i")

    def append(self, text: str) -> None:
        """Add the label of the next row. Raises the error for an empty one, and for more than MAX_CLASSES different ones."""
        if not text:
            raise self.error(f"{self.row_name(len(self.of_row))} has no label", "add it, or remove the row")
        self.of_row.append(self.numbers.setdefault(normalized(text), len(self.numbers)))
        if len(self.numbers) > MAX_CLASSES:
            hint = "name the column of the labels with --data.label-column"
            raise self.error(f"the data set has more than {MAX_CLASSES:,} classes", hint)

    def of(self, rows: np.ndarray, classes: list[str] | None) -> tuple[np.ndarray, int | list[str]]:
        """(labels [N] int32, their number or the names of the classes) of some rows.

        classes: names of the training split. Raises the error for a negative number, and for a name that is not in `classes`.
        """
        numbers, texts = np.asarray(self.of_row, np.int32)[rows], list(self.numbers)
        used = np.unique(numbers).tolist()
        found: int | list[str]
        if classes is None and all(re.fullmatch(NUMBER, texts[number]) for number in used):
            values = {number: int(texts[number]) for number in used}
            if negative := [number for number, value in values.items() if value < 0]:
                row, label = self._first(negative, numbers, rows)
                raise self.error(f"{row} has the label {label}", "labels count from 0")
            found = max(values.values(), default=-1) + 1
        else:
            found = class_order([texts[number] for number in used]) if classes is None else classes
            labels = {normalized(name): label for label, name in enumerate(found)}
            if unknown := [number for number in used if texts[number] not in labels]:
                row, label = self._first(unknown, numbers, rows)
                reason = f"{row} has the class {label!r}, which the training split lacks"
                raise self.error(reason, "add images of it to the training split, or remove the row")
            values = {number: labels[texts[number]] for number in used}
        table = np.zeros(len(texts), np.int32)
        table[used] = [values[number] for number in used]
        return table[numbers], found

    def _first(self, some: list[int], numbers: np.ndarray, rows: np.ndarray) -> tuple[str, str]:
        """(name, label) of the first of `rows` that has one of some labels. some, numbers: in the order of appearance."""
        first = int(np.flatnonzero(np.isin(numbers, some))[0])
        return self.row_name(int(rows[first])), printable(list(self.numbers)[numbers[first]])
