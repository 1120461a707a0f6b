"""CIFAR-10 and CIFAR-100 as their authors publish them, in the Python and in the binary version.

The Python version is pickled. It is read without calling anything that a pickle names: arrays are rebuilt from their bytes.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data.file_format import Arrays, Format
from jaxdp.errors import first_line
from jaxdp.files import read_regular

SIDE, CHANNELS = 32, 3
PIXELS = CHANNELS * SIDE * SIDE
ARRAY_PARTS = {"_reconstruct", "ndarray", "dtype"}  # what the pickle of a NumPy array names


@dataclass(frozen=True)
class Version:
    """One of the published archives.

    splits: name -> files. meta: file of the class names. labels: key of the labels in a pickle, or bytes before the pixels of a
    binary record, of which the last is the label. names: key of the class names in a pickle.
    """

    splits: dict[str, tuple[str, ...]]
    meta: str
    labels: str | int
    names: str = ""


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
VERSIONS = (
    Version({"train": BATCHES, "test": ("test_batch",)}, "batches.meta", "labels", "label_names"),
    Version({"train": ("train",), "test": ("test",)}, "meta", "fine_labels", "fine_label_names"),
    Version({"train": tuple(f"{batch}.bin" for batch in BATCHES), "test": ("test_batch.bin",)}, "batches.meta.txt", 1),
    Version({"train": ("train.bin",), "test": ("test.bin",)}, "fine_label_names.txt", 2),
)


def version_in(folder: Path) -> Version | None:
    """The version of CIFAR whose class names are in a folder."""
    return next((version for version in VERSIONS if (folder / version.meta).is_file()), None)


class Cifar(Format):
    """The splits train and test."""

    @property
    def version(self) -> Version:
        """The version in the folder."""
        version = version_in(self.path)
        assert version is not None
        return version

    def names(self) -> Sequence[str]:
        """See `Splits.names`."""
        return list(self.version.splits)

    def read(self, name: str, classes: list[str] | None) -> Arrays:
        """See `Format.read`."""
        parts = [self._read_file(file) for file in self.version.splits[name]]
        pixels = np.concatenate([part[0] for part in parts]).reshape(-1, CHANNELS, SIDE, SIDE)
        labels = np.concatenate([part[1] for part in parts])
        return self.arrays((pixels.transpose(0, 2, 3, 1), labels), name, self._class_names())

    def _content(self, file: str) -> bytes:
        try:
            return read_regular(self.path / file)
        except OSError as error:
            raise self.error(f"{file}: {error.strerror}", "extract the whole archive") from None

    def _class_names(self) -> list[str]:
        version, content = self.version, self._content(self.version.meta)
        if isinstance(version.labels, int):
            return content.decode("utf-8", "backslashreplace").split()
        names = self._unpickle(version.meta, content, version.names)
        return [name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else str(name) for name in names]

    def _read_file(self, file: str) -> tuple[np.ndarray, np.ndarray]:
        """(pixels [N, 3072] uint8, labels [N]) of a file."""
        content, labels = self._content(file), self.version.labels
        if isinstance(labels, str):
            pixels = self._pixels(file, self._unpickle(file, content, "data"))
            numbers = np.asarray(self._unpickle(file, content, labels))
            if numbers.shape != pixels.shape[:1]:
                raise self.error(
                    f"{file} is damaged: {len(pixels)} images, labels of shape {numbers.shape}", "extract it again"
                )
            return pixels, numbers
        if len(content) % (labels + PIXELS) or not content:
            raise self.error(f"{file} is truncated: {len(content)} bytes", f"records have {labels + PIXELS}; extract it again")
        records = np.frombuffer(content, np.uint8).reshape(-1, labels + PIXELS)
        return records[:, labels:], records[:, labels - 1]

    def _unpickle(self, file: str, content: bytes, key: str) -> Any:
        """A value of a pickled dictionary."""
        try:
            return {_text(name): value for name, value in Unpickler(io.BytesIO(content), encoding="bytes").load().items()}[key]
        except Exception as error:  # EOFError, UnpicklingError, KeyError, ..., by damage
            reason = f"{file} is damaged or truncated: {type(error).__name__}: {first_line(error)}"
            raise self.error(reason, "extract the archive again") from None

    def _pixels(self, file: str, array: Any) -> np.ndarray:
        try:
            _, (rows, columns), dtype, in_columns, content = array.state
            if (columns, in_columns, _text(dtype.arguments[0])) != (PIXELS, False, "u1"):
                raise ValueError(f"{rows}x{columns}, {dtype.arguments}")
            return np.frombuffer(content, np.uint8).reshape(rows, columns)
        except Exception as error:  # TypeError, ValueError, AttributeError, by damage
            reason = f"{file} has no uint8 pixels of shape [N, {PIXELS}]: {first_line(error)}"
            raise self.error(reason, "extract the archive again") from None


class ArrayPart:
    """Stands for the parts of a pickled NumPy array: keeps what they would be built from, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Unpickler(pickle.Unpickler):
    """Reads numbers, text, lists and dictionaries, and arrays as `ArrayPart`. Refuses every other class and function."""

    def find_class(self, module: str, name: str) -> type:
        """`ArrayPart` for the parts of an array. Raises UnpicklingError for anything else."""
        if module.split(".")[0] == "numpy" and name in ARRAY_PARTS:
            return ArrayPart
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
