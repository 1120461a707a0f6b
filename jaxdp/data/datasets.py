"""The training and evaluation sets of a run, and the interface of the data sources that open them."""

import copy
import dataclasses
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxdp.choices import SOURCES, kind_of_task
from jaxdp.config import MAX_CLASSES, Config, at_image_size, phase_image_size
from jaxdp.data.batch_sources import ArraySource, DecodedImages, ItemSource, OnBadImage, Transform
from jaxdp.data.classes import matching_labels, names_of
from jaxdp.data.held_out import divide, has_held_out
from jaxdp.data.host_crops import evaluation_transform, training_transform
from jaxdp.data.prefetch import BatchSource
from jaxdp.errors import ConfigError, printable
from jaxdp.targets import NoTarget, own_outputs, target_of
from jaxdp.validation import check_classes

EVALUATION_NAMES = ("val", "validation", "valid", "test")  # of the evaluation split, in this order, unless the config names one
SIMILAR_NAMES = {  # flag -> (names of the split, names that only look like one)
    "--data.train-split": (("train",), r"(train|training)([ _-].*)?"),
    "--data.eval-split": (EVALUATION_NAMES, r"(val|valid|validation|test|testing|eval|dev)([ _-].*)?"),
}
HOLDOUT_HINT = "hold out a tenth of the images with --data.holdout 0.1"
HELD_OUT = "held-out"  # the split of images that `data.holdout` takes from the training split
LISTED = 20  # names in a message
IN_MEMORY_BYTES, IN_MEMORY_SIDE = 2**29, 64  # a data set of small images up to these limits is decoded once


class Datasets(NamedTuple):
    """The training and evaluation sets of a run.

    mean, std: pixel statistics on the 0-255 scale with which the device normalizes images, a number or one for each channel;
    class_count: number of classes; classes: their names, empty where unknown; warnings: what users should know, such as
    ignored files; resized: the training set for the phases whose images have another size, by `image_size`.
    """

    train: BatchSource
    evaluation: BatchSource
    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]
    class_count: int
    classes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    resized: Mapping[int, BatchSource] = MappingProxyType({})

    def train_at(self, size: int) -> BatchSource:
        """The training set for a phase with images of height and width `size`."""
        return self.resized.get(size, self.train)

    @property
    def bad_images(self) -> dict[str, str]:
        """Name -> reason of the images that could not be read."""
        sources = (self.train, *self.resized.values(), self.evaluation)
        return {name: reason for source in sources for name, reason in source.bad_images.items()}


class Source(ABC):
    """A data source. Its entry in `jaxdp.choices.SOURCES` holds what is known without its data."""

    @abstractmethod
    def size(self, config: Config) -> tuple[int, int | None]:
        """(number of training images, number of classes or None), without reading any image.

        Raises ConfigError for a data set that does not exist.
        """

    @abstractmethod
    def open(self, config: Config, *, may_lack_classes: bool, trained: Sequence[str] | None) -> Datasets:
        """The data sets of a config.

        may_lack_classes: whether the data may have fewer classes than the model, as in an evaluation. The training images of
        files are then not opened. trained: the class names of the run whose labels these data get, () if its classes have
        numbers; None for a new run. Raises ConfigError for a data set that cannot be trained on, or of other classes.
        """

    def splits(self, config: Config) -> Sequence[tuple[str, ItemSource]]:
        """(name, images) of the training and the evaluation split.

        Raises ConfigError if one of them does not exist, or for a source that makes its images itself.
        """
        raise ConfigError("data.source", config.data.source, reason="has no files to read", hint="use folder")

    def split(self, config: Config, name: str) -> ItemSource:
        """The images of a split. Raises ConfigError as `splits`."""
        return dict(self.splits(config))[name]


class EncodedItems(ItemSource, Protocol):
    """The encoded images of a split."""

    @property
    def classes(self) -> int | list[str]:
        """Their number or their names."""


class SplitReader(ABC):
    """The splits of a data set of files. Every method raises ConfigError for files that cannot be read.

    place: their directory or URL. matches_classes: whether the classes of the training split hold for the other splits, and
    their order.
    """

    matches_classes, place = False, ""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """The names of the splits; some data sets have others besides, such as parts of these."""

    @abstractmethod
    def open(self, name: str, classes: list[str] | None = None) -> EncodedItems:
        """The images of a split. classes: of the training split, if that has been opened and the data set matches them.

        Raises ConfigError for a split that does not exist, is empty or has other classes.
        """

    def undivided(self, train: str) -> EncodedItems | None:
        """The images of a data set without splits; None if it has some. train: name of the training split."""
        return None

    def no_split(self, name: str) -> ConfigError:
        """The error for a split that does not exist."""
        names = sorted(self.names())
        hint = f"name one of {listed(names)} with --data.train-split or --data.eval-split" if names else ""
        hint = similar_splits(names) or hint
        return ConfigError("data.directory", self.place, reason=f"it has no split {name!r}", hint=hint)

    def evaluation_name(self, requested: str | None) -> str:
        """The evaluation split: the requested one, or the first of `EVALUATION_NAMES` that exists."""
        if requested:
            return requested
        names = self.names()
        if found := [name for name in EVALUATION_NAMES if name in names]:
            return found[0]
        reason = f"{self.place!r} has none of the splits {', '.join(EVALUATION_NAMES)}"
        others = f"name one with --data.eval-split; it has {listed(sorted(names)) or 'none'}"
        hint = similar_splits(names) or f"{HOLDOUT_HINT}, or {others}"
        raise ConfigError("data.eval_split", None, reason=reason, hint=hint)


class Divided(SplitReader):
    """The two parts of a data set that has training images alone."""

    def __init__(self, reader: SplitReader, config: Config) -> None:
        self.reader, self.config, self.place = reader, config, reader.place

    def names(self) -> Sequence[str]:
        return [self.config.data.train_split, HELD_OUT]

    def evaluation_name(self, requested: str | None) -> str:
        return HELD_OUT

    def open(self, name: str, classes: list[str] | None = None) -> EncodedItems:
        return self._parts[name]

    @cached_property
    def _parts(self) -> dict[str, Any]:
        train = self.config.data.train_split
        whole = self.reader.undivided(train)
        if whole is None:
            if found := [name for name in EVALUATION_NAMES if name in self.reader.names() and name != train]:
                raise has_held_out(self.config, f"split {found[0]!r}")
            whole = self.reader.open(train)
        return dict(zip(self.names(), divide(whole, copy.copy(whole), self.config), strict=True))


def similar_splits(names: Sequence[str]) -> str:
    """A hint with the flags for names that look like splits, such as Train and Val; "" without any."""
    flags = []
    for flag, (usual, similar) in SIMILAR_NAMES.items():
        found = sorted(name for name in names if re.fullmatch(similar, name, re.IGNORECASE))
        if found and not set(usual) & set(found):
            flags.append(f"{flag} {shlex.quote(found[0])}")
    return f"use {' '.join(flags)}" if flags else ""


def has_splits(names: Sequence[str], train: str) -> bool:
    """Whether folders are splits, or may be meant as splits, and not classes. train: name of the training split."""
    return bool({train, *EVALUATION_NAMES} & {*names} or similar_splits(names))


def listed(names: Sequence[str]) -> str:
    """Names of splits, columns or arrays for a message."""
    return ", ".join(printable(name, 40) for name in names[:LISTED]) + ", ..." * (len(names) > LISTED)


class FileSource(Source):
    """A data source of files with encoded images."""

    @abstractmethod
    def data_set(self, config: Config) -> SplitReader:
        """The data set of a config."""

    def size(self, config: Config) -> tuple[int, int | None]:
        """See `Source.size`; opens the evaluation split too, to raise what a run would."""
        (_, train), _ = self.splits(config)
        return len(train), stated_classes(train)

    def splits(self, config: Config) -> Sequence[tuple[str, EncodedItems]]:
        data_set, train_name = self._splits_of(config), config.data.train_split
        train, name = data_set.open(train_name), data_set.evaluation_name(config.data.eval_split)
        return [(train_name, train), (name, data_set.open(name, _class_list(train)))]

    def split(self, config: Config, name: str) -> EncodedItems:
        return self._splits_of(config).open(name)

    def _splits_of(self, config: Config) -> SplitReader:
        """The data set, with held-out images by `data.holdout`."""
        return Divided(self.data_set(config), config) if config.data.holdout else self.data_set(config)

    def open(self, config: Config, *, may_lack_classes: bool, trained: Sequence[str] | None) -> Datasets:
        if may_lack_classes:
            train = evaluation = self._evaluation_split(config)
        else:
            (_, train), (_, evaluation) = self.splits(config)
        for items in (train, evaluation):
            if start := getattr(items, "start", None):  # looks for the files of a table
                start()
        source = config.data.source
        return decode_items(config, train, evaluation, source=source, may_lack_classes=may_lack_classes, trained=trained)

    def _evaluation_split(self, config: Config) -> EncodedItems:
        """The evaluation split, without the training split, which need not exist."""
        data_set, train_name, classes = self._splits_of(config), config.data.train_split, None
        if data_set.matches_classes and train_name in data_set.names():
            classes = _class_list(data_set.open(train_name))
        return data_set.open(data_set.evaluation_name(config.data.eval_split), classes)


def _class_list(items: EncodedItems) -> list[str] | None:
    return items.classes if isinstance(items.classes, list) else None


def decode_items(
    config: Config,
    train: ItemSource,
    evaluation: ItemSource,
    *,
    source: str,
    may_lack_classes: bool = False,
    trained: Sequence[str] | None = None,
) -> Datasets:
    """Data sets of two sets of single items. source: name of the data source. Other arguments as for `Source.open`.

    If only one of the two sets names its classes, the names hold for both. Raises ConfigError for an empty set, another
    number of classes than the model has, and a class that the training set, or the run's, does not have.
    """
    only_evaluates = may_lack_classes and train is evaluation
    task = kind_of_task(config.task)
    for items, kind in ((train, "training"), (evaluation, "evaluation")):
        if len(items) == 0:
            raise ConfigError("data.source", source, reason=f"the {kind} set is empty")
        shape = np.asarray(getattr(items, "labels", None)).shape
        if other := {("classes", 2): "several labels", ("labels", 1): "one label"}.get((task, len(shape))):
            names = ", or --data.label-separator for several names in a column" * bool(config.data.label_column)
            hint = "use --task labels" if len(shape) == 2 else f"use --task classes{names}"
            raise ConfigError("task", config.task, reason=f"the {kind} set has {other} for each image, {shape}", hint=hint)
    own = names_of(train) or names_of(evaluation)
    trained = own if trained is None else tuple(trained)
    relabel = {
        kind: matching_labels(names_of(items) or own, trained, error=class_error(config, source, kind))
        for items, kind in ((train, "training"), (evaluation, "evaluation"))[only_evaluates:]
    }
    widths = stated_classes(train), stated_classes(evaluation)
    if task == "labels" and None not in widths and widths[0] != widths[1]:
        hint = "give both sets the same labels"
        raise class_error(config, source, "evaluation")(f"it has {widths[1]} labels, and the training set {widths[0]}", hint)
    if task == "labels" and any(labels is not None for labels in relabel.values()):
        hint = "give both sets the same names in the same order"
        raise class_error(config, source, "evaluation")("the names of its labels have another order than in training", hint)
    largest = (int(labels.max(initial=-1)) + 1 for labels in relabel.values() if labels is not None)
    stated = max(len(trained), stated_classes(train) or 0, stated_classes(evaluation) or 0, *largest) or None
    if may_lack_classes and config.model.classes is not None and (stated or 0) <= config.model.classes:
        stated = None
    config = with_classes(config, model_classes(config, stated, source))
    on_bad_image = config.data.on_bad_image

    def open_training(config: Config) -> BatchSource:
        transform = training_transform(config)
        return _loaded(train, config, transform, on_bad_image=on_bad_image, kind="training", relabel=relabel["training"])

    # An evaluation ignores bad images: a replacement would count twice.
    ignore: OnBadImage = "ignore" if on_bad_image == "skip" else on_bad_image
    transform = evaluation_transform(config)
    new_labels = relabel["evaluation"]
    held_out = _loaded(evaluation, config, transform, on_bad_image=ignore, kind="evaluation", relabel=new_labels)
    both = (evaluation,) if train is evaluation else (train, evaluation)
    has_own_labels = not only_evaluates and relabel["training"] is None
    warnings = _label_warnings(train, evaluation, new_labels) if has_own_labels else []
    if task == "labels":
        warnings += _labels_without_images(evaluation, trained)
    warnings += [text for items in both for text in getattr(items, "warnings", ())]
    return Datasets(
        held_out if only_evaluates else open_training(config),
        held_out,
        *pixel_stats(config, source),
        class_count=config.model.class_count,
        classes=trained,
        warnings=tuple(warnings),
        resized={} if only_evaluates else resized(config, open_training),
    )


def _loaded(
    source: ItemSource,
    config: Config,
    transform_and_size: tuple[Transform, int],
    *,
    on_bad_image: OnBadImage,
    kind: str,
    relabel: np.ndarray | None,
) -> DecodedImages | ArraySource:
    """`DecodedImages`, or all of its images in memory if they are small and few and their transform is not random."""
    transform, size = transform_and_size
    loader = DecodedImages(
        source,
        transform=transform,
        size=size,
        target=target_of(config, relabel),
        threads=config.data.threads,
        on_bad_image=on_bad_image,
        kind=f"{kind} image",
    )
    if size > IN_MEMORY_SIDE or len(source) * size**2 * 3 > IN_MEMORY_BYTES or config.data.crops_while_loading:
        return loader
    indices = np.arange(len(source))
    loader.read_ahead([indices])
    images, labels = loader.batch(indices, indices)
    return ArraySource(images, labels, loader.bad_images, source=source)


def resized(config: Config, open_training: Callable[[Config], BatchSource]) -> dict[int, BatchSource]:
    """`Datasets.resized`. Images of a `stored_size` have one size in all phases."""
    sizes = {phase_image_size(config, index) for index in range(len(config.batch))} - {config.data.image_size}
    return {size: open_training(at_image_size(config, size)) for size in sorted(sizes) if config.data.stored_size is None}


def stated_classes(source: ItemSource) -> int | None:
    """The number of classes that a source states in its attribute `classes`, a number or a list of names, or `class_names`.

    Raises ConfigError as `names_of`.
    """
    names = names_of(source)
    classes: Any = getattr(source, "classes", None)
    if isinstance(classes, (int, np.integer)) and classes:
        return int(classes)
    return len(classes) if isinstance(classes, Sized) and len(classes) else len(names) or None


def model_classes(config: Config, stated: int | None, source: str | None = None) -> int:
    """The number of classes of the model: the one that the data state, or else the config's.

    source: see `check_classes`. Raises ConfigError if they differ or are both None. A registered task with its own targets
    says how many values a model returns.
    """
    if (outputs := own_outputs(config.task)) is not None:
        return config.model.classes or outputs
    check_classes(config, stated, source)
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


def _label_warnings(train: ItemSource, evaluation: ItemSource, new_labels: np.ndarray | None) -> list[str]:
    """What users should know about labels that are in memory. new_labels: of the evaluation set, see `matching_labels`."""
    labels, held_out = getattr(train, "labels", None), getattr(evaluation, "labels", None)
    if isinstance(held_out, np.ndarray) and new_labels is not None:
        held_out = new_labels[held_out[(held_out >= 0) & (held_out < len(new_labels))]]
    if not (isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iub"):
        return []
    missing = sorted({*range(min(stated_classes(train) or 0, 2**20))} - {*np.unique(labels).tolist()})
    from_one = "; if your labels count from 1, subtract 1" if missing[:1] == [0] else ""
    warnings = [f"no training image has the label {missing[0]}, and labels count from 0{from_one}"] if missing else []
    if isinstance(held_out, np.ndarray) and len(unseen := np.setdiff1d(held_out, labels)):
        warnings.append(f"the evaluation set has the label {unseen[0]}, which no training image has")
    return warnings


def _labels_without_images(evaluation: ItemSource, names: Sequence[str]) -> list[str]:
    """A warning that names the labels of no held-out image, if they are in memory."""
    held_out = getattr(evaluation, "labels", None)
    if not (isinstance(held_out, np.ndarray) and held_out.ndim == 2) or held_out.any(0).all():
        return []
    without = [names[label] if names else str(label) for label in np.flatnonzero(~held_out.any(0)).tolist()]
    return [f"no held-out image has {listed(without)}: labels that count as 0 in mean average precision and F1"]


def class_error(config: Config, source: str, kind: str) -> Callable[[str, str], ConfigError]:
    """(reason, hint) -> error about the classes of the "training" or "evaluation" set of a data source."""
    directory = config.data.directory
    where = ("data.source", source) if directory is None or SOURCES[source].from_python else ("data.directory", directory)
    return lambda reason, hint: ConfigError(*where, reason=f"the {kind} set is of other classes: {reason}", hint=hint)


def with_classes(config: Config, classes: int) -> Config:
    """The config with a number of classes."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, classes=classes))


def pixel_stats(config: Config, source: str | None = None) -> tuple[float | tuple[float, ...], float | tuple[float, ...]]:
    """(mean, std) with which a run normalizes images, known without its data; see `Datasets`. source: if not the config's."""
    data, published = config.data, SOURCES[source or config.data.source]
    mean, std = (tuple(round(255 * share, 9) for share in shares) for shares in (data.mean, data.std))
    return mean or published.mean, std or published.std


def prediction_loader(config: Config, source: ItemSource) -> DecodedImages:
    """Images prepared as for evaluation; unreadable ones are ignored and listed in `DecodedImages.bad_images`."""
    transform, size = evaluation_transform(config)
    target, threads = NoTarget(np.dtype(np.int32)), config.data.threads
    return DecodedImages(source, transform=transform, size=size, target=target, threads=threads, on_bad_image="ignore")
