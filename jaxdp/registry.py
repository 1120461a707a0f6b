"""The user's own models and all-reduce strategies, by the names that a config refers to."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from jaxdp.config import NAME_PATTERN, RESNET, Config
from jaxdp.errors import ConfigError, suggest
from jaxdp.strategies import AUTO, STRATEGIES, Stage, Strategy

own_models: dict[str, Callable] = {}


def register_model(name: str, build: Callable[..., Any]) -> None:
    """Register a model for `Model(name=name)` in this process.

    build(model_config) returns an object with init(key, image_shape) -> (params, batch_stats) and
    apply(params, batch_stats, images, train) -> (logits [B, classes], moments).
    params: tree of float32 arrays; weight decay applies to those with two or more dimensions. images: [B, H, W, 3] float32,
    normalized. Without batch normalization, batch_stats and moments are {}. With it, for each layer, batch_stats has
    {"mean", "var"} and in training moments has {"mean", "square"}: mean and mean square over the worker's batch.
    Resuming or evaluating a run requires the same registration. A repeated name replaces the model.
    Raises ConfigError for an invalid or reserved name.
    """
    own_models[_free(name, (RESNET,))] = _callable(name, build)


def register_strategy(name: str, *stages: Stage) -> None:
    """Register an all-reduce strategy for `Reduce(strategy=name)` in this process.

    stages: functions from a vector to a vector, applied in order inside `shard_map` over the axes of
    `jaxdp.parallel.mesh.AXES`. Together they turn each device's vector [n] into the sum over all devices, in the first n
    elements. Stages of `jaxdp.parallel.allreduce` can be reused. A repeated name replaces the stages.
    Raises ConfigError for an invalid or reserved name.
    """
    if not stages:
        raise ConfigError("register_strategy", name, reason="needs at least one stage")
    builtin = (*(strategy.name for strategy in STRATEGIES.values() if strategy.builtin), AUTO)
    checked = tuple(_callable(name, stage) for stage in stages)
    STRATEGIES[_free(name, builtin)] = Strategy(name=name, stages=checked, builtin=False)


def check_names(config: Config) -> None:
    """Raise ConfigError if the model or the strategy of a config is neither built in nor registered."""
    check_model(config.model.name)
    known = (*STRATEGIES, AUTO)
    if config.reduce.strategy not in known:
        raise _unknown("reduce.strategy", config.reduce.strategy, known=known, function="register_strategy")


def check_model(name: str) -> None:
    """Raise ConfigError for a model that is neither built in nor registered."""
    known = (RESNET, *own_models)
    if name not in known:
        raise _unknown("model.name", name, known=known, function="register_model")


def _unknown(field: str, name: str, *, known: Iterable[str], function: str) -> ConfigError:
    register = f"register it with jaxdp.{function}({name!r}, ...) in Python or in the recipe given by --config"
    return ConfigError(field, name, reason="unknown name", hint=f"{suggest(name, known)}, or {register}")


def _free(name: str, reserved: tuple[str, ...]) -> str:
    if not (isinstance(name, str) and re.fullmatch(NAME_PATTERN, name)):
        raise ConfigError("name", name, reason="must consist of lower-case letters, digits and _, and start with a letter")
    if name in reserved:
        raise ConfigError("name", name, reason="reserved", hint=f"choose a name other than {', '.join(reserved)}")
    return name


def _callable(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(function):
        raise ConfigError(name, function, reason="must be a function")
    return function
