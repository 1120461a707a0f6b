"""Opens the data source that a config names as training and evaluation sets of decoded images."""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxdp.choices import SOURCES
from jaxdp.config import (
    MAX_CLASSES,
    Config,
    at_image_size,
    crops_while_loading,
    evaluation_share,
    evaluation_side,
    phase_image_size,
)
from jaxdp.config import Data as DataConfig
from jaxdp.data import in_memory, remote_folder
from jaxdp.data.decode import center_crop, crop_and_resize, random_numbers, random_resized_crop, resize_and_crop
from jaxdp.data.image_folder import EVALUATION_NAMES, ImageFolder, evaluation_split
from jaxdp.data.in_memory import ArrayItems, ArraySource, SyntheticSource
from jaxdp.data.loader import ItemSource, Loader, OnBadImage, Transform
from jaxdp.data.remote import Remote
from jaxdp.data.remote_folder import RemoteFolder, split_names
from jaxdp.data.remote_prepared import RemotePrepared
from jaxdp.data.tfds import TfdsSource, open_builder
from jaxdp.errors import ConfigError, plural
from jaxdp.files import is_url
from jaxdp.validation import check_classes

SYNTHETIC_CLASSES = 1000  # unless the model's number is given
IN_MEMORY_BYTES, IN_MEMORY_SIDE = 2**29, 64  # limits up to which a data set of small images is decoded once

DecodedSource = ArraySource | SyntheticSource | Loader
Files = ImageFolder | RemoteFolder | TfdsSource


class Datasets(NamedTuple):
    """The training and evaluation sets of a run.

    mean, std: pixel statistics on the 0-255 scale with which the device normalizes images, a number or one for each channel;
    class_count: number of classes; classes: their names, empty where unknown; warnings: what users should know, such as
    ignored files; resized: the training set for the phases whose images have another size, by `image_size`.
    """

    train: DecodedSource
    evaluation: DecodedSource
    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]
    class_count: int
    classes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    resized: Mapping[int, DecodedSource] = MappingProxyType({})

    def train_at(self, size: int) -> DecodedSource:
        """The training set for a phase with images of height and width `size`."""
        return self.resized.get(size, self.train)

    def add_bad_images(self, reasons: dict[str, str]) -> None:
        """Record images that an earlier session of the run could not read."""
        if not isinstance(self.train, SyntheticSource):
            self.train.add_bad_images(reasons)

    @property
    def bad_images(self) -> dict[str, str]:
        """Name -> reason of the images that could not be read."""
        sources = (self.train, *self.resized.values(), self.evaluation)
        readable = [source for source in sources if not isinstance(source, SyntheticSource)]
        return {name: reason for source in readable for name, reason in source.bad_images.items()}


class Reader(NamedTuple):
    """The implementation of a data source.

    open: (config, whether the data may lack classes of the model) -> data sets. size: (number of training images, number of
    classes or None), without reading any image.
    """

    open: Callable[[Config, bool], Datasets]
    size: Callable[[Config], tuple[int, int | None]]


def _resized(config: Config, open_training: Callable[[Config], DecodedSource]) -> dict[int, DecodedSource]:
    """`Datasets.resized`. Images of a `stored_size` have one size in all phases."""
    sizes = {phase_image_size(config, index) for index in range(len(config.batch))} - {config.data.image_size}
    return {size: open_training(at_image_size(config, size)) for size in sorted(sizes) if config.data.stored_size is None}


def _open_digits(config: Config, may_lack_classes: bool) -> Datasets:
    def split(config: Config, name: str) -> ArraySource:
        return ArraySource(*in_memory.digits(config.data.stored_size or config.data.image_size)[name])

    train, evaluation = (split(config, name) for name in (config.data.train_split, config.data.eval_split or "test"))
    names = tuple(map(str, range(_model_classes(config, SOURCES["digits"].classes))))
    resized = _resized(config, lambda config: split(config, config.data.train_split))
    return Datasets(train, evaluation, *pixel_stats(config), class_count=len(names), classes=names, resized=resized)


def _size_of_digits(config: Config) -> tuple[int, int | None]:
    train = in_memory.DIGITS - in_memory.TEST
    return {"train": train, "fit": train - in_memory.VALIDATION}[config.data.train_split], SOURCES["digits"].classes


def _open_synthetic(config: Config, may_lack_classes: bool) -> Datasets:
    _, classes = _size_of_synthetic(config)

    def generate(config: Config, split: int) -> SyntheticSource:
        data = config.data
        count, size = (data.train_examples, data.eval_examples)[split], data.stored_size or data.image_size
        return SyntheticSource(count, size, classes, seed=config.seed, split=split)

    resized = _resized(config, lambda config: generate(config, 0))
    return Datasets(generate(config, 0), generate(config, 1), *pixel_stats(config), class_count=classes, resized=resized)


def _size_of_synthetic(config: Config) -> tuple[int, int]:
    return config.data.train_examples, config.model.classes or SYNTHETIC_CLASSES


def _open_files(config: Config, may_lack_classes: bool) -> Datasets:
    if may_lack_classes:
        train = evaluation = open_evaluation_split(config)
    else:
        (_, train), (_, evaluation) = open_splits(config)
    for source in (train, evaluation):
        if isinstance(source, TfdsSource):
            source.start()
    return _decoded(config, train, evaluation, name=config.data.source, may_lack_classes=may_lack_classes)


def open_splits(config: Config) -> list[tuple[str, Files]]:
    """(name, encoded images) of the training and the evaluation split of a folder or a data set of tensorflow-datasets.

    Raises ConfigError if one of them does not exist.
    """
    data, remote = config.data, _open_remote(config)
    if data.source == "folder":
        train_folder = _folder_split(data, data.train_split, remote=remote)
        folder = _folder_evaluation_split(data, remote)
        return [(data.train_split, train_folder), (folder, _folder_split(data, folder, train_folder.classes, remote=remote))]
    prepared = RemotePrepared(remote, data.source) if remote else None
    train = _tfds_split(data, data.train_split, prepared)
    split = _tfds_evaluation_split(data, train.splits)
    return [(data.train_split, train), (split, _tfds_split(data, split, prepared))]


def open_evaluation_split(config: Config) -> Files:
    """The encoded images of the evaluation split, without those of the training split, which need not exist.

    Raises ConfigError if the split does not exist.
    """
    data, remote = config.data, _open_remote(config)
    if data.source == "folder":
        has_train = data.train_split in split_names(remote) if remote else (_root(data) / data.train_split).is_dir()
        classes = _folder_split(data, data.train_split, remote=remote).classes if has_train else None
        return _folder_split(data, _folder_evaluation_split(data, remote), classes, remote=remote)
    prepared = RemotePrepared(remote, data.source) if remote else None
    splits = tuple(open_builder(data.source, str(prepared.directory) if prepared else data.directory).info.splits)
    return _tfds_split(data, _tfds_evaluation_split(data, splits), prepared)


def _open_remote(config: Config) -> Remote | None:
    """The data set at the URL of `data.directory`; None for a local directory."""
    return Remote(config.data.directory, config.storage) if config.data.directory and is_url(config.data.directory) else None


def _root(data: DataConfig) -> Path:
    return Path(data.directory or "")


def _folder_evaluation_split(data: DataConfig, remote: Remote | None) -> str:
    if remote:
        return remote_folder.evaluation_split(remote, data.eval_split)
    return evaluation_split(_root(data), data.eval_split)


def _tfds_evaluation_split(data: DataConfig, splits: tuple[str, ...]) -> str:
    """The evaluation split: that of the config, or the first of EVALUATION_NAMES that exists."""
    split = data.eval_split or next((name for name in EVALUATION_NAMES if name in splits), None)
    if split is None:
        reason = f"{data.source} has only the splits {', '.join(splits)}"
        raise ConfigError("data.eval_split", None, reason=reason, hint="give one, for example train[90%:]")
    return split


def _size_of_files(config: Config) -> tuple[int, int | None]:
    data = config.data
    published = SOURCES[data.source]
    if published.train_images is not None and data.train_split == "train" and data.directory is None:
        return published.train_images, published.classes
    source = open_split(config, data.train_split)
    return len(source), _stated_classes(source)


def _size_of_folder(config: Config) -> tuple[int, int | None]:
    (_, train), _ = open_splits(config)  # the evaluation split too, to raise what a run would
    return len(train), _stated_classes(train)


TFDS = Reader(_open_files, _size_of_files)
READERS = SOURCES.implement(
    {
        "digits": Reader(_open_digits, _size_of_digits),
        "synthetic": Reader(_open_synthetic, _size_of_synthetic),
        "folder": Reader(_open_files, _size_of_folder),
        "given": TFDS,
        "imagenet2012": TFDS,
        "cifar10": TFDS,
    }
)
"""Source name -> Reader; every other name is a data set of tensorflow-datasets."""


def _reader(config: Config) -> Reader:
    return READERS.get(config.data.source, TFDS)


def training_examples(config: Config) -> int:
    """Number of training images, without reading any. Raises ConfigError for a data set that does not exist."""
    return _reader(config).size(config)[0]


def inspect(config: Config) -> tuple[Config, int]:
    """(the config with the number of classes, number of training images), without reading any image.

    Raises ConfigError for a data set that does not exist or has another number of classes.
    """
    examples, classes = _reader(config).size(config)
    return with_classes(config, _model_classes(config, classes)), examples


def with_classes(config: Config, classes: int) -> Config:
    """The config with a number of classes."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, classes=classes))


def pixel_stats(config: Config, source: str | None = None) -> tuple[float | tuple[float, ...], float | tuple[float, ...]]:
    """(mean, std) with which a run normalizes images, known without its data; see `Datasets`. source: if not the config's."""
    data, published = config.data, SOURCES[source or config.data.source]
    mean, std = (tuple(round(255 * share, 9) for share in shares) for shares in (data.mean, data.std))
    return mean or published.mean, std or published.std


def open_datasets(config: Config, pair: Sequence[ItemSource] | None = None, *, may_lack_classes: bool = False) -> Datasets:
    """The data sets of a config. pair: (training, evaluation) items from Python, which replace the config's source.

    may_lack_classes: whether the data may have fewer classes than the model, as in an evaluation. The training images of
    files are then not opened.
    Raises ConfigError for a data set that cannot be trained on.
    """
    if pair is not None:
        return _decoded(config, *_check_pair(pair), name="given", may_lack_classes=may_lack_classes)
    return _reader(config).open(config, may_lack_classes)


def open_split(config: Config, split: str) -> Files:
    """The encoded images of a split of a folder or a data set of tensorflow-datasets."""
    data, remote = config.data, _open_remote(config)
    if data.source == "folder":
        return _folder_split(data, split, remote=remote)
    return _tfds_split(data, split, RemotePrepared(remote, data.source) if remote else None)


def _folder_split(
    data: DataConfig, split: str, classes: list[str] | None = None, *, remote: Remote | None
) -> ImageFolder | RemoteFolder:
    return RemoteFolder.open(remote, split, classes) if remote else ImageFolder.open(_root(data) / split, classes)


def _tfds_split(data: DataConfig, split: str, prepared: RemotePrepared | None) -> TfdsSource:
    field = "data.train_split" if split == data.train_split else "data.eval_split"
    return TfdsSource.open(data.source, data.directory, split, field=field, prepared=prepared)


def training_transform(config: Config) -> tuple[Transform, int]:
    """(transform, image size) of training images: a random crop, or all of the image where the device augments it."""
    if crops_while_loading(config):
        ranges, seed = config.augment, config.seed

        def crop(pixels: np.ndarray, out: np.ndarray, position: int) -> None:
            random_resized_crop(pixels, out, ranges=ranges, random=random_numbers(seed, position))

        return crop, config.data.image_size
    size = config.data.stored_size or config.data.image_size
    return lambda pixels, out, position: center_crop(pixels, out, size), size


def evaluation_transform(config: Config) -> tuple[Transform, int]:
    """(transform, image size) of evaluation images.

    As the fields `data.eval_...` say, if one is given. Else, after training on random crops, ImageNet's standard: short side
    256/224 of the image size, then the center. Otherwise all of the image in the stored size.
    """
    short, size = evaluation_sides(config)
    if config.data.eval_interpolation == "area":
        share = evaluation_share(config)
        return lambda pixels, out, position: crop_and_resize(pixels, out, share=share), size
    if config.data.sets_evaluation:
        prepare = partial(resize_and_crop, short_side=short, interpolation=config.data.eval_interpolation)
        return lambda pixels, out, position: prepare(pixels, out), size
    return lambda pixels, out, position: center_crop(pixels, out, short), size


def evaluation_sides(config: Config) -> tuple[int, int]:
    """(short side, side of the center crop), in pixels, to which the host resizes evaluation images, then crops them."""
    if config.data.sets_evaluation:
        return evaluation_side(config), config.data.evaluated_size
    if crops_while_loading(config):
        return evaluation_side(config), config.data.image_size
    size = config.data.stored_size or config.data.image_size
    return size, size


def prediction_loader(config: Config, source: ItemSource) -> Loader:
    """Images prepared as for evaluation; unreadable ones are ignored and listed in `Loader.bad_images`."""
    transform, size = evaluation_transform(config)
    classes, threads = config.model.class_count, config.data.threads
    return Loader(source, transform=transform, size=size, classes=classes, threads=threads, on_bad_image="ignore")


def is_resident(data: DataConfig, datasets: Datasets, platform: str) -> bool:
    """Whether the whole training set is kept on the devices. Raises ConfigError where `on` is impossible."""
    train, reasons = datasets.train, []
    if not isinstance(train, ArraySource):
        reasons.append(f"images of {data.source} are not kept in memory")
    elif datasets.resized:
        reasons.append("the phases have images of different sizes")
    if data.resident == "on" and reasons:
        raise ConfigError("data.resident", "on", reason=reasons[0], hint="give auto or off")
    if data.resident == "auto":
        return isinstance(train, ArraySource) and not reasons and train.images.nbytes <= IN_MEMORY_BYTES and platform != "cpu"
    return data.resident == "on"


def _decoded(
    config: Config, train: ItemSource, evaluation: ItemSource, *, name: str, may_lack_classes: bool = False
) -> Datasets:
    """Data sets of two sources of single items. name: of the data source. may_lack_classes: see `open_datasets`.

    Raises ConfigError for an empty source, and for another number of classes than the model has.
    """
    only_evaluates = may_lack_classes and train is evaluation
    for source, kind in ((train, "training"), (evaluation, "evaluation")):
        if len(source) == 0:
            raise ConfigError("data.source", name, reason=f"the {kind} set is empty")
    stated = max(_stated_classes(train) or 0, _stated_classes(evaluation) or 0) or None
    if may_lack_classes and config.model.classes is not None and (stated or 0) <= config.model.classes:
        stated = None
    counted = None
    if stated and isinstance(train, ArrayItems):
        counted = f"the arrays have {plural(stated, 'class')}, from 0 to the largest label, {stated - 1}"
    elif stated and name == "given":
        counted = f"the given data have {plural(stated, 'class')}"
    config = with_classes(config, _model_classes(config, stated, counted=counted))
    on_bad_image, warned = config.data.on_bad_image, threading.Event()

    def open_training(config: Config) -> DecodedSource:
        transform = training_transform(config)
        return _loaded(train, config, transform, on_bad_image=on_bad_image, kind="training image", warned=warned)

    # An evaluation ignores bad images: a replacement would count twice.
    ignore: OnBadImage = "ignore" if on_bad_image == "skip" else on_bad_image
    transform = evaluation_transform(config)
    held_out = _loaded(evaluation, config, transform, on_bad_image=ignore, kind="evaluation image", warned=warned)
    missing = train.missing_classes if isinstance(train, ArrayItems) else []
    from_one = "; if your labels count from 1, subtract 1" if missing[:1] == [0] else ""
    warnings = [f"no training image has the label {missing[0]}, and labels count from 0{from_one}"] if missing else []
    if isinstance(train, ArrayItems) and isinstance(evaluation, ArrayItems) and (unseen := evaluation.labels_without(train)):
        warnings.append(f"the evaluation set has the label {unseen[0]}, which no training image has")
    files = (evaluation,) if train is evaluation else (train, evaluation)
    warnings += [text for source in files for text in getattr(source, "warnings", ())]
    return Datasets(
        held_out if only_evaluates else open_training(config),
        held_out,
        *pixel_stats(config, name),
        class_count=config.model.class_count,
        classes=_class_names(train),
        warnings=tuple(warnings),
        resized={} if only_evaluates else _resized(config, open_training),
    )


def _loaded(
    source: ItemSource,
    config: Config,
    transform_and_size: tuple[Transform, int],
    *,
    on_bad_image: OnBadImage,
    kind: str,
    warned: threading.Event,
) -> Loader | ArraySource:
    """A Loader, or all of its images in memory if they are small and few and their transform is not random."""
    transform, size = transform_and_size
    classes, threads = config.model.class_count, config.data.threads
    loader = Loader(
        source,
        transform=transform,
        size=size,
        classes=classes,
        threads=threads,
        on_bad_image=on_bad_image,
        kind=kind,
        warned=warned,
    )
    if size > IN_MEMORY_SIDE or len(source) * size**2 * 3 > IN_MEMORY_BYTES or crops_while_loading(config):
        return loader
    indices = np.arange(len(source))
    loader.read_ahead([indices])
    images, labels = loader.batch(indices, indices)
    return ArraySource(images, labels, loader.bad_images, source=source)


def _stated_classes(source: ItemSource) -> int | None:
    """The number of classes that a source states in its attribute `classes`, a number or a list of names."""
    classes: Any = getattr(source, "classes", None)
    return int(classes) if isinstance(classes, (int, np.integer)) else len(classes) if classes else None


def _model_classes(config: Config, stated: int | None, *, counted: str | None = None) -> int:
    """The number of classes of the model: the one that the data state, or else the config's.

    counted: see `check_classes`. Raises ConfigError if they differ or are both None.
    """
    check_classes(config, stated, counted=counted)
    count = stated if config.model.classes is None else config.model.classes
    if count is None:
        python = "load_config(name, ['--data.source', 'given', '--model.classes', 'N'])"
        hint = f"give the data set an attribute `classes`, or set --model.classes (in Python, {python})"
        raise ConfigError("model.classes", None, reason="the data set does not state its number of classes", hint=hint)
    if count < 2:
        raise ConfigError("model.classes", count, reason=f"data.source={config.data.source!r} has only one class")
    if count > MAX_CLASSES:
        hint = "labels are the numbers of the classes, from 0"
        raise ConfigError("model.classes", count, reason=f"the data set has more than {MAX_CLASSES:,} classes", hint=hint)
    return count


def _class_names(source: ItemSource) -> tuple[str, ...]:
    names: Any = getattr(source, "class_names", None) or getattr(source, "classes", None)
    if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
        return tuple(names)
    return ()


def _check_pair(pair: Sequence[Any]) -> tuple[ItemSource, ItemSource]:
    items = tuple(pair) if isinstance(pair, (tuple, list)) else ()
    if len(items) == 2 and all(hasattr(item, "ndim") for item in items):
        reason, hint = "are two arrays, not two data sets", "give ((images, labels), (evaluation_images, evaluation_labels))"
        raise ConfigError("datasets", reason=reason, hint=hint)
    for item, name in zip(items, ("training", "evaluation"), strict=False):
        if hasattr(item, "dataset") and hasattr(item, "batch_size"):
            raise ConfigError("datasets", reason=f"the {name} set is a DataLoader", hint="pass its dataset: loader.dataset")
    if len(items) != 2 or not all(hasattr(source, "__len__") and hasattr(source, "__getitem__") for source in items):
        reason = "must be a pair (training, evaluation) of arrays (images, labels) or of objects with __len__ and __getitem__"
        raise ConfigError("datasets", reason=reason)
    training, evaluation = (_as_source(item, name) for item, name in zip(items, ("training", "evaluation"), strict=True))
    return training, evaluation


def _is_image(item: Any) -> bool:
    return getattr(item, "ndim", 0) >= 2


def _as_source(item: Any, name: str) -> ItemSource:
    """A source of a pair of arrays (images, labels); any other object unchanged."""
    if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], list) and all(map(_is_image, item[0])):
        hint = "give arrays: (numpy.stack(images), numpy.array(labels))"
        raise ConfigError("datasets", reason=f"{name} images are a list", hint=hint)
    if not (isinstance(item, (tuple, list)) and len(item) == 2 and getattr(item[0], "ndim", 0) >= 3):
        return item
    images, labels = np.asarray(item[0]), np.asarray(item[1])
    if images.dtype != np.uint8 or images.ndim > 4 or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise ConfigError(
            "datasets",
            reason=f"{name} images are {images.dtype} of shape {images.shape}",
            hint="give uint8 pixels from 0 to 255 of shape [N, H, W, 3], [N, H, W, 1] or [N, H, W]",
        )
    if labels.shape == (len(images), 1):  # as Keras has them
        labels = labels[:, 0]
    if labels.dtype.kind not in "iub" or labels.shape != images.shape[:1]:
        raise ConfigError(
            "datasets",
            reason=f"{name} labels are {labels.dtype} of shape {labels.shape}",
            hint=f"give integers of shape {images.shape[:1]}, one for each image",
        )
    return ArrayItems(images, labels)
