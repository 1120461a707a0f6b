"""Images and labels in NumPy's `.npz` files.

One file has the arrays of all splits, SPLIT_images and SPLIT_labels (as MedMNIST) or x_SPLIT and y_SPLIT (as Keras); or a file
is a split with `images` and `labels`. An optional array `class_names` names the classes.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from jaxdp.data.file_format import Format, listed
from jaxdp.data.given import ArrayItems
from jaxdp.errors import first_line

PAIRS = (("{}_images", "{}_labels"), ("x_{}", "y_{}"))
WHOLE = ("images", "labels")
NAMES = "class_names"
RENAME = "rename them"


class Npz(Format):
    """The splits of one file."""

    @cached_property
    def keys(self) -> list[str]:
        """The names of the arrays."""
        return self._load(list)

    @cached_property
    def pairs(self) -> dict[str, tuple[str, str]]:
        """Split -> names of its images and labels. Raises ConfigError if there are none."""
        found = {}
        for images, labels in PAIRS:
            before, after = images.split("{}")
            for key in self.keys:
                split = key.removeprefix(before).removesuffix(after)
                if split and key == images.format(split) and labels.format(split) in self.keys:
                    found[split] = (key, labels.format(split))
        if not found:
            wanted = "train_images and train_labels"
            raise self.error(f"no {wanted} among its arrays {listed(self.keys)}", RENAME)
        return found

    def names(self) -> Sequence[str]:
        """See `Splits.names`."""
        return list(self.pairs)

    def read(self, name: str, classes: list[str] | None) -> ArrayItems:
        """See `Format.read`."""
        return self._arrays(self.pairs[name], name)

    def whole(self, classes: list[str] | None) -> ArrayItems:
        """The images of a file that is a single split; see `Splits.open`."""
        if not {*WHOLE} <= {*self.keys}:
            raise self.error(f"no {' and '.join(WHOLE)} among its arrays {listed(self.keys)}", RENAME)
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
