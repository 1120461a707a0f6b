"""CIFAR-10 and CIFAR-100 in the Python version of their authors, which is pickled: nothing but arrays is built from it."""

import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.config import Data
from jaxdp.data.file_format import Format
from jaxdp.data.given import ArrayItems
from jaxdp.errors import first_line
from jaxdp.files import read_regular

SHAPE = (3, 32, 32)
TRAINING_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
VERSIONS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "batches.meta": ("label", {"train": TRAINING_FILES, "test": ("test_batch",)}),
    "meta": ("fine_label", {"train": ("train",), "test": ("test",)}),
}
"""File of the class names -> (how the keys of its names and labels begin, split -> its files)."""
ARRAY_PARTS: dict[str, Any] = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}


class Cifar(Format):
    """The splits train and test of an extracted archive."""

    def __init__(self, path: Path, data: Data) -> None:
        super().__init__(path, data)
        self.meta = next(meta for meta in VERSIONS if (path / meta).is_file())
        self.label, self.files = VERSIONS[self.meta]

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder has the class names of CIFAR."""
        return any((folder / meta).is_file() for meta in VERSIONS)

    def names(self) -> Sequence[str]:
        return list(self.files)

    def read(self, name: str, classes: list[str] | None) -> ArrayItems:
        parts = [self._parsed(file, self._records) for file in self.files[name]]
        pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        images = pixels.reshape(-1, *SHAPE).transpose(0, 2, 3, 1)  # [N, 32, 32, 3]
        return self.arrays((images, labels), name, self._parsed(self.meta, lambda stored: stored[f"{self.label}_names"]))

    def _parsed(self, file: str, parse: Callable[[dict[str, Any]], Any]) -> Any:
        """What a function finds in the dictionary of a file. Raises ConfigError for a file that is missing or damaged."""
        try:
            return parse(_unpickled(read_regular(self.path / file)))
        except OSError as error:
            raise self.error(f"{file}: {error.strerror}", "extract the whole archive") from None
        except Exception as error:  # EOFError, UnpicklingError, KeyError, TypeError, ValueError, ..., by damage
            reason = f"{file} is damaged or truncated: {type(error).__name__}: {first_line(error)}"
            raise self.error(reason, "extract the archive again") from None

    def _records(self, stored: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """(pixels [N, 3072] uint8, labels [N]) of a file; any exception if it is damaged."""
        pixels, labels = stored["data"], np.asarray(stored[f"{self.label}s"])
        if pixels.dtype != np.uint8 or pixels.shape != (*labels.shape, np.prod(SHAPE)):
            raise ValueError(f"pixels are {pixels.dtype} of shape {pixels.shape}, labels of shape {labels.shape}")
        return pixels, labels


class Unpickler(pickle.Unpickler):
    """Reads numbers, text, lists, dictionaries and arrays. Refuses every other class and function."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in ARRAY_PARTS:
            return ARRAY_PARTS[name]
        raise ValueError(f"it names {module}.{name}")


def _unpickled(content: bytes) -> dict[str, Any]:
    """The dictionary of a file of Python 2, with text for bytes; of class names too."""

    def text(value: Any) -> Any:
        return value.decode("utf-8") if isinstance(value, bytes) else value

    stored = Unpickler(io.BytesIO(content), encoding="bytes").load()
    return {text(key): list(map(text, value)) if isinstance(value, list) else value for key, value in stored.items()}
