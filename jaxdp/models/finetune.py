"""Fine-tuning: runs that start from a file of weights."""

import dataclasses
import os

from jaxdp.config import Config
from jaxdp.errors import ConfigError, plural
from jaxdp.models.resnet import HEAD
from jaxdp.models.weights import NETWORK_FIELDS, Weights, flag_of, read
from jaxdp.network import InitialValues

FIELD = "finetune.weights"


def saved_digest(config: Config, saved: Config) -> str | None:
    """The digest of the weights file in the `saved` config of a run; None if `config` names another file."""
    return saved.finetune.digest if config.finetune.weights == saved.finetune.weights else None


def read_weights(config: Config, saved_digest: str | None = None) -> tuple[Config, Weights | None]:
    """The config with the digest of its weights file, and the weights; None if the run starts without weights.

    saved_digest: the digest that the run to be resumed stored. Such a run no longer needs the file: if it is missing, the
    weights are None. Raises ConfigError if the file cannot be used, has another digest than the config, or is of another
    network.
    """
    finetune = config.finetune
    if finetune.weights is None:
        return config, None
    if saved_digest is not None and finetune.digest in (None, saved_digest) and not os.path.exists(finetune.weights):
        return dataclasses.replace(config, finetune=dataclasses.replace(finetune, digest=saved_digest)), None
    weights = read(finetune.weights, FIELD, blur_pool=config.model.blur_pool)
    if finetune.digest not in (None, weights.digest):
        raise ConfigError(
            FIELD,
            finetune.weights,
            reason=f"its digest is {weights.digest}, but finetune.digest is {finetune.digest!r}",
            hint="use the file of that digest, or omit finetune.digest for a new run",
        )
    for name in [name for name in NETWORK_FIELDS if name != "classes"]:
        in_file, expected = getattr(weights.model, name), getattr(config.model, name)
        if in_file != expected:
            raise ConfigError(
                FIELD,
                finetune.weights,
                reason=f"it has the {name} {in_file!r}, but model.{name} is {expected!r}",
                hint=f"use {flag_of(name, in_file)}, or other weights",
            )
    _check_classifier_bias(config, weights)
    return dataclasses.replace(config, finetune=dataclasses.replace(finetune, digest=weights.digest)), weights


def _check_classifier_bias(config: Config, weights: Weights) -> None:
    """Raise ConfigError for an initial bias of a classifier that is the file's; once the number of classes is known."""
    if config.model.classifier_bias != "zero" and keeps_head(config, weights):
        reason = f"not used: the run starts with the classifier of {weights.path}"
        hint = "omit it"
        raise ConfigError("model.classifier_bias", config.model.classifier_bias, reason=reason, hint=hint)


def is_missing(config: Config, weights: Weights | None) -> bool:
    """Whether the weights file of a run no longer exists."""
    return config.finetune.weights is not None and weights is None


def missing_file_warning(config: Config) -> str:
    """One line about a run that is resumed without its weights file."""
    finetune = config.finetune
    return f"{finetune.weights} no longer exists; the run does not need it to resume, and keeps its digest {finetune.digest}"


def keeps_head(config: Config, weights: Weights) -> bool:
    """Whether the run starts with the classifier of the file."""
    return weights.model.classes == config.model.classes


def initial_values(config: Config, weights: Weights | None) -> InitialValues | None:
    """The parameters and statistics of a file, without its classifier unless `keeps_head`; None if the config names no file.

    Raises ConfigError if the run lacks its file, and for an initial bias of a classifier that is the file's.
    """
    if config.finetune.weights is None:
        return None
    if weights is None:
        reason = "file not found, and the run has no checkpoint to resume from"
        raise ConfigError(FIELD, config.finetune.weights, reason=reason, hint="restore the file")
    _check_classifier_bias(config, weights)
    params, head = weights.params, "with its classifier"
    if not keeps_head(config, weights):
        params = {name: tree for name, tree in params.items() if name not in HEAD}
        head = f"with a new classifier for {plural(config.model.class_count, 'class')}"
    return InitialValues(params, weights.batch_stats, f"starting from {weights.path} ({weights.describe()}), {head}")
