"""Runs that begin from the weights of another network: the file, what of it fits, and the state it gives."""

import dataclasses
import os
from functools import partial

import jax

from jaxdp.config import Config, ConfigError
from jaxdp.models.resnet import HEAD
from jaxdp.models.weights import Weights, read
from jaxdp.training.state import TrainState, from_host


def kept_digest(config: Config, begun: Config) -> str | None:
    """The digest that a run with the config `begun` keeps of the file that `config` names; None where it has no such."""
    return begun.finetune.digest if config.finetune.weights == begun.finetune.weights else None


def opened(config: Config, kept: str | None = None) -> tuple[Config, Weights | None]:
    """The config with the digest of the file that its run begins from, and what that holds; None where it begins from none.

    kept: the digest that the run to go on with keeps of the file; where that is gone, it is not needed any more. Raises
    ConfigError for a file that cannot be used, is another than the digest in the config says, or of another network.
    """
    own = config.finetune
    if own.weights is None:
        return config, None
    if kept is not None and own.digest in (None, kept) and not os.path.exists(own.weights):
        return dataclasses.replace(config, finetune=dataclasses.replace(own, digest=kept)), None
    weights = read(own.weights, "finetune.weights")
    refused = f"finetune.weights: {own.weights!r} is not allowed"
    if own.digest not in (None, weights.digest):
        raise ConfigError(
            f"{refused}; its digest is {weights.digest}, and finetune.digest is {own.digest!r}; give the file of that digest, "
            "or leave finetune.digest out for a new run"
        )
    for name in ("depth", "width", "stem"):
        there, asked = getattr(weights.model, name), getattr(config.model, name)
        if there != asked:
            raise ConfigError(
                f"{refused}; it has the {name} {there!r}, and model.{name} is {asked!r}; give --model.{name} {there}, or other "
                "weights"
            )
    return dataclasses.replace(config, finetune=dataclasses.replace(own, digest=weights.digest)), weights


def is_gone(config: Config, weights: Weights | None) -> bool:
    """Whether a run does without the file that it was begun from."""
    return config.finetune.weights is not None and weights is None


def without_its_file(config: Config) -> str:
    """What is to be known of such a run, in one line."""
    own = config.finetune
    return f"{own.weights} is gone; the run, begun from it, does without, and keeps its digest {own.digest}"


def check_begins(config: Config, weights: Weights | None) -> None:
    """Raise ConfigError where a run without a checkpoint does not have the file to begin from."""
    if is_gone(config, weights):
        raise ConfigError(
            f"finetune.weights: {config.finetune.weights!r} is not allowed; there is no such file, and no checkpoint of the "
            "run to go on from without it; restore the file"
        )


def keeps_head(config: Config, weights: Weights) -> bool:
    """Whether the run begins with the file's classifier."""
    return weights.model.classes == config.model.classes and not config.finetune.new_head


def begun_from(config: Config, weights: Weights, state: TrainState, mesh) -> TrainState:
    """A new run's state with the weights and statistics of a file; the classifier stays new where `keeps_head` is not so."""
    left_out = () if keeps_head(config, weights) else HEAD
    place = partial(jax.tree.map, partial(from_host, mesh=mesh))
    params = {name: place(tree) for name, tree in weights.params.items() if name not in left_out}
    return state._replace(params=state.params | params, batch_stats=state.batch_stats | place(weights.batch_stats))


def in_words(config: Config, weights: Weights) -> str:
    """What a run begins from, in one line."""
    if keeps_head(config, weights):
        head = "with its classifier"
    else:
        head = f"with a new classifier for {config.model.classes} classes"
    return f"begins from {weights.path} ({weights.in_words}), {head}"
