"""Generated images, of any size and number."""

from collections.abc import Sequence

import numpy as np

from jaxdp.config import Config
from jaxdp.data.classes import matching_labels
from jaxdp.data.datasets import Datasets, Source, class_error, pixel_stats, resized

CLASSES = 1000  # unless the model's number is given


class SyntheticImages(Source):
    """Seeded images, as many as `train_examples` and `eval_examples` say."""

    def size(self, config: Config) -> tuple[int, int]:
        return config.data.train_examples, config.model.classes or CLASSES

    def open(self, config: Config, *, may_lack_classes: bool, trained: Sequence[str] | None) -> Datasets:
        _, classes = self.size(config)
        error = class_error(config, "synthetic", "training")
        if matching_labels((), trained or (), error=error) is not None:
            raise error("its numbers are in a different order than in training", "use another data set")

        def generate(config: Config, split: int) -> SyntheticSource:
            data = config.data
            count, size = (data.train_examples, data.eval_examples)[split], data.stored_size or data.image_size
            return SyntheticSource(count, size, classes, seed=config.seed, split=split)

        train, evaluation = generate(config, 0), generate(config, 1)
        other_sizes = resized(config, lambda config: generate(config, 0))
        return Datasets(train, evaluation, *pixel_stats(config), class_count=classes, resized=other_sizes)


class SyntheticSource:
    """Generated images, each a function of (seed, split, index): the color of its class under uniform noise.

    Class colors do not depend on the seed or split, so that a network can learn them.
    """

    def __init__(self, examples: int, image_size: int, classes: int, *, seed: int, split: int) -> None:
        self.examples, self.image_size, self.classes = examples, image_size, classes
        self.key = (seed << 8) + split
        self.bad_images: dict[str, str] = {}
        self.cumulative: np.ndarray | None = None
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
