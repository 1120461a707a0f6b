"""scikit-learn's handwritten digits: 1,797 real images, which the package brings along."""

from functools import cache

import numpy as np

from jaxdp.choices import SOURCES
from jaxdp.config import Config
from jaxdp.data.datasets import Datasets, Source, model_classes, pixel_stats, resized
from jaxdp.data.loader import ArraySource

IMAGES, TEST, VALIDATION = 1797, 360, 288  # all, held out of all, and held out of the remaining training images


class Digits(Source):
    """The digits as images of any size, in memory."""

    def size(self, config: Config) -> tuple[int, int | None]:
        """See `Source.size`."""
        examples = {"train": IMAGES - TEST, "fit": IMAGES - TEST - VALIDATION}
        return examples[config.data.train_split], SOURCES[config.data.source].classes

    def open(self, config: Config, *, may_lack_classes: bool) -> Datasets:
        """See `Source.open`."""

        def split(config: Config, name: str) -> ArraySource:
            return ArraySource(*digits(config.data.stored_size or config.data.image_size)[name])

        train, evaluation = split(config, config.data.train_split), split(config, config.data.eval_split or "test")
        names = tuple(map(str, range(model_classes(config, SOURCES[config.data.source].classes))))
        other_sizes = resized(config, lambda config: split(config, config.data.train_split))
        return Datasets(train, evaluation, *pixel_stats(config), class_count=len(names), classes=names, resized=other_sizes)


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
