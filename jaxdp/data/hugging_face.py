"""Data sets of Hugging Face's package `datasets`, saved to a disk with `save_to_disk`."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from jaxdp.data.decode import ImageError, read_image, retried
from jaxdp.data.file_format import Format, measured, numbered, several
from jaxdp.data.image_folder import SIZED
from jaxdp.errors import StorageError, first_line


class HuggingFace(Format):
    """The splits of a saved `DatasetDict`, or the only one of a saved `Dataset`."""

    has_columns = matches_classes = True

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder holds a saved data set."""
        return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))

    @cached_property
    def splits(self) -> Any:
        """Name -> `datasets.Dataset`."""
        try:
            import datasets

            found = datasets.load_from_disk(str(self.path))
            return found if isinstance(found, dict) else {str(found.split or "train"): found}
        except ImportError:
            raise self.error("the package datasets is not installed", "pip install -e '.[hf]'") from None
        except Exception as error:  # OSError, ArrowInvalid, JSONDecodeError, ValueError, ..., by damage
            reason = f"datasets cannot open it: {type(error).__name__}: {first_line(error)}"
            raise self.error(reason, "save it again with save_to_disk") from None

    def names(self) -> Sequence[str]:
        return list(self.splits)

    def read(self, name: str, classes: list[str] | None) -> "DatasetExamples":
        return DatasetExamples(self, name, classes)


class DatasetExamples:
    """The images of a split. classes: names or their number; labels: [N] int32."""

    def __init__(self, place: HuggingFace, split: str, classes: list[str] | None) -> None:
        import datasets

        self.split, data = split, place.splits[split].with_format(None)
        self.image = place.column(data.column_names, "image", place.data.image_column)
        columns = place.label_columns(data.column_names)
        if not isinstance(data.features[self.image], datasets.Image):
            reason = f"the column {self.image!r} has the type {data.features[self.image]}, not Image"
            raise place.error(reason, "cast it with cast_column(NAME, datasets.Image()), and save the data set again")
        self.labels, self.classes = self._targets(data, columns, classes, place=place)
        self.data = data.select_columns([self.image]).cast_column(self.image, datasets.Image(decode=False))

    def _targets(
        self, data: Any, columns: list[str], classes: list[str] | None, *, place: HuggingFace
    ) -> tuple[np.ndarray, int | list[str]]:
        """(labels, classes) of one class, several labels, or the targets of a registered task."""
        if place.target is not None:
            cells = [data[column][:] for column in columns]
            numbers = list(zip(*cells, strict=True)) if len(cells) > 1 else cells[0]
            return measured(numbers, place.target, row_name=self.name, error=place.error), 0
        inner = getattr(data.features[columns[0]], "feature", None)  # of a sequence
        if inner is not None or place.has_several_labels:
            return self._several(data, columns, classes if inner is None else getattr(inner, "names", None), place=place)
        names: list[str] | None = getattr(data.features[columns[0]], "names", None)
        values = list(data[columns[0]][:])
        for row, value in enumerate(values):
            if names is not None and value is not None and not 0 <= value < len(names):
                hint = f"remove the row, or give it one of the {len(names)} classes"
                raise place.error(f"{self.name(row)} has the label {value}", hint)
        if names is not None:
            values = [None if value is None else names[value] for value in values]
        return numbered(values, names if classes is None else classes, row_name=self.name, error=place.error)

    def _several(
        self, data: Any, columns: list[str], names: list[str] | None, *, place: HuggingFace
    ) -> tuple[np.ndarray, list[str]]:
        """(labels [N, C] float32, their names) of a sequence of classes, of columns of 0 and 1, or of names in a text."""
        if place.has_several_labels:
            values = [data[column][:] for column in columns]
            rows, separator = list(zip(*values, strict=True)) if len(columns) > 1 else values[0], place.data.label_separator
            return several(rows, names, columns=columns, separator=separator, row_name=self.name, error=place.error)
        if names is None:
            hint = "cast it with cast_column(NAME, datasets.Sequence(datasets.ClassLabel(names=[...])))"
            raise place.error(
                f"the column {columns[0]!r} has the type {data.features[columns[0]]}, whose labels have no names", hint
            )
        labels = np.zeros((len(data), len(names)), np.float32)
        for row, own in enumerate(data[columns[0]][:]):
            for label in own or ():
                if label is None or not 0 <= label < len(names):
                    raise place.error(f"{self.name(row)} has the label {label}", f"give it one of the {len(names)} classes")
                labels[row, label] = 1
        return labels, list(names)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        """(encoded image, label). Raises ImageError for a row without an image, and what `read_image` raises."""
        image = self._row(int(index))
        if image is None:
            raise ImageError("the row has no image")
        content = image["bytes"] if image["bytes"] is not None else read_image(image["path"] or "")
        return content, self.labels[index]

    def _row(self, index: int) -> dict[str, Any] | None:
        """The bytes or the path of an image. Raises StorageError for an error of the file system."""
        try:
            return retried(lambda: self.data[index][self.image], self.name(index))
        except OSError as error:  # of the data set's own files: it says nothing about the image
            raise StorageError(error.strerror or first_line(error), self.name(index)) from error

    def identity(self) -> list[str]:
        """What tells SIZED of these images, evenly spaced, from others, wherever the data set lies."""
        rows = (self._row(index) or {} for index in range(0, len(self), -(-len(self) // SIZED) or 1))
        return [
            str(google_crc32c.value(row["bytes"])) if row.get("bytes") else Path(row.get("path") or "").name for row in rows
        ]

    def name(self, index: int) -> str:
        """The image's row and split."""
        return f"row {index} of {self.split}"
