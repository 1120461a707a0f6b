"""The names of classes, and their weights. Equal names in two sets of images are one class, whatever its label in each."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp.choices import kind_of_task
from jaxdp.config import Config
from jaxdp.data.image_folder import normalized, same_names
from jaxdp.errors import ConfigError
from jaxdp.fields import LARGEST

CLASS_NUMBER = r"0|[1-9][0-9]{0,8}"
HINT = "use the classes of the training, with the same names or, if these had none, the same numbers"


def names_of(source: Any) -> tuple[str, ...]:
    """The names that a source states in its attribute `class_names` or `classes`, by label; () where classes have numbers.

    Raises ConfigError for names that differ only in their Unicode form.
    """
    stated = (getattr(source, name, None) for name in ("class_names", "classes"))
    found = (names.tolist() if isinstance(names, np.ndarray) else names for names in stated)
    names: Any = next(filter(None, found), None)
    if not (isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)):
        return ()
    if same := same_names(names):
        reason = f"two names {same[0]!r} differ only in their Unicode form, {same[0]!a} and {same[1]!a}"
        raise ConfigError("class_names", reason=reason, hint="rename one, or merge the classes")
    return tuple(names)


def matching_labels(
    names: Sequence[str], trained: Sequence[str], *, error: Callable[[str, str], ConfigError]
) -> np.ndarray | None:
    """Label in `names` -> label of the class of this name in `trained`, int32 [classes]; None if all are the same.

    A class without a name is named by its number. Raises `error` (reason, hint) for a name that `trained` lacks or has twice,
    and where only one of the two has names.
    """
    own = list(map(normalized, names or map(str, range(len(trained)))))
    if not trained:
        labels = {name: int(name) for name in own if re.fullmatch(CLASS_NUMBER, name)}
    else:
        labels = {normalized(name): label for label, name in enumerate(trained)}
        if own == list(map(normalized, trained)):
            return None
        if len(labels) < len(trained) or len(set(own)) < len(own):
            raise error("several classes have the same name, and their order differs from training", "give each its own name")
    if unknown := [name for name in own if name not in labels]:
        if not names:
            raise error(f"its labels are numbers, but were names in training, such as {trained[0]!r}", HINT)
        why = "a name, but labels were numbers in training"
        if trained:
            why = f"none of the {len(trained)} in training, such as {trained[0]!r}"
        raise error(f"its class {unknown[0]!r} is {why}", HINT)
    found = np.array([labels[name] for name in own], np.int32)
    return None if np.array_equal(found, np.arange(len(found))) else found


def with_class_weights(config: Config, train: Any) -> Config:
    """The config with numbers in place of balanced class weights, see `balanced_weights`. train: the training images."""
    optimizer = config.optimizer
    if optimizer.class_weights != "balanced":
        return config
    weights = tuple(balanced_weights(config, train, "optimizer.class_weights").tolist())
    return dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, class_weights=weights))


def balanced_weights(config: Config, train: Any, field: str) -> np.ndarray:
    """images / (classes * images of the class), or for several labels an image, images without the label / images with it.

    field: for errors. Raises ConfigError for training images that have no `labels`, an array of all of them, or a class without
    images.
    """
    hint = "give weights in place of balanced, or datasets with an attribute `labels`"
    labels = getattr(train, "labels", None)
    if labels is None:
        reason = f"data.source={config.data.source!r} has its labels only with the images"
        raise ConfigError(field, "balanced", reason=reason, hint=hint)
    labels, classes = np.asarray(labels), config.model.class_count
    if kind_of_task(config.task) == "labels":
        positive = labels.sum(0)
        if not positive.all():
            raise ConfigError(field, "balanced", reason=f"no training image has the label {positive.argmin()}", hint=hint)
        return (len(labels) - positive) / positive
    if labels.shape != (len(train),) or labels.dtype.kind not in "iub" or not np.all((labels >= 0) & (labels < classes)):
        found = f"{labels.dtype} of shape {labels.shape} for {len(train)} images"
        reason = f"the labels of the training set are {found}, not a class, 0 to {classes - 1}, for each"
        raise ConfigError(field, "balanced", reason=reason, hint=hint)
    counts = np.bincount(labels, minlength=classes)
    if not counts.all():
        raise ConfigError(field, "balanced", reason=f"no training image has the class {counts.argmin()}", hint=hint)
    return counts.sum() / (len(counts) * counts)


def image_weights(config: Config, train: Any) -> np.ndarray:
    """What `data.sampling` balanced or weights draws the training images in proportion to, float64 [N].

    Raises ConfigError for data that do not have the labels or the weights.
    """
    if config.data.sampling == "balanced":
        return balanced_weights(config, train, "data.sampling")[np.asarray(train.labels, np.int64)]
    given: Any = None
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError):
        given = np.asarray(train.source.weights, np.float64)
        if given.shape == (len(train),) and np.all((given >= 0) & (given <= LARGEST)) and given.any():
            return given
    found = (
        "no `weights`"
        if given is None or not given.size
        else f"`weights` of shape {given.shape}, from {given.min():g} to {given.max():g}"
    )
    reason = f"the training set has {found}; they must be of shape ({len(train)},), from 0 to {LARGEST:g} and not all 0"
    hint = "give arrays (images, labels, names or None, weights), or an object with this attribute"
    raise ConfigError("data.sampling", config.data.sampling, reason=reason, hint=hint)
