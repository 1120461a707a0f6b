"""Construction of an optimizer from its config.

docs/extending.md lists the steps to add one.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxdp.choices import OPTIMIZERS
from jaxdp.config import Adam, Lars, Optimizer, Sgd
from jaxdp.errors import ConfigError, kind_of, registered_function
from jaxdp.optim.groups import each_factor
from jaxdp.optim.rules import MASKS, Decays, add_weight_decay, in_float32, lamb, lars, scale_by_adam
from jaxdp.optim.squares import SquaredNorms, norm

Scalar: TypeAlias = "float | jax.Array"


def build_optimizer(
    config: Optimizer,
    learning_rate: Scalar,
    momentum: Scalar,
    *,
    factors_of: Callable[[Any], Any] | None = None,
    later: Collection[str] = (),
) -> optax.GradientTransformation:
    """The update rule of a config, preceded by gradient clipping. The structure of its state is the same for all values.

    learning_rate, momentum: a float or a traced scalar. factors_of: a function of the parameters that returns the tree of their
    `Factors` (default: none). later: names of top-level subtrees that begin to train later, see `StateInParts`. `update` takes
    `squares`, the sums of squares of whole tensors; without them it computes them, which is wrong for shards.
    """
    build = _registered_in_groups if config.name in OPTIMIZERS.registered else OPTIMIZERS.implementation(config.name)
    decays = None if factors_of is None else lambda params: each_factor("decay", factors_of(params))
    rule = optax.with_extra_args_support(optax.chain(build(config, learning_rate, momentum, decays=decays)))
    rule = _in_parts(rule, later) if later else rule

    def update(gradient: Any, state: Any, params: Any = None, *, squares: SquaredNorms | None = None) -> tuple[Any, Any]:
        if squares is None:
            squares = SquaredNorms.compute(gradient, params)
        if config.clip_norm is not None:
            factor = jnp.minimum(1.0, config.clip_norm / norm(squares.gradient))
            gradient, squares = jax.tree.map(lambda g: factor * g, gradient), squares.scale_gradient(factor)
        updates, state = rule.update(gradient, state, params, squares=squares)
        if factors_of is not None:  # in every optimizer, the update is proportional to the learning rate
            rates = each_factor("rate", factors_of(updates))
            updates = jax.tree.map(lambda u, rate: u if rate == 1 else rate * u, updates, rates)
        return updates, state

    return optax.GradientTransformationExtraArgs(rule.init, update)


class StateInParts(NamedTuple):
    """The state of parameters that were always trained, and of those that were not."""

    first: Any
    later: Any


def _in_parts(rule: optax.GradientTransformationExtraArgs, later: Collection[str]) -> optax.GradientTransformationExtraArgs:
    """A rule with a separate state for the subtrees `later`, so that Adam's averages count their own steps."""

    def split(tree: Any) -> tuple[dict, dict]:
        parts = ({name: tree[name] for name in tree if (name in later) == is_later} for is_later in (False, True))
        return next(parts), next(parts)

    def update(gradient: Any, state: StateInParts, params: Any, *, squares: SquaredNorms) -> tuple[Any, StateInParts]:
        norms = zip(split(squares.gradient), split(squares.params) if squares.params else ((), ()), strict=True)
        each = zip(split(gradient), state, split(params), norms, strict=True)
        found = [rule.update(g, s, p, squares=SquaredNorms(*n, squares.of)) for g, s, p, n in each]
        return found[0][0] | found[1][0], StateInParts(found[0][1], found[1][1])

    return optax.GradientTransformationExtraArgs(lambda params: StateInParts(*map(rule.init, split(params))), update)


def _registered_in_groups(
    config: Optimizer, learning_rate: Scalar, momentum: Scalar, *, decays: Decays = None
) -> optax.GradientTransformation:
    """What the user's function builds; for parameters with another factor on weight decay, from a config with that decay."""
    factors = {1.0, *(float(group.decay) for group in config.groups if group.decay is not None)}
    if decays is None or factors == {1.0}:
        return _registered(config, learning_rate, momentum)
    configs = {str(factor): dataclasses.replace(config, weight_decay=config.weight_decay * factor) for factor in factors}
    rules = {name: _registered(each, learning_rate, momentum) for name, each in configs.items()}
    return optax.partition(rules, lambda params: jax.tree.map(str, decays(params)))


def _registered(config: Optimizer, learning_rate: Scalar, momentum: Scalar) -> optax.GradientTransformation:
    """What the user's function builds. Raises ConfigError if it fails, or returns something else."""
    build = OPTIMIZERS.implementation(config.name)
    hint = "return an optax.GradientTransformation, such as optax.lion(learning_rate, b1=momentum)"
    with registered_function("optimizer.name", config.name, hint=hint):
        built = build(config, learning_rate, momentum)
    if not (callable(getattr(built, "init", None)) and callable(getattr(built, "update", None))):
        reason = f"the registered function returned {kind_of(built)}"
        raise ConfigError("optimizer.name", config.name, reason=reason, hint=hint)
    return built


def build_lars(config: Lars, learning_rate: Scalar, momentum: Scalar, *, decays: Decays = None) -> optax.GradientTransformation:
    return lars(
        learning_rate,
        momentum,
        weight_decay=config.weight_decay,
        trust_coefficient=config.trust_coefficient,
        eps=config.eps,
        nesterov=config.nesterov,
        mask=MASKS[config.adapt],
        decays=decays,
    )


def build_sgd(config: Sgd, learning_rate: Scalar, momentum: Scalar, *, decays: Decays = None) -> optax.GradientTransformation:
    """SGD with the rate outside the velocity, equation 9 of Goyal et al. (arXiv 1706.02677): a change of the rate needs no
    correction of the momentum."""
    rule = optax.chain(
        add_weight_decay(config.weight_decay, decays),
        optax.trace(decay=momentum, nesterov=config.nesterov),
        optax.scale(-learning_rate),
    )
    return in_float32(rule)


def build_adamw(
    config: Adam, learning_rate: Scalar, momentum: Scalar, *, decays: Decays = None
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay, algorithm 2 of Loshchilov & Hutter (arXiv 1711.05101)."""
    rule = optax.chain(
        scale_by_adam(b1=momentum, b2=config.beta2, eps=1e-8),  # PyTorch's default
        add_weight_decay(config.weight_decay, decays),
        optax.scale(-learning_rate),
    )
    return in_float32(rule)


def build_lamb(config: Adam, learning_rate: Scalar, momentum: Scalar, *, decays: Decays = None) -> optax.GradientTransformation:
    return lamb(learning_rate, momentum, config.beta2, weight_decay=config.weight_decay, decays=decays)
