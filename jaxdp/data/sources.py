"""The data sources that a config can name, and what is asked of the one that it names.

The module of a source is imported when a config names it: a run on a folder of images loads no tensorflow-datasets, and one on
a local disk no client of object storage.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdp.choices import SOURCES, TASKS
from jaxdp.config import Config
from jaxdp.data import from_python
from jaxdp.data.batch_sources import ArraySource, ItemSource
from jaxdp.data.classes import image_weights
from jaxdp.data.datasets import IN_MEMORY_BYTES, Datasets, Source, model_classes, with_classes
from jaxdp.errors import ConfigError


def source_of(config: Config) -> Source:
    """The data source that a config names. Raises ConfigError for one whose images do not have what the task predicts."""
    name, task = config.data.source, TASKS[config.task].data or config.task
    if task not in SOURCES[name].tasks and name not in SOURCES.registered:
        able = ", ".join(other for other in SOURCES.builtin if task in SOURCES[other].tasks)
        reason = f"its images have one class each, and task={config.task!r}"
        raise ConfigError("data.source", name, reason=reason, hint=f"use {able}, or the `datasets` argument of jaxdp.train")
    if name in SOURCES.registered:
        return from_python.Given(SOURCES.implementation(name))
    entry: Any = SOURCES[name]  # prepared data of any name have one entry
    return entry.implementation()()


def open_split(config: Config, split: str) -> ItemSource:
    """The images of a split. Raises ConfigError as `Source.splits`."""
    return source_of(config).split(config, split)


def inspect(config: Config) -> tuple[Config, int]:
    """(the config with the number of classes, number of training images), without reading any image.

    Raises ConfigError for a data set that does not exist or has another number of classes.
    """
    examples, classes = source_of(config).size(config)
    return with_classes(config, model_classes(config, classes)), examples


def open_datasets(
    config: Config,
    pair: Sequence[ItemSource] | None = None,
    *,
    may_lack_classes: bool = False,
    trained: Sequence[str] | None = None,
) -> Datasets:
    """The data sets of a config. pair: (training, evaluation) items from Python, which replace the config's source.

    Other arguments, errors: as of `Source.open`.
    """
    if pair is not None:
        opened = from_python.open_pair(config, pair, may_lack_classes=may_lack_classes, trained=trained)
    else:
        opened = source_of(config).open(config, may_lack_classes=may_lack_classes, trained=trained)
    if config.data.sampling != "shuffle" and not may_lack_classes:
        sums = np.cumsum(image_weights(with_classes(config, opened.class_count), opened.train))
        for source in (opened.train, *opened.resized.values()):
            source.cumulative = sums / sums[-1]
    return opened


def is_resident(datasets: Datasets, platform: str) -> bool:
    """Whether every device holds the training set, so that only indices are transferred: a small one in memory, of one size.

    A CPU holds it already.
    """
    train = datasets.train
    small = isinstance(train, ArraySource) and train.images.nbytes <= IN_MEMORY_BYTES
    return small and not datasets.resized and platform != "cpu"
