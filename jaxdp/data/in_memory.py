"""Data sets that need no files: images in memory, generated images, and scikit-learn's digits."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxdp.data.loader import ItemSource

DIGITS, TEST, VALIDATION = 1797, 360, 288  # all, held out of all, and held out of the remaining training images


class ArraySource:
    """Images and labels in memory. images: uint8 [N, H, W, 3]; labels: int32 [N]; bad_images: see `Loader`.

    source: the items, in the same order, of which the images were decoded.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        bad_images: Mapping[str, str] | None = None,
        *,
        source: "ItemSource | None" = None,
    ) -> None:
        self.source = source
        self.images = np.ascontiguousarray(images, np.uint8)
        self.labels = np.ascontiguousarray(labels, np.int32)
        self.bad_images = dict(bad_images or {})

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        return self.images[index], self.labels[index]

    def add_bad_images(self, reasons: Mapping[str, str]) -> None:
        """Record images that an earlier session of the run could not read."""
        self.bad_images.update(reasons)

    def batch(self, indices: np.ndarray, positions: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(images [B, H, W, 3] uint8, labels [B] int32), freshly allocated; positions have no effect."""
        return self.images[indices], self.labels[indices]


class ArrayItems:
    """Images and labels of the caller, without a copy.

    images: uint8 [N, H, W] or [N, H, W, 1 or 3]; labels: integers or booleans [N].
    classes: the largest label plus one.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels
        self.classes = int(labels.max()) + 1 if labels.size else 0

    @property
    def missing_classes(self) -> list[int]:
        """Classes without an image."""
        return sorted({*range(min(self.classes, 2**20))} - {*np.unique(self.labels).tolist()})

    def labels_without(self, other: "ArrayItems") -> list[int]:
        """The labels that the other has not."""
        return np.setdiff1d(self.labels, other.labels).tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index], int(self.labels[index])


class SyntheticSource:
    """Generated images, each a function of (seed, split, index): the color of its class under uniform noise.

    Class colors do not depend on the seed or split, so that a network can learn them.
    """

    def __init__(self, examples: int, image_size: int, classes: int, *, seed: int, split: int) -> None:
        self.examples, self.image_size, self.classes = examples, image_size, classes
        self.key = (seed << 8) + split
        self.colors = np.random.Generator(np.random.Philox(key=[7, classes])).integers(0, 128, (classes, 3), np.uint8)

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        if not 0 <= index < self.examples:
            raise IndexError(f"index {index} is out of range for {self.examples} synthetic images")
        random = np.random.Generator(np.random.Philox(key=[self.key, index]))
        label = random.integers(self.classes, dtype=np.int32)
        noise = random.integers(0, 128, (self.image_size, self.image_size, 3), np.uint8)
        return noise + self.colors[label], label

    def batch(self, indices: np.ndarray, positions: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(images [B, S, S, 3] uint8, labels [B] int32); positions have no effect."""
        images = np.empty((len(indices), self.image_size, self.image_size, 3), np.uint8)
        labels = np.empty(len(indices), np.int32)
        for row, index in enumerate(indices):
            images[row], labels[row] = self[int(index)]
        return images, labels


@cache
def digits(image_size: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> (images, labels) of fixed, stratified splits of scikit-learn's digits.

    train has 1,437 images and test 360; fit and validation divide train.
    """
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    size = (image_size, image_size)
    gray = [np.asarray(Image.fromarray(np.asarray(d, np.float32)).resize(size, Image.Resampling.BICUBIC)) for d in bunch.images]
    pixels = np.clip(np.rint(np.stack(gray) * (255 / 16)), 0, 255).astype(np.uint8)
    images = np.repeat(pixels[..., None], 3, axis=-1)
    labels = bunch.target.astype(np.int32)

    def split(indices: np.ndarray, held_out: int) -> tuple[np.ndarray, np.ndarray]:
        kept, held = train_test_split(indices, test_size=held_out, stratify=labels[indices], random_state=0)
        return np.sort(kept), np.sort(held)

    train, test = split(np.arange(len(labels)), TEST)
    fit, validation = split(train, VALIDATION)
    splits = {"train": train, "test": test, "fit": fit, "validation": validation}
    return {name: (images[rows], labels[rows]) for name, rows in splits.items()}
