"""The interface of the formats that the data source `file` reads."""

import importlib
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdp.config import Data
from jaxdp.data.datasets import EVALUATION_NAMES, EncodedItems, Splits
from jaxdp.data.given import ArrayItems, as_source
from jaxdp.errors import ConfigError, printable

COLUMNS = {"image": ("image", "img", "path", "file", "file_name", "filename"), "label": ("label", "class")}  # their usual names
LISTED = 20  # columns or arrays in a message


class Format(Splits):
    """A data set in one place. path: its file or folder; data: the config's section.

    has_columns: whether `data.image_column` and `data.label_column` have a meaning.
    """

    has_columns = False

    def __init__(self, path: Path, data: Data) -> None:
        self.path, self.data = path, data
        for field in ("image_column", "label_column"):
            if getattr(data, field) is not None and not self.has_columns:
                raise ConfigError(f"data.{field}", getattr(data, field), reason=f"{path} has no columns", hint="omit it")

    def error(self, reason: str, hint: str = "") -> ConfigError:
        """An error of this place."""
        return ConfigError("data.directory", str(self.path), reason=reason, hint=hint)

    def package(self, module: str) -> Any:
        """A module of the extra hf. Raises ConfigError if it is not installed."""
        try:
            return importlib.import_module(module)
        except ImportError:
            raise self.error(f"the package {module.partition('.')[0]} is not installed", "pip install -e '.[hf]'") from None

    def open(self, name: str, classes: list[str] | None = None) -> EncodedItems:
        """See `Splits.open`."""
        names = self.names()
        if name not in names:
            hint = f"name one of {', '.join(sorted(names))} with --data.train-split or --data.eval-split"
            raise self.error(f"it has no split {name!r}", hint)
        return self.read(name, classes)

    @abstractmethod
    def read(self, name: str, classes: list[str] | None) -> EncodedItems:
        """The images of an existing split; see `Splits.open`."""

    def no_evaluation_split(self) -> ConfigError:
        """See `Splits.no_evaluation_split`."""
        reason = f"{str(self.path)!r} has none of the splits {', '.join(EVALUATION_NAMES)}"
        hint = f"name one with --data.eval-split; it has {', '.join(sorted(self.names()))}"
        return ConfigError("data.eval_split", None, reason=reason, hint=hint)

    def column(self, header: Sequence[str], kind: str) -> str:
        """The column that the config names for a key of `COLUMNS`, or the only one with a usual name.

        Raises ConfigError for one that is missing or not unique.
        """
        usual, chosen = COLUMNS[kind], getattr(self.data, f"{kind}_column")
        found = [name for name in header if name == chosen or (chosen is None and name.lower() in usual)]
        if len(found) == 1:
            return found[0]
        flag, shown = f"--data.{kind}-column", listed(header)
        if found:
            raise self.error(f"several columns may be meant: {listed(found)}", f"name one with {flag}")
        if chosen is not None:
            reason, hint = f"{self.path} has no such column", f"its columns are {shown}"
            raise ConfigError(f"data.{kind}_column", chosen, reason=reason, hint=hint)
        raise self.error(f"no column {' or '.join(usual)}", f"name the column with {flag}; its columns are {shown}")

    def arrays(self, pair: tuple, split: str, names: list[str] | None) -> ArrayItems:
        """(images, labels) of a split as items. Raises ConfigError for other shapes and types than `ArrayItems` has.

        names: of the classes, None if unknown.
        """
        try:
            items = as_source(pair, split)
        except ConfigError as error:
            raise self.error(error.reason, error.hint) from None
        if not isinstance(items, ArrayItems):
            hint = "store uint8 pixels of shape [N, H, W, 3] or [N, H, W]"
            raise self.error(f"{split} images are {pair[0].dtype} of shape {pair[0].shape}", hint)
        if len(items) and items.labels.min() < 0:
            raise self.error(f"{split} has the label {items.labels.min()}", "labels count from 0")
        if names is not None and items.classes > len(names):
            raise self.error(f"{split} has the label {items.classes - 1}", f"there are {len(names)} class names, from 0")
        items.classes = names or items.classes
        return items


def listed(names: Sequence[str]) -> str:
    """Names for a message."""
    return ", ".join(printable(name, 40) for name in names[:LISTED]) + ", ..." * (len(names) > LISTED)
