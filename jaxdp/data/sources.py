"""Where images come from: what a config names, opened as training and evaluation sources of uint8 images and labels."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdp.config import Config, ConfigError, crops_while_loading
from jaxdp.config import Data as DataConfig
from jaxdp.data.decode import centre_crop, random_for, random_resized_crop
from jaxdp.data.folder import EVALUATION_NAMES, ImageFolder, evaluation_split
from jaxdp.data.loader import Loader


class ArraySource:
    """Images and labels in memory. images: uint8 [N, H, W, 3]; labels: int32 [N]."""

    def __init__(self, images, labels):
        self.images = np.ascontiguousarray(images, np.uint8)
        self.labels = np.ascontiguousarray(labels, np.int32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]

    def batch(self, indices, positions=None):
        """(images [B, H, W, 3] uint8, labels [B] int32) at these indices, freshly allocated; positions do not matter here."""
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

    def batch(self, indices, positions=None):
        """(images [B, H, W, 3] uint8, labels [B] int32) at these indices."""
        images = np.empty((len(indices), self.image_size, self.image_size, 3), np.uint8)
        labels = np.empty(len(indices), np.int32)
        for row, index in enumerate(indices):
            images[row], labels[row] = self[int(index)]
        return images, labels


class Datasets(NamedTuple):
    """What a run reads: `__len__` and `batch(indices, positions)` -> (images uint8 [B, S, S, 3], labels int32 [B]).

    mean and std, on the 0-255 scale, are those by which the device normalises the pixels: a number, or one for each channel.
    """

    train: ArraySource | SyntheticSource | Loader
    evaluation: ArraySource | SyntheticSource | Loader
    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]

    @property
    def remarks(self) -> list[str]:
        """What people should know before the run: files that are left out."""
        return [
            text for part in (self.train, self.evaluation) for text in getattr(getattr(part, "source", None), "remarks", [])
        ]

    @property
    def class_names(self) -> list[str]:
        """Of the classes, as far as the source has names for them."""
        return getattr(self.evaluation, "class_names", [])

    def add_bad_images(self, found: dict[str, str]) -> None:
        """Take over what a session before this one has found."""
        getattr(self.train, "bad", {}).update(found)

    @property
    def bad_images(self) -> dict[str, str]:
        """Name -> reason of the images that were replaced."""
        return {name: reason for part in (self.train, self.evaluation) for name, reason in getattr(part, "bad", {}).items()}


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


PUBLISHED = {"imagenet2012": 1_281_167, "cifar10": 50_000}  # training images, for plans made where the data are not
IMAGENET_MEAN, IMAGENET_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
IN_MEMORY_BYTES, IN_MEMORY_SIDE = 2**29, 64  # data sets of small images up to so many bytes are decoded once


def training_examples(config: Config) -> int:
    """How many images an epoch has, without reading any. Raises ConfigError for a data set that is not there."""
    data = config.data
    if data.source == "digits":
        return {"train": DIGITS - HELD_OUT, "fit": DIGITS - HELD_OUT - VALIDATION}[data.train_split]
    if data.source == "synthetic":
        return data.train_examples
    if data.source in PUBLISHED and data.train_split == "train" and data.directory is None:
        return PUBLISHED[data.source]
    return len(open_split(data, data.train_split))


def open_datasets(config: Config, given=None) -> Datasets:
    """The training and evaluation sources of a config. Raises ConfigError for a data set that cannot be trained on.

    given: (training, evaluation), any objects with `__len__` and `__getitem__` -> (encoded bytes or uint8 pixels, label), in
    place of the config's source.
    """
    data = config.data
    if given is None and data.source == "synthetic":
        size = data.stored_size or data.image_size
        train, held_out = (
            SyntheticSource(n, size, config.model.classes, config.seed, split)
            for split, n in enumerate((data.train_examples, data.eval_examples))
        )
        return Datasets(train, held_out, mean=127.5, std=52.0)
    if given is None and data.source == "digits":
        parts = _digits(data.stored_size or data.image_size)
        held_out = parts[data.eval_split or "test"]
        return Datasets(ArraySource(*parts[data.train_split]), ArraySource(*held_out), mean=78.0, std=89.0)
    train, evaluation = _open_pair(data) if given is None else _pair(given)
    for part, name in ((train, "training"), (evaluation, "evaluation")):
        if len(part) == 0:
            raise ConfigError(f"data.source: the {name} data are empty")
        classes = getattr(part, "classes", None)
        count = classes if isinstance(classes, int) else len(classes or ())
        if count > config.model.classes:
            raise ConfigError(f"model.classes: {config.model.classes} is not allowed; {data.source} needs at least {count}")
    left_out = {"stop": "stop", "skip": "leave_out"}[data.on_bad_image]  # in place of it another would count twice
    return Datasets(
        _loaded(train, *training_shape(config), config, data.on_bad_image, "training image"),
        _loaded(evaluation, *_evaluation_shape(config), config, left_out, "evaluation image"),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def open_split(data: DataConfig, split: str, classes=None):
    if data.source == "folder":
        return ImageFolder(Path(data.directory) / split, classes)
    from jaxdp.data.prepared import Prepared

    return Prepared(data.source, data.directory, split)


def _open_pair(data: DataConfig):
    train = open_split(data, data.train_split)
    if data.source == "folder":
        return train, open_split(data, evaluation_split(Path(data.directory), data.eval_split), train.classes)
    known = train.info.splits
    split = data.eval_split or next((name for name in EVALUATION_NAMES if name in known), None)
    if split is None:
        raise ConfigError(
            f"data.eval_split: None is not allowed; {data.source} has only {', '.join(known)}; name one, as train[90%:]"
        )
    return train, open_split(data, split)


def training_shape(config: Config):
    """(function that fills a row, its size): a random crop here, or the whole for a transform on the device."""
    if crops_while_loading(config):
        ranges, seed = config.augment, config.seed
        return lambda pixels, out, position: random_resized_crop(
            pixels, out, ranges, random_for(seed, position)
        ), config.data.image_size
    size = config.data.stored_size or config.data.image_size
    return lambda pixels, out, position: centre_crop(pixels, out, size), size


def _evaluation_shape(config: Config):
    """As ImageNet is evaluated (short side 256, centre 224) after random crops; else the stored size, or all of the image."""
    if crops_while_loading(config):
        short, size = round(config.data.image_size * 8 / 7), config.data.image_size
    else:
        short = size = config.data.stored_size or config.data.image_size
    return lambda pixels, out, position: centre_crop(pixels, out, short), size


def _pair(given):
    """(training, evaluation) as the caller gives them. Raises ConfigError for anything but two sources."""
    pair = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(pair) != 2 or not all(hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in pair):
        raise ConfigError("datasets: give a pair (training, evaluation) of objects with __len__ and __getitem__")
    return pair


def _loaded(source, shape, size: int, config: Config, on_bad_image: str, what: str):
    """A Loader, or an ArraySource of all its images where they are small and few, and loaded in the same way every time."""
    loader = Loader(source, shape, size, config.model.classes, config.data.threads, on_bad_image, what)
    loader.class_names = _class_names(source)
    if size > IN_MEMORY_SIDE or len(source) * size**2 * 3 > IN_MEMORY_BYTES or crops_while_loading(config):
        return loader
    everything = np.arange(len(source))
    arrays = ArraySource(*loader.batch(everything, everything))
    arrays.bad, arrays.class_names = loader.bad, loader.class_names
    return arrays


def _class_names(source) -> list[str]:
    """Names of the classes, as far as the source has any."""
    names = getattr(source, "class_names", None) or getattr(source, "classes", None)
    return list(map(str, names)) if isinstance(names, (list, tuple)) else []


def keeps_images(data: DataConfig, train, platform: str) -> bool:
    """Whether all training images are kept on the devices. Raises ConfigError where they should be and are not in memory."""
    in_memory = isinstance(train, ArraySource)
    if data.resident == "on" and not in_memory:
        raise ConfigError(
            f"data.resident: 'on' is not allowed with {data.source}; its images are made as they are needed; give auto or off"
        )
    small = in_memory and train.images.nbytes <= IN_MEMORY_BYTES
    return data.resident == "on" or (data.resident == "auto" and small and platform != "cpu")
