"""Where images come from: random-access sources of uint8 images and integer labels."""

from functools import cache
from typing import NamedTuple

import numpy as np

from jaxdp.config import Config, ConfigError
from jaxdp.config import Data as DataConfig


class ArraySource:
    """Images and labels in memory. images: uint8 [N, H, W, 3]; labels: int32 [N]."""

    def __init__(self, images, labels):
        self.images = np.ascontiguousarray(images, np.uint8)
        self.labels = np.ascontiguousarray(labels, np.int32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]

    def batch(self, indices):
        """(images [B, H, W, 3] uint8, labels [B] int32) at these indices, freshly allocated."""
        return self.images[indices], self.labels[indices]


class SyntheticSource:
    """Images made when asked for, each a function of (seed, split, index) alone: a class colour under uniform noise.

    The colour of a class depends on the class alone, so that training and evaluation images agree and can be learnt.
    """

    def __init__(self, examples: int, image_size: int, classes: int, seed: int, split: int):
        self.examples, self.image_size, self.classes = examples, image_size, classes
        self.key = (seed << 8) + split
        self.colours = np.random.Generator(np.random.Philox(key=[7, classes])).integers(0, 128, (classes, 3), np.uint8)

    def __len__(self):
        return self.examples

    def __getitem__(self, index):
        if not 0 <= index < self.examples:
            raise IndexError(f"index {index} is outside the {self.examples} synthetic images")
        random = np.random.Generator(np.random.Philox(key=[self.key, index]))
        label = random.integers(self.classes, dtype=np.int32)
        noise = random.integers(0, 128, (self.image_size, self.image_size, 3), np.uint8)
        return noise + self.colours[label], label

    def batch(self, indices):
        """(images [B, H, W, 3] uint8, labels [B] int32) at these indices."""
        images = np.empty((len(indices), self.image_size, self.image_size, 3), np.uint8)
        labels = np.empty(len(indices), np.int32)
        for row, index in enumerate(indices):
            images[row], labels[row] = self[int(index)]
        return images, labels


class Datasets(NamedTuple):
    """What a run reads. mean and std, on the 0-255 scale, are those by which the device normalises the pixels."""

    train: ArraySource | SyntheticSource
    evaluation: ArraySource | SyntheticSource
    mean: float
    std: float


DIGITS, HELD_OUT, VALIDATION = 1797, 360, 288  # held out of all; for validation out of those that remain


@cache
def _digits(image_size: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Fixed, stratified splits of scikit-learn's digits: train (1,437), test (360); fit and validation share train."""
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    size = (image_size, image_size)
    grey = [
        np.asarray(Image.fromarray(np.asarray(d, np.float32)).resize(size, Image.Resampling.BICUBIC)) for d in digits.images
    ]
    pixels = np.clip(np.rint(np.stack(grey) * (255 / 16)), 0, 255).astype(np.uint8)
    images = np.repeat(pixels[..., None], 3, axis=-1)
    labels = digits.target.astype(np.int32)

    def split(indices, held_out):
        kept, held = train_test_split(indices, test_size=held_out, stratify=labels[indices], random_state=0)
        return np.sort(kept), np.sort(held)

    train, test = split(np.arange(len(labels)), HELD_OUT)
    fit, validation = split(train, VALIDATION)
    parts = {"train": train, "test": test, "fit": fit, "validation": validation}
    return {name: (images[rows], labels[rows]) for name, rows in parts.items()}


PUBLISHED = {"imagenet2012": 1_281_167, "cifar10": 50_000}  # training images of data sets that cannot be read yet


def training_examples(config: Config) -> int:
    """How many images an epoch has, without reading any."""
    data = config.data
    if data.source == "digits":
        return {"train": DIGITS - HELD_OUT, "fit": DIGITS - HELD_OUT - VALIDATION}[data.train_split]
    return PUBLISHED.get(data.source, data.train_examples)


def open_datasets(config: Config) -> Datasets:
    """The training and evaluation sources of a config. Raises ConfigError for a data set that cannot be read yet."""
    data: DataConfig = config.data
    if data.source in PUBLISHED:
        raise ConfigError(
            f"data.source: {data.source!r} is not allowed in training yet; it can be planned, and rehearsed with "
            f"--data.source synthetic --data.train-examples {PUBLISHED[data.source]}"
        )
    size = data.stored_size or data.image_size
    if data.source == "synthetic":
        train, held_out = (
            SyntheticSource(n, size, config.model.classes, config.seed, split)
            for split, n in enumerate((data.train_examples, data.eval_examples))
        )
        return Datasets(train, held_out, mean=127.5, std=52.0)
    parts = _digits(size)
    return Datasets(ArraySource(*parts[data.train_split]), ArraySource(*parts[data.eval_split]), mean=78.0, std=89.0)
