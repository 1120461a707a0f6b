"""Images and labels in NumPy's `.npz` files.

One file has the arrays of all splits, SPLIT_images and SPLIT_labels (as MedMNIST) or x_SPLIT and y_SPLIT (as Keras); or a file
is a split with `images` and `labels`. An optional array `class_names` names the classes.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from jaxdp.data.file_format import Arrays, FormatOfOneFile
from jaxdp.errors import first_line

PAIRS = (("{}_images", "{}_labels"), ("x_{}", "y_{}"))
NAMES = "class_names"


class Npz(FormatOfOneFile):
    """The splits of one file."""

    @cached_property
    def keys(self) -> list[str]:
        """The names of the arrays."""
        try:
            with open(self.path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                return list(arrays)
        except Exception as error:  # OSError, BadZipFile, ValueError, TypeError for a single array, ..., by damage
            raise self.error(f"damaged or not an .npz file: {first_line(error)}", "write it with numpy.savez") from None

    def names(self) -> Sequence[str]:
        """See `Splits.names`."""
        return list(self._pairs())

    def _pairs(self) -> dict[str, tuple[str, str]]:
        """Split -> names of its images and labels."""
        found = {}
        for images, labels in PAIRS:
            before, after = images.split("{}")
            for key in self.keys:
                split = key[len(before) : len(key) - len(after)]
                if key == images.format(split) and labels.format(split) in self.keys:
                    found[split] = (key, labels.format(split))
        if not found:
            hint = "name them train_images, train_labels, val_images and val_labels"
            raise self.error(f"no images and labels of splits among its arrays {', '.join(self.keys)}", hint)
        return found

    def read(self, name: str, classes: list[str] | None) -> Arrays:
        """See `Format.read`."""
        return self._arrays(self._pairs()[name], name)

    def whole(self, classes: list[str] | None) -> Arrays:
        """See `FormatOfOneFile.whole`."""
        if not {"images", "labels"} <= {*self.keys}:
            raise self.error(f"its arrays are {', '.join(self.keys)}", "name them images and labels")
        return self._arrays(("images", "labels"), self.path.stem)

    def _arrays(self, keys: tuple[str, str], split: str) -> Arrays:
        images, labels = map(self._array, keys)
        names = [str(name) for name in np.ravel(self._array(NAMES))] if NAMES in self.keys else None
        return self.arrays((images, labels), split, names)

    def _array(self, key: str) -> Any:
        try:
            with open(self.path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                return arrays[key]
        except Exception as error:  # as above; also MemoryError, zlib.error, and ValueError for pickled objects
            raise self.error(f"the array {key!r} cannot be read: {first_line(error)}", "write it with numpy.savez") from None
