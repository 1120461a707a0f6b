"""CIFAR-10 and CIFAR-100 as their authors publish them, in the Python and in the binary version.

The Python version is pickled. It is read without calling anything that a pickle names: arrays are rebuilt from their bytes.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.config import Data
from jaxdp.data.file_format import Arrays, Format
from jaxdp.errors import first_line
from jaxdp.files import read_regular

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
ARRAY_PARTS = {"_reconstruct", "ndarray", "dtype"}  # what the pickle of a NumPy array names


@dataclass(frozen=True)
class Version:
    """One of the published archives.

    splits: name -> files; meta: file of the class names; names: the class names in it; records: (pixels [N, 3072] uint8,
    labels [N]) in a file. Both are functions of the file's content and may raise any exception if it is damaged.
    """

    splits: dict[str, tuple[str, ...]]
    meta: str
    names: Callable[[bytes], list[str]]
    records: Callable[[bytes], tuple[np.ndarray, np.ndarray]]


def version_in(folder: Path) -> Version | None:
    """The version of CIFAR whose class names are in a folder."""
    return next((version for version in VERSIONS if (folder / version.meta).is_file()), None)


class Cifar(Format):
    """The splits train and test of a version."""

    def __init__(self, path: Path, data: Data, version: Version) -> None:
        super().__init__(path, data)
        self.version = version

    def names(self) -> Sequence[str]:
        """See `Splits.names`."""
        return list(self.version.splits)

    def read(self, name: str, classes: list[str] | None) -> Arrays:
        """See `Format.read`."""
        parts = [self._parsed(file, self.version.records) for file in self.version.splits[name]]
        pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        images = pixels.reshape(-1, *SHAPE).transpose(0, 2, 3, 1)  # [N, 32, 32, 3]
        return self.arrays((images, labels), name, self._parsed(self.version.meta, self.version.names))

    def _parsed(self, file: str, parse: Callable[[bytes], Any]) -> Any:
        """What a function finds in a file. Raises ConfigError for a file that is missing or damaged."""
        try:
            content = read_regular(self.path / file)
        except OSError as error:
            raise self.error(f"{file}: {error.strerror}", "extract the whole archive") from None
        try:
            return parse(content)
        except Exception as error:  # EOFError, UnpicklingError, KeyError, TypeError, ValueError, ..., by damage
            reason = f"{file} is damaged or truncated: {type(error).__name__}: {first_line(error)}"
            raise self.error(reason, "extract the archive again") from None


class ArrayPart:
    """Stands for the parts of a pickled NumPy array: keeps what they would be built from, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self) -> np.ndarray:
        """The array, [N, 3072] uint8. Raises ValueError or TypeError for any other."""
        _, shape, dtype, in_columns, content = self.state
        if _text(dtype.arguments[0]) != "u1" or in_columns or shape[1:] != (PIXELS,):
            raise ValueError(f"an array of shape {shape}, not [N, {PIXELS}] of uint8")
        return np.frombuffer(content, np.uint8).reshape(shape)


class Unpickler(pickle.Unpickler):
    """Reads numbers, text, lists and dictionaries, and arrays as `ArrayPart`. Refuses every other class and function."""

    def find_class(self, module: str, name: str) -> type:
        """`ArrayPart` for the parts of an array. Raises ValueError for anything else."""
        if module.partition(".")[0] == "numpy" and name in ARRAY_PARTS:
            return ArrayPart
        raise ValueError(f"it names {module}.{name}")


def _unpickled(content: bytes) -> dict[str, Any]:
    return {_text(key): value for key, value in Unpickler(io.BytesIO(content), encoding="bytes").load().items()}


def _pickled_records(content: bytes, key: str) -> tuple[np.ndarray, np.ndarray]:
    found = _unpickled(content)
    pixels, labels = found["data"].pixels(), np.asarray(found[key])
    if labels.shape != pixels.shape[:1]:
        raise ValueError(f"{len(pixels)} images, labels of shape {labels.shape}")
    return pixels, labels


def _binary_records(content: bytes, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """label_bytes: in front of the pixels of an image; the last of them is the label."""
    if len(content) % (label_bytes + PIXELS) or not content:
        raise ValueError(f"{len(content)} bytes, but an image has {label_bytes + PIXELS}")
    records = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + PIXELS)
    return records[:, label_bytes:], records[:, label_bytes - 1]


def _pickled_names(content: bytes, key: str) -> list[str]:
    return [_text(name) for name in _unpickled(content)[key]]


def _names_in_lines(content: bytes) -> list[str]:
    return content.decode("utf-8").split()


def _text(value: bytes | str) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else value


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
VERSIONS = (
    Version(
        {"train": BATCHES, "test": ("test_batch",)},
        "batches.meta",
        partial(_pickled_names, key="label_names"),
        partial(_pickled_records, key="labels"),
    ),
    Version(
        {"train": ("train",), "test": ("test",)},
        "meta",
        partial(_pickled_names, key="fine_label_names"),
        partial(_pickled_records, key="fine_labels"),
    ),
    Version(
        {"train": tuple(f"{batch}.bin" for batch in BATCHES), "test": ("test_batch.bin",)},
        "batches.meta.txt",
        _names_in_lines,
        partial(_binary_records, label_bytes=1),
    ),
    Version(
        {"train": ("train.bin",), "test": ("test.bin",)},
        "fine_label_names.txt",
        _names_in_lines,
        partial(_binary_records, label_bytes=2),
    ),
)
