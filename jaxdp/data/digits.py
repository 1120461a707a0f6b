"""scikit-learn's handwritten digits: 1,797 real images (Alpaydin & Kaynak, UCI, CC BY 4.0), which the package brings along.

digits.npz has the images, [N, 8, 8] uint8 from 0 to 16, and stratified splits (0 fit, 1 validation, 2 test), which two calls
of `train_test_split` made. Importing scikit-learn takes longer than all else that a run does before it compiles.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from jaxdp.choices import SOURCES
from jaxdp.config import Config
from jaxdp.data.batch_sources import ArraySource
from jaxdp.data.classes import matching_labels
from jaxdp.data.datasets import Datasets, Source, class_error, model_classes, pixel_stats, resized

FILE = Path(__file__).with_name("digits.npz")
IMAGES, TEST, VALIDATION = 1797, 360, 288  # all, held out of all, and held out of the remaining training images


class Digits(Source):
    """The digits as images of any size, in memory."""

    def size(self, config: Config) -> tuple[int, int | None]:
        examples = {"train": IMAGES - TEST, "fit": IMAGES - TEST - VALIDATION}
        return examples[config.data.train_split], SOURCES[config.data.source].classes

    def open(self, config: Config, *, may_lack_classes: bool, trained: Sequence[str] | None) -> Datasets:
        names = tuple(map(str, range(model_classes(config, SOURCES[config.data.source].classes))))
        trained = names if trained is None else tuple(trained)
        relabel = matching_labels(names, trained, error=class_error(config, "digits", "training"))

        def split(config: Config, name: str) -> ArraySource:
            images, labels = digits(config.data.stored_size or config.data.image_size)[name]
            return ArraySource(images, labels if relabel is None else relabel[labels])

        train, evaluation = split(config, config.data.train_split), split(config, config.data.eval_split or "test")
        other_sizes = resized(config, lambda config: split(config, config.data.train_split))
        return Datasets(train, evaluation, *pixel_stats(config), class_count=len(names), classes=trained, resized=other_sizes)


@cache
def digits(image_size: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> (images, labels) of the splits: train has 1,437 images and test 360; fit and validation divide train."""
    from PIL import Image

    with np.load(FILE) as file:
        small, labels, split = file["images"], file["labels"].astype(np.int32), file["split"]
    size = (image_size, image_size)
    gray = [np.asarray(Image.fromarray(image.astype(np.float32)).resize(size, Image.Resampling.BICUBIC)) for image in small]
    pixels = np.clip(np.rint(np.stack(gray) * (255 / 16)), 0, 255).astype(np.uint8)
    images = np.repeat(pixels[..., None], 3, axis=-1)
    splits = {"train": split < 2, "test": split == 2, "fit": split == 0, "validation": split == 1}
    return {name: (images[rows], labels[rows]) for name, rows in splits.items()}
