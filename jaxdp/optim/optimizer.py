"""Construction of an optimizer from its config.

docs/extending.md lists the steps to add one.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxdp.choices import OPTIMIZERS
from jaxdp.config import Adam, Lars, Optimizer, Sgd
from jaxdp.errors import ConfigError, first_line, kind_of
from jaxdp.optim.rules import MASKS, add_weight_decay, in_float32, lamb, lars, scale_by_adam
from jaxdp.optim.squares import SquaredNorms, norm

Scalar: TypeAlias = "float | jax.Array"


def build_optimizer(
    config: Optimizer, learning_rate: Scalar, momentum: Scalar, *, multipliers: Mapping[str, float] | None = None
) -> optax.GradientTransformation:
    """The update rule of a config, preceded by gradient clipping. The structure of its state is the same for all values.

    learning_rate, momentum: a float or a traced scalar. multipliers: factors on the learning rate by the name of a top-level
    subtree of the parameters; the default is 1. `update` takes `squares`, the sums of squares of whole tensors; without them
    it computes them, which is wrong for shards.
    """
    build = _registered if config.name in OPTIMIZERS.registered else OPTIMIZERS.implementation(config.name)
    rule = build(config, learning_rate, momentum)
    rule = optax.with_extra_args_support(optax.chain(rule, *([_scale_subtrees(multipliers)] if multipliers else [])))

    def update(gradient: Any, state: Any, params: Any = None, *, squares: SquaredNorms | None = None) -> tuple[Any, Any]:
        if squares is None:
            squares = SquaredNorms.compute(gradient, params)
        if config.clip_norm is not None:
            factor = jnp.minimum(1.0, config.clip_norm / norm(squares.gradient))
            gradient, squares = jax.tree.map(lambda g: factor * g, gradient), squares.scale_gradient(factor)
        return rule.update(gradient, state, params, squares=squares)

    return optax.GradientTransformationExtraArgs(rule.init, update)


def _registered(config: Optimizer, learning_rate: Scalar, momentum: Scalar) -> optax.GradientTransformation:
    """What the user's function builds. Raises ConfigError if it fails, or returns something else."""
    build = OPTIMIZERS.implementation(config.name)
    hint = "return an optax.GradientTransformation, such as optax.lion(learning_rate, b1=momentum)"
    try:
        built = build(config, learning_rate, momentum)
    except Exception as error:
        reason = f"the registered function failed: {type(error).__name__}: {first_line(error)}"
        raise ConfigError("optimizer.name", config.name, reason=reason, hint=hint) from error
    if not (callable(getattr(built, "init", None)) and callable(getattr(built, "update", None))):
        reason = f"the registered function returned {kind_of(built)}"
        raise ConfigError("optimizer.name", config.name, reason=reason, hint=hint)
    return built


def build_lars(config: Lars, learning_rate: Scalar, momentum: Scalar) -> optax.GradientTransformation:
    return lars(
        learning_rate,
        momentum,
        weight_decay=config.weight_decay,
        trust_coefficient=config.trust_coefficient,
        eps=config.eps,
        nesterov=config.nesterov,
        mask=MASKS[config.adapt],
    )


def build_sgd(config: Sgd, learning_rate: Scalar, momentum: Scalar) -> optax.GradientTransformation:
    """SGD with the rate outside the velocity, equation 9 of Goyal et al. (arXiv 1706.02677): a change of the rate needs no
    correction of the momentum."""
    rule = optax.chain(
        add_weight_decay(config.weight_decay),
        optax.trace(decay=momentum, nesterov=config.nesterov),
        optax.scale(-learning_rate),
    )
    return in_float32(rule)


def build_adamw(config: Adam, learning_rate: Scalar, momentum: Scalar) -> optax.GradientTransformation:
    """Adam with decoupled weight decay, algorithm 2 of Loshchilov & Hutter (arXiv 1711.05101)."""
    rule = optax.chain(
        scale_by_adam(b1=momentum, b2=config.beta2, eps=1e-8),  # PyTorch's default
        add_weight_decay(config.weight_decay),
        optax.scale(-learning_rate),
    )
    return in_float32(rule)


def build_lamb(config: Adam, learning_rate: Scalar, momentum: Scalar) -> optax.GradientTransformation:
    return lamb(learning_rate, momentum, config.beta2, weight_decay=config.weight_decay)


def _scale_subtrees(multipliers: Mapping[str, float]) -> optax.GradientTransformation:
    """Scale the updates, which are proportional to the learning rate in every optimizer."""

    def update(updates: Any, params: Any) -> Any:
        return updates | {name: jax.tree.map(lambda u, k=k: k * u, updates[name]) for name, k in multipliers.items()}

    return optax.stateless(update)
