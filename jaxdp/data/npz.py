"""Images and labels in NumPy's `.npz` files.

One file has the arrays of all splits, SPLIT_images and SPLIT_labels (as MedMNIST) or x_SPLIT and y_SPLIT (as Keras); or a file
is a split with `images` and `labels`. An optional array `class_names` names the classes.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from jaxdp.data.datasets import listed
from jaxdp.data.file_format import Format
from jaxdp.data.given import ArrayItems
from jaxdp.errors import first_line

PAIRS = ((r"(.+)_images", "{}_labels"), (r"x_(.+)", "y_{}"))  # (name of the images with the split, name of the labels)
WHOLE = ("images", "labels")
NAMES = "class_names"


class Npz(Format):
    """The splits of one file."""

    @cached_property
    def keys(self) -> list[str]:
        """The names of the arrays."""
        return self._load(list)

    def names(self) -> Sequence[str]:
        return list(self._pairs())

    def _pairs(self) -> dict[str, tuple[str, str]]:
        """Split -> names of its images and labels."""
        matches = [(re.fullmatch(images, key), labels) for key in self.keys for images, labels in PAIRS]
        pairs = [(match[1], (match[0], labels.format(match[1]))) for match, labels in matches if match]
        found: dict[str, tuple[str, str]] = {}
        for split, pair in pairs:
            if pair[1] in self.keys and found.setdefault(split, pair) != pair:
                both = f"{' and '.join(found[split])}, and {' and '.join(pair)}"
                raise self.error(f"{split!r} is both {both}", "keep one pair")
        return found

    def read(self, name: str, classes: list[str] | None) -> ArrayItems:
        return self._arrays(self._pairs()[name], name)

    def whole(self, classes: list[str] | None) -> ArrayItems:
        """The images of a file that is a single split; see `Splits.open`."""
        if not {*WHOLE} <= {*self.keys}:
            raise self.error(f"no {' and '.join(WHOLE)} among its arrays {listed(self.keys)}", "rename them")
        return self._arrays(WHOLE, self.path.stem)

    def _arrays(self, keys: tuple[str, str], split: str) -> ArrayItems:
        images, labels = (self._load(itemgetter(key)) for key in keys)
        names = self._load(lambda arrays: np.ravel(arrays[NAMES]).astype(str).tolist()) if NAMES in self.keys else None
        return self.arrays((images, labels), split, names)

    def _load(self, part: Callable[[Any], Any]) -> Any:
        """What a function takes from the open file."""
        try:
            with open(self.path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                return part(arrays)
        except Exception as error:  # OSError, BadZipFile, zlib.error, TypeError for a single array, MemoryError, ..., by damage
            reason = f"damaged, not an .npz file, or with pickled objects: {first_line(error)}"
            raise self.error(reason, "write it with numpy.savez") from None
