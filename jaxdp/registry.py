"""Models and all-reduce strategies of one's own, by the names by which a config asks for them."""

import re
from collections.abc import Callable

from jaxdp.config import OWN_NAME, RESNET, ConfigError
from jaxdp.flags import nearest

STRATEGIES = ("psum", "ring", "hierarchical", "torus", "parameter_server", "auto")

own_models: dict[str, Callable] = {}
own_strategies: dict[str, tuple[Callable, ...]] = {}


def register_model(name: str, build: Callable) -> None:
    """Make a model of your own known in this process: a config asks for it by `Model(name=name)`.

    build(model_config) gives an object with init(key, image_shape) -> (params, batch_stats) and
    apply(params, batch_stats, images, train) -> (logits [B, classes], moments). params: a tree of float32 arrays; those of two
    and more dimensions decay. images: [B, H, W, 3] float32, normalised. A model without batch normalisation has {} for
    batch_stats and moments; one with it has, for each layer, {"mean", "var"} in batch_stats and in training {"mean", "square"}
    in moments: mean and squared mean of this worker's batch. Whoever goes on with a run or evaluates it registers the model
    first; a name that is registered again stands for the new model. Raises ConfigError for a name that cannot be taken.
    """
    own_models[_free(name, (RESNET,))] = _callable(name, build)


def register_strategy(name: str, *stages: Callable) -> None:
    """Make an all-reduce of your own known in this process: a config asks for it by `Reduce(strategy=name)`.

    stages: functions from a vector to a vector, one after the other, called inside `shard_map` over the axes of
    `jaxdp.parallel.mesh.AXES`; together they turn each device's vector [n] into the sum over all devices, in the first n
    places. Those of `jaxdp.parallel.allreduce` may be among them. A name that is registered again stands for the new stages.
    Raises ConfigError for a name that cannot be taken.
    """
    if not stages:
        raise ConfigError(f"register_strategy: {name!r} is not allowed without stages; give one function or more")
    own_strategies[_free(name, STRATEGIES)] = tuple(_callable(name, stage) for stage in stages)


def check_names(config) -> None:
    """Raise ConfigError where a config asks for a model or a strategy that is neither jaxdp's nor registered."""
    check_model(config.model.name)
    if config.reduce.strategy not in (*STRATEGIES, *own_strategies):
        raise _unknown("reduce.strategy", config.reduce.strategy, (*STRATEGIES, *own_strategies), "register_strategy")


def check_model(name: str) -> None:
    """Raise ConfigError for a model that is neither jaxdp's nor registered."""
    if name not in (RESNET, *own_models):
        raise _unknown("model.name", name, (RESNET, *own_models), "register_model")


def _unknown(field: str, value: str, known, function: str) -> ConfigError:
    near = nearest(value, known)
    meant = f"did you mean {near}? " if near else ""
    return ConfigError(
        f"{field}: {value!r} is not allowed; {meant}give {', '.join(known)}, or make one of your own known in this "
        f"process first: jaxdp.{function}({value!r}, ...), in Python or in the recipe's file, which --config names"
    )


def _free(name: str, taken: tuple[str, ...]) -> str:
    if not (isinstance(name, str) and re.fullmatch(OWN_NAME, name)):
        raise ConfigError(f"name: {name!r} is not allowed; give lower-case letters, digits and _")
    if name in taken:
        raise ConfigError(f"name: {name!r} is not allowed; it is jaxdp's own; give another one than {', '.join(taken)}")
    return name


def _callable(name: str, given) -> Callable:
    if not callable(given):
        raise ConfigError(f"{name}: {given!r} is not allowed; give a function")
    return given
