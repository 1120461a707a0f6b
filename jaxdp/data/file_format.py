"""The interface of the formats that the data source `file` reads, and the labels in their rows."""

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxdp.config import MAX_CLASSES, Data
from jaxdp.data.datasets import EncodedItems, SplitReader, listed
from jaxdp.data.from_python import ArrayItems, as_source, with_names
from jaxdp.data.image_folder import class_order, normalized
from jaxdp.errors import ConfigError, printable
from jaxdp.targets import BadTarget, Target

COLUMNS = {"image": ("image", "img", "path", "file", "file_name", "filename"), "label": ("label", "class")}  # their usual names
ANY_NUMBER = r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|inf)"  # pandas writes inf, which is no class
FLAGS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}  # values in columns of several labels
LABEL_HINT = f"labels are names, or whole numbers from 0 to {MAX_CLASSES - 1:,}"


class Format(SplitReader):
    """A data set in one place. path: its file or folder; data: the config's section; target: of a registered task.

    has_columns: whether `data.image_column` and `data.label_column` have a meaning.
    """

    has_columns = False

    def __init__(self, path: Path, data: Data, target: Target | None = None) -> None:
        self.path, self.data, self.target, self.place = path, data, target, str(path)
        for field in ("image_column", "label_column", "label_separator"):
            if getattr(data, field) and not self.has_columns:
                raise ConfigError(f"data.{field}", getattr(data, field), reason=f"{path} has no columns", hint="omit it")
        separator, columns = data.label_separator, data.label_column
        if separator is not None and (not separator or len(columns) > 1):
            reason = "is a text between the names in one column"
            raise ConfigError("data.label_separator", separator, reason=reason, hint="omit it")
        if len({*columns}) < len(columns):
            raise ConfigError("data.label_column", columns, reason="names a column twice", hint="name each once")

    def error(self, reason: str, hint: str = "") -> ConfigError:
        """An error of this place."""
        return ConfigError("data.directory", self.place, reason=reason, hint=hint)

    def open(self, name: str, classes: list[str] | None = None) -> EncodedItems:
        if name not in self.names():
            raise self.no_split(name)
        return self.read(name, classes)

    @abstractmethod
    def read(self, name: str, classes: list[str] | None) -> EncodedItems:
        """The images of an existing split; see `SplitReader.open`."""

    def label_columns(self, header: Sequence[str]) -> list[str]:
        """The column of the labels, or the columns that the config or a target names. Raises ConfigError as `column`."""
        names = self.data.label_column or (self.target and self.target.dtype.names) or (None,)
        return [self.column(header, "label", name) for name in names]

    @property
    def has_several_labels(self) -> bool:
        """Whether the table has several labels for each image."""
        return len(self.data.label_column) > 1 or self.data.label_separator is not None

    def column(self, header: Sequence[str], kind: str, chosen: str | None) -> str:
        """The column `chosen`, or the only one with a usual name for a key of `COLUMNS`.

        Raises ConfigError for one that is missing or not unique.
        """
        found = [name for name in header if name == chosen or (chosen is None and name.lower() in COLUMNS[kind])]
        if len(found) == 1:
            return found[0]
        wanted = chosen or " or ".join(COLUMNS[kind])
        reason = f"several columns are named {wanted}" if found else f"it has no column {wanted}"
        raise self.error(reason, f"name the column with --data.{kind}-column; its columns are {listed(header)}")

    def arrays(self, pair: tuple, split: str, names: list[str] | None) -> ArrayItems:
        """(images, labels) of a split as items. Raises ConfigError for other shapes and types than `ArrayItems` has.

        names: of the classes, None if unknown.
        """
        try:
            items = as_source(pair, split, self.target)
            if names is not None and isinstance(items, ArrayItems):
                items = with_names(items, names, split)
        except ConfigError as error:
            raise self.error(error.reason, error.hint) from None
        if not isinstance(items, ArrayItems):
            hint = "store uint8 pixels of shape [N, H, W, 3] or [N, H, W]"
            raise self.error(f"{split} images are {pair[0].dtype} of shape {pair[0].shape}", hint)
        return items


class FileFormat(Format):
    """A data set in one file, or one of the files that together are a split."""

    @classmethod
    @abstractmethod
    def whole(cls, files: Sequence[Self], classes: list[str] | None) -> EncodedItems:
        """The images of the files that together are a split; see `SplitReader.open`."""


def numbered(
    values: Sequence[Any],
    classes: list[str] | None,
    *,
    row_name: Callable[[int], str],
    error: Callable[[str, str], ConfigError],
) -> tuple[np.ndarray, int | list[str]]:
    """(labels [N] int32, their number or the names of the classes) of values: whole numbers from 0, or names.

    classes: names of the training split. row_name: index of a value -> how errors name it. Raises `error` (reason, hint) for a
    missing value, for one that is no name and no whole number, a negative or too large number, a name that is not in `classes`,
    and more than MAX_CLASSES different names.
    """
    texts = list(map(label_text, values))
    used = {text for text in texts if text is not None}
    if len(used) > MAX_CLASSES:
        hint = "name the column of the labels with --data.label-column"
        raise error(f"the data set has more than {MAX_CLASSES:,} classes", hint)
    if "" in used:
        raise error(f"{row_name(texts.index(''))} has no label", "add it, or remove the row")
    found: int | list[str]
    if classes is None and all(re.fullmatch(ANY_NUMBER, text) for text in used):
        numbers = {text: float(text) for text in used}
        labels = {text: int(n) for text, n in numbers.items() if 0 <= n < MAX_CLASSES and n.is_integer()}
        found, hint = max(labels.values(), default=-1) + 1, LABEL_HINT
    else:
        found = class_order(list(used)) if classes is None else classes
        labels = {normalized(name): label for label, name in enumerate(found)}
        hint = "the training split lacks it: add images of it there, or remove the row"
    for row, text in enumerate(texts):
        if text is None or text not in labels:
            reason = f"{row_name(row)} has the label {printable(repr(values[row]), 80)}"
            raise error(reason, LABEL_HINT if text is None else hint)
    return np.array([labels[text] for text in texts if text is not None], np.int32), found


def several(
    values: Sequence[Any],
    classes: list[str] | None,
    *,
    columns: Sequence[str],
    separator: str | None,
    row_name: Callable[[int], str],
    error: Callable[[str, str], ConfigError],
) -> tuple[np.ndarray, list[str]]:
    """(labels [N, C] float32, each 0 or 1; their names) of the rows of several columns, or of names with a separator.

    values: lists with a value for each column, or texts with a separator; an empty text has no label. Other arguments and
    errors: as of `numbered`.
    """
    if separator is None:
        labels = np.full((len(values), len(columns)), np.nan, np.float32)
        for row, cells in enumerate(values):
            for column, (name, cell) in enumerate(zip(columns, cells, strict=True)):
                if (found := FLAGS.get(str(cell).strip().lower())) is None:
                    reason = f"{row_name(row)} has {printable(repr(cell), 80)} in the column {name!r}"
                    raise error(reason, "columns of several labels have 0 or 1, or false or true")
                labels[row, column] = found
        return labels, [normalized(name) for name in columns]
    parts = []
    for row, value in enumerate(values):
        if (text := label_text(value)) is None:
            reason = f"{row_name(row)} has the label {printable(repr(value), 80)}"
            raise error(reason, f"labels are names separated by {separator!r}")
        parts.append([normalized(part.strip()) for part in text.split(separator) if part.strip()])
    names = class_order(list({name for row in parts for name in row})) if classes is None else classes
    if len(names) > MAX_CLASSES:
        raise error(
            f"the data set has more than {MAX_CLASSES:,} labels", "name the column of the labels with --data.label-column"
        )
    position = {normalized(name): label for label, name in enumerate(names)}
    labels = np.zeros((len(values), len(names)), np.float32)
    for row, own in enumerate(parts):
        for name in own:
            if name not in position:
                reason = f"{row_name(row)} has the label {printable(repr(name), 80)}"
                raise error(reason, "the training split lacks it: add images of it there, or remove the row")
            labels[row, position[name]] = 1
    return labels, names


def measured(
    values: Sequence[Any], target: Target, *, row_name: Callable[[int], str], error: Callable[[str, str], ConfigError]
) -> np.ndarray:
    """Targets of a registered task, [N], from rows of numbers: a value, or a list of them. Errors: as of `several`."""
    numbers = []
    for row, value in enumerate(values):
        try:
            numbers.append([float(cell) for cell in (value if isinstance(value, (list, tuple)) else [value])])
            if len(numbers[-1]) != len(numbers[0]):
                raise ValueError
        except (TypeError, ValueError):
            reason = f"{row_name(row)} has the target {printable(repr(value), 80)}"
            raise error(reason, "targets are numbers, equally many in each row") from None
    try:
        return target.of_numbers(np.array(numbers))
    except BadTarget as problem:
        raise error(f"the target of {row_name(problem.row)} {problem}", "see `targets` of the registered task") from None


def label_text(value: Any) -> str | None:
    """A label as text, whole numbers without decimals; "" for a missing one, None for what is no name and no whole number."""
    if isinstance(value, str):
        return None if value.lower() == "nan" else normalized(value)  # what other programs write for a missing value
    if isinstance(value, (int, np.integer, np.bool_)):
        return str(value)
    if isinstance(value, (float, np.floating, Decimal)) and math.isfinite(value) and value == int(value):
        return str(int(value))
    return "" if value is None else None
