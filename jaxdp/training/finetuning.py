"""Runs that begin from the weights of another network: the file, what of it fits, and the state it gives."""

import dataclasses
from functools import partial

import jax

from jaxdp.config import Config, ConfigError
from jaxdp.models.resnet import HEAD
from jaxdp.models.weights import Weights, read
from jaxdp.training.state import TrainState, from_host


def opened(config: Config) -> tuple[Config, Weights | None]:
    """The config with the digest of the file that its run begins from, and what that holds; None where it begins from none.

    Raises ConfigError for a file that cannot be used, is another than the digest in the config says, or of another network.
    """
    own = config.finetune
    if own.weights is None:
        return config, None
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
