"""Class weights from the training labels: `optimizer.class_weights` balanced."""

import dataclasses
from typing import Any

import numpy as np

from jaxdp.config import Config
from jaxdp.errors import ConfigError


def with_class_weights(config: Config, train: Any) -> Config:
    """The config with numbers in place of balanced class weights: images / (classes * images of the class).

    train: the training images. Raises ConfigError for data that have no `labels`, an array of all of them, or a class without
    images.
    """
    optimizer = config.optimizer
    if optimizer.class_weights != "balanced":
        return config
    field, hint = "optimizer.class_weights", "give a number for each class, or datasets with an attribute `labels`"
    labels = getattr(train, "labels", None)
    if labels is None:
        reason = f"data.source={config.data.source!r} has its labels only with the images"
        raise ConfigError(field, "balanced", reason=reason, hint=hint)
    labels, classes = np.asarray(labels), config.model.class_count
    if labels.shape != (len(train),) or labels.dtype.kind not in "iub" or not np.all((labels >= 0) & (labels < classes)):
        found = f"{labels.dtype} of shape {labels.shape} for {len(train)} images"
        reason = f"the labels of the training set are {found}, not a class, 0 to {classes - 1}, for each"
        raise ConfigError(field, "balanced", reason=reason, hint=hint)
    counts = np.bincount(labels, minlength=classes)
    if not counts.all():
        raise ConfigError(field, "balanced", reason=f"no training image has the class {counts.argmin()}", hint=hint)
    weights = tuple((counts.sum() / (len(counts) * counts)).tolist())
    return dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, class_weights=weights))
