"""Parameter groups: the factors of each parameter on learning rate and weight decay (`optimizer.groups`, `layer_decay`)."""

import difflib
import re
from typing import Any, NamedTuple

import jax

from jaxdp.choices import OPTIMIZERS
from jaxdp.config import Config, Group
from jaxdp.errors import ConfigError
from jaxdp.network import Network


class Factors(NamedTuple):
    """The factors of a parameter. group: its first matching group; None if there is none."""

    group: Group | None
    rate: float
    decay: float


def factors_of(config: Config, model: Network, params: Any) -> Any:
    """The tree of the `Factors` of parameters, arrays or shapes, which may be a part of the model's."""
    last, optimizer = len(model.segments) - 1, config.optimizer
    above = {name: last - index for index, segment in enumerate(model.segments) for name in segment}
    all_decay = optimizer.adapt == "all" or optimizer.name in OPTIMIZERS.registered  # a registered one itself leaves out biases

    def factors(path: tuple, leaf: Any) -> Factors:
        group = next((group for group in optimizer.groups if re.search(group.pattern, path_of(path))), None)
        rate = config.finetune.layer_decay ** above.get(path[0].key, 0) * (group.rate if group else 1.0)
        decays = float(all_decay or leaf.ndim > 1)
        return Factors(group, rate, decays if group is None or group.decay is None else float(group.decay))

    return jax.tree.map_with_path(factors, params)


def each_factor(name: str, tree: Any) -> Any:
    """A tree of `Factors` with one of them alone."""
    return jax.tree.map(lambda factors: getattr(factors, name), tree, is_leaf=lambda leaf: isinstance(leaf, Factors))


def path_of(path: tuple) -> str:
    """The path of a parameter as groups match it, such as layer1_0/conv1/kernel."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def listed_parameters(config: Config, model: Network, params: Any) -> list[dict[str, Any]]:
    """Path, shape, group ("" for none), rate and decay of every parameter; rate and decay are 0 if it is never trained.

    params: of the whole model, arrays or shapes.
    """
    trained = model.trainable(params, config.finetune.always_frozen)
    found = zip(jax.tree.leaves_with_path(params), _leaves(factors_of(config, model, params)), strict=True)
    return [
        {"path": path_of(path), "shape": list(leaf.shape), "group": factors.group.pattern if factors.group else ""}
        | {name: getattr(factors, name) * (path[0].key in trained) for name in ("rate", "decay")}
        for (path, leaf), factors in found
    ]


def check_groups(config: Config, model: Network, params: Any) -> None:
    """Raise ConfigError for a group that applies to no parameter, and for `layer_decay` of a model of one layer.

    params: all parameters of the model, arrays or shapes.
    """
    if config.finetune.layer_decay != 1 and len(model.segments) == 1:
        reason, hint = f"{config.model.name!r} has no layers", "give the module a method stages (docs/extending.md), or omit it"
        raise ConfigError("finetune.layer_decay", config.finetune.layer_decay, reason=reason, hint=hint)
    params = model.trainable(params, config.finetune.always_frozen)
    used = {id(factors.group) for factors in _leaves(factors_of(config, model, params))}
    for group in config.optimizer.groups:
        if id(group) in used:
            continue
        paths = [path_of(path) for path, _ in jax.tree.leaves_with_path(params)]
        reason, near = "it matches no trained parameter", difflib.get_close_matches(group.pattern, paths, 3, 0)
        if any(re.search(group.pattern, path) for path in paths):
            reason, near = "all parameters that it matches are in groups before it", []
        hint = f"the nearest paths are {', '.join(near)}; " * bool(near) + "`jaxdp plan --parameters` lists all"
        raise ConfigError("optimizer.groups", str(group), reason=reason, hint=hint)


def _leaves(factors: Any) -> list[Factors]:
    return jax.tree.leaves(factors, is_leaf=lambda leaf: isinstance(leaf, Factors))
