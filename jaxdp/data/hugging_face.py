"""Data sets of Hugging Face's package `datasets`, saved to a disk with `save_to_disk`."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data.decode import ImageError
from jaxdp.data.file_format import Format
from jaxdp.data.labels import Labels
from jaxdp.errors import first_line
from jaxdp.files import read_regular

SPLITS_FILE, SINGLE_FILE = "dataset_dict.json", "state.json"


class HuggingFace(Format):
    """The splits of a saved `DatasetDict`."""

    has_columns = matches_classes = True

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder holds a saved data set."""
        return any((folder / name).is_file() for name in (SPLITS_FILE, SINGLE_FILE))

    @cached_property
    def splits(self) -> Any:
        """Name -> `datasets.Dataset`."""
        if not (self.path / SPLITS_FILE).is_file():
            hint = "save a DatasetDict: datasets.DatasetDict(train=..., test=...).save_to_disk(DIRECTORY)"
            raise self.error("it is a single split of a data set", hint)
        datasets = self.package("datasets")
        try:
            return datasets.load_from_disk(str(self.path))
        except Exception as error:  # OSError, ArrowInvalid, JSONDecodeError, ValueError, ..., by damage
            reason = f"datasets cannot open it: {type(error).__name__}: {first_line(error)}"
            raise self.error(reason, "save it again with save_to_disk") from None

    def names(self) -> Sequence[str]:
        """See `Splits.names`."""
        return list(self.splits)

    def read(self, name: str, classes: list[str] | None) -> "Examples":
        """See `Format.read`."""
        return Examples(self, name, classes)


class Examples:
    """The images of a split. classes: names or their number; labels: [N] int32."""

    def __init__(self, place: HuggingFace, split: str, classes: list[str] | None) -> None:
        datasets = place.package("datasets")
        self.place, self.split, data = place, split, place.splits[split].with_format(None)
        self.image, label = (place.column(data.column_names, kind) for kind in ("image", "label"))
        if not isinstance(data.features[self.image], datasets.Image):
            reason = f"the column {self.image!r} has the type {data.features[self.image]}, not Image"
            raise place.error(reason, "cast it with cast_column(NAME, datasets.Image()), and save the data set again")
        names = getattr(data.features[label], "names", None)
        self.labels, self.classes = self._labels(list(data[label][:]), names, classes)
        self.data = data.select_columns([self.image]).cast_column(self.image, datasets.Image(decode=False))

    def _labels(
        self, values: list[Any], names: list[str] | None, classes: list[str] | None
    ) -> tuple[np.ndarray, int | list[str]]:
        """(labels [N] int32, number of the classes or names). names: those of a ClassLabel; classes: see `Splits.open`."""
        labels = Labels(lambda row: f"row {row} of {self.split}", self.place.error)
        for row, value in enumerate(values):
            if names is not None and value is not None and not 0 <= value < len(names):
                hint = f"remove the row, or give it one of the {len(names)} classes"
                raise self.place.error(f"{labels.row_name(row)} has the label {value}", hint)
            labels.append("" if value is None else str(value if names is None else names[value]))
        return labels.of(np.arange(len(values)), names if classes is None else classes)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """(encoded image, label). Raises ImageError for an image that cannot be read."""
        image = self.data[int(index)][self.image]
        if image is None:
            raise ImageError("the row has no image")
        try:
            content = image["bytes"] if image["bytes"] is not None else read_regular(image["path"] or "")
        except OSError as error:
            raise ImageError(error.strerror or first_line(error)) from None
        return content, int(self.labels[index])

    def name(self, index: int) -> str:
        """The image's row and split."""
        return f"row {index} of {self.split}"
