"""CIFAR-10 and CIFAR-100 as their authors publish them, in the Python and in the binary version.

The Python version is pickled, by Python 2 as published or again by Python 3. It is read without calling anything that a pickle
names: arrays are rebuilt from their bytes.
"""

import io
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp.config import Data
from jaxdp.data.file_format import Format
from jaxdp.data.from_python import ArrayItems
from jaxdp.errors import first_line
from jaxdp.files import read_regular
from jaxdp.targets import Target

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
DTYPE = r"[<>|=][biuSU][0-9]+"  # of arrays that are rebuilt: booleans, integers and text


class Version(NamedTuple):
    """One of the published archives.

    splits: name -> files; meta: file of the class names. label: "label" or "fine_label", with which the keys of a pickle begin.
    label_bytes: in front of the pixels of an image, the last of them its label; 0 in the Python version.
    """

    splits: dict[str, tuple[str, ...]]
    meta: str
    label: str = ""
    label_bytes: int = 0


class Cifar(Format):
    """The splits train and test of an extracted archive."""

    def __init__(self, path: Path, data: Data, target: Target | None = None) -> None:
        super().__init__(path, data, target)
        self.version = next(version for version in VERSIONS if (path / version.meta).is_file())

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder has the class names of CIFAR."""
        return any((folder / version.meta).is_file() for version in VERSIONS)

    def names(self) -> Sequence[str]:
        return list(self.version.splits)

    def read(self, name: str, classes: list[str] | None) -> ArrayItems:
        parts = [self._parsed(file, self._records) for file in self.version.splits[name]]
        pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        images = pixels.reshape(-1, *SHAPE).transpose(0, 2, 3, 1)  # [N, 32, 32, 3]
        return self.arrays((images, labels), name, self._parsed(self.version.meta, self._class_names))

    def _parsed(self, file: str, parse: Callable[[bytes], Any]) -> Any:
        """What a function finds in a file. Raises ConfigError for a file that is missing or damaged."""
        try:
            return parse(read_regular(self.path / file))
        except OSError as error:
            raise self.error(f"{file}: {error.strerror}", "extract the whole archive") from None
        except NotAllowedError as error:
            raise self.error(
                f"{file} names {first_line(error)}, which is not allowed", "extract the published archive"
            ) from None
        except Exception as error:  # EOFError, UnpicklingError, KeyError, TypeError, ValueError, ..., by damage
            reason = f"{file} is damaged or truncated: {type(error).__name__}: {first_line(error)}"
            raise self.error(reason, "extract the archive again") from None

    def _records(self, content: bytes) -> tuple[np.ndarray, np.ndarray]:
        """(pixels [N, 3072] uint8, labels [N]) of a file; any exception if it is damaged."""
        if label_bytes := self.version.label_bytes:
            if len(content) % (label_bytes + PIXELS) or not content:
                raise ValueError(f"{len(content)} bytes, but an image has {label_bytes + PIXELS}")
            records = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + PIXELS)
            return records[:, label_bytes:], records[:, label_bytes - 1]
        stored = _unpickled(content)
        pixels, labels = _array(stored["data"]), _array(stored[f"{self.version.label}s"])
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (PIXELS,):
            raise ValueError(f"an array of {pixels.dtype}, {pixels.shape}, not [N, {PIXELS}] of uint8")
        if labels.shape != pixels.shape[:1]:
            raise ValueError(f"{len(pixels)} images, labels of shape {labels.shape}")
        return pixels, labels

    def _class_names(self, content: bytes) -> list[str]:
        if self.version.label_bytes:
            return content.decode("utf-8").split()
        return [_text(name) for name in _array(_unpickled(content)[f"{self.version.label}_names"]).tolist()]


class NotAllowedError(Exception):
    """A pickle names a class or function that is not in `ALLOWED`; the message is its name."""


class Part:
    """Replaces an object of a pickle: keeps the arguments and the state, and does nothing.

    Only classes replace the names in a pickle, because it could change the attributes of a function.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """The array. Raises an exception if it is damaged or has another type than `DTYPE`."""
        raise TypeError("not an array")


class Encoded(Part):
    """`_codecs.encode` and, without arguments, `bytes`, with which protocols 0 to 2 build bytes."""

    def __new__(cls, text: str = "", encoding: str = "latin1") -> bytes:  # type: ignore[misc]
        if encoding != "latin1":
            raise ValueError(f"bytes in the encoding {encoding!r}")
        return text.encode("latin-1")


class Reconstructed(Part):
    """`_reconstruct`: the state has the array."""

    def array(self) -> np.ndarray:
        _, shape, dtype, in_columns, content = self.state
        return np.frombuffer(content, _dtype(dtype)).reshape(shape, order="F" if in_columns else "C")


class FromBuffer(Part):
    """`_frombuffer`, with which protocol 5 builds an array."""

    def array(self) -> np.ndarray:
        content, dtype, shape, order = self.arguments
        return np.frombuffer(content, _dtype(dtype)).reshape(shape, order=order)


class Scalar(Part):
    """`scalar`: a number of NumPy."""

    def array(self) -> np.ndarray:
        dtype, content = self.arguments
        return np.frombuffer(content, _dtype(dtype)).reshape(())


ALLOWED: dict[tuple[str, str], type[Part]] = {  # (first part of the module, name)
    ("_codecs", "encode"): Encoded,
    ("__builtin__", "bytes"): Encoded,
    ("numpy", "_reconstruct"): Reconstructed,
    ("numpy", "_frombuffer"): FromBuffer,
    ("numpy", "scalar"): Scalar,
    ("numpy", "ndarray"): Part,
    ("numpy", "dtype"): Part,
}


class Unpickler(pickle.Unpickler):
    """Reads numbers, text, lists and dictionaries, and arrays as `Part`."""

    def find_class(self, module: str, name: str) -> type[Part]:
        """The class that replaces a name. Raises NotAllowedError for one that is not in `ALLOWED`."""
        try:
            return ALLOWED[module.partition(".")[0], name]
        except KeyError:
            raise NotAllowedError(f"{module}.{name}") from None


def _dtype(part: Part) -> np.dtype:
    """The dtype of an array. Raises ValueError for one that may hold objects."""
    code = _text(part.state[1]) + _text(part.arguments[0])
    if not re.fullmatch(DTYPE, code):
        raise ValueError(f"an array of {code}")
    return np.dtype(code)


def _array(value: Any) -> np.ndarray:
    """An array, or a list of numbers or of NumPy's scalars, as an array."""
    if isinstance(value, Part):
        return value.array()
    return np.array([item.array() if isinstance(item, Part) else item for item in value])


def _unpickled(content: bytes) -> dict[str, Any]:
    return {_text(key): value for key, value in Unpickler(io.BytesIO(content), encoding="bytes").load().items()}


def _text(value: bytes | str) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else value


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
VERSIONS = (
    Version({"train": BATCHES, "test": ("test_batch",)}, "batches.meta", label="label"),
    Version({"train": ("train",), "test": ("test",)}, "meta", label="fine_label"),
    Version(
        {"train": tuple(f"{batch}.bin" for batch in BATCHES), "test": ("test_batch.bin",)}, "batches.meta.txt", label_bytes=1
    ),
    Version({"train": ("train.bin",), "test": ("test.bin",)}, "fine_label_names.txt", label_bytes=2),
)
