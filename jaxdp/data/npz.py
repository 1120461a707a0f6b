"""Images and labels in NumPy's `.npz` files.

One file has the arrays of all splits, SPLIT_images and SPLIT_labels (as MedMNIST) or x_SPLIT and y_SPLIT (as Keras); or a file
is a split with `images` and `labels`. An optional array `class_names` names the classes.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, Self

import numpy as np

from jaxdp.data.datasets import HOLDOUT_HINT, listed
from jaxdp.data.file_format import FileFormat
from jaxdp.data.from_python import ArrayItems
from jaxdp.errors import ConfigError, first_line

PAIRS = ((r"(.+)_images", "{}_labels"), (r"x_(.+)", "y_{}"))  # (name of the images with the split, name of the labels)
WHOLE = ("images", "labels")
NAMES = "class_names"


class Npz(FileFormat):
    """The splits of one file."""

    @cached_property
    def keys(self) -> list[str]:
        """The names of the arrays."""
        return self._load(list)

    def names(self) -> Sequence[str]:
        if not (pairs := self._pairs()):
            folder = f"give the folder of {self.path.name}, with one such file for each split, or {HOLDOUT_HINT}"
            hint = folder if {*WHOLE} <= {*self.keys} else ""
            raise self._lacks("SPLIT_images and SPLIT_labels, or x_SPLIT and y_SPLIT,", hint)
        return list(pairs)

    def undivided(self, train: str) -> ArrayItems | None:
        return None if self._pairs() or not {*WHOLE} <= {*self.keys} else self.whole([self], None)

    def no_split(self, name: str) -> ConfigError:
        error = super().no_split(name)
        return self.error(f"{error.reason}; its arrays are {listed(self.keys)}", error.hint)

    def _lacks(self, arrays: str, hint: str = "") -> ConfigError:
        return self.error(f"no {arrays} among its arrays {listed(self.keys)}", hint or "rename them")

    def _pairs(self) -> dict[str, tuple[str, str]]:
        """Split -> names of its images and labels."""
        matches = [(re.fullmatch(images, key), labels) for key in self.keys for images, labels in PAIRS]
        pairs = [(match[1], (match[0], labels.format(match[1]))) for match, labels in matches if match]
        found: dict[str, tuple[str, str]] = {}
        for split, pair in pairs:
            if pair[1] in self.keys and found.setdefault(split, pair) != pair:
                both = f"{' and '.join(found[split])}, and {' and '.join(pair)}"
                raise self.error(f"{split!r} is both {both}", "keep one pair")
        if found and {*WHOLE} <= {*self.keys}:
            both = f"{' and '.join(WHOLE)}, and {' and '.join(next(iter(found.values())))}"
            raise self.error(f"it has both {both}", "keep a single split, or the pairs of all splits")
        return found

    def read(self, name: str, classes: list[str] | None) -> ArrayItems:
        return self.arrays(self._pair(self._pairs()[name]), name, self._class_names())

    @classmethod
    def whole(cls, files: Sequence[Self], classes: list[str] | None) -> ArrayItems:
        names, split = files[0]._class_names(), files[0].path.stem
        for file in files:
            if pairs := file._pairs():
                hint = "name its arrays images and labels, or give the file itself as --data.directory"
                raise file.error(f"it has the splits {listed(list(pairs))}", hint)
            if not {*WHOLE} <= {*file.keys}:
                raise file._lacks(" and ".join(WHOLE))
            if file._class_names() != names:
                raise file.error(f"its {NAMES} are not the ones in {files[0].path.name}", "write the same into all shards")
        parts = [file._pair(WHOLE) for file in files]
        for file, part in zip(files, parts, strict=True):
            for name, array, first in zip(WHOLE, part, parts[0], strict=True):
                if (array.dtype.kind, array.shape[1:]) != (first.dtype.kind, first.shape[1:]):
                    reason = (
                        f"its {name} are {array.dtype} of shape {array.shape}, but in {files[0].path.name} {first.dtype} of "
                    )
                    raise file.error(f"{reason}{first.shape}", "write the same types into all shards")
        images, labels = (
            np.concatenate([*map(np.atleast_1d, arrays)]) if len(files) > 1 else arrays[0]
            for arrays in zip(*parts, strict=True)
        )
        return files[0].arrays((images, labels), split, names)

    def _pair(self, keys: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
        """Images and labels with these names."""
        images, labels = (self._load(itemgetter(key)) for key in keys)
        return images, labels

    def _class_names(self) -> list[str] | None:
        return self._load(lambda arrays: np.ravel(arrays[NAMES]).astype(str).tolist()) if NAMES in self.keys else None

    def _load(self, part: Callable[[Any], Any]) -> Any:
        """What a function takes from the open file."""
        try:
            with open(self.path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                return part(arrays)
        except Exception as error:  # OSError, BadZipFile, zlib.error, TypeError for a single array, MemoryError, ..., by damage
            reason = f"damaged, not an .npz file, or with pickled objects: {first_line(error)}"
            raise self.error(reason, "write it with numpy.savez") from None
