"""Construction of an optimizer from its config.

docs/extending.md lists the steps to add one.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import optax

from jaxdp.choices import OPTIMIZERS
from jaxdp.config import Optimizer
from jaxdp.optim.lars import is_matrix_or_larger, lars

Scalar: TypeAlias = "float | jax.Array"


def build_optimizer(
    config: Optimizer, learning_rate: Scalar, momentum: Scalar, *, multipliers: Mapping[str, float] | None = None
) -> optax.GradientTransformation:
    """The update rule of a config, preceded by gradient clipping. The structure of its state is the same for all values.

    learning_rate, momentum: a float or a traced scalar. multipliers: factors on the learning rate by the name of a top-level
    subtree of the parameters; the default is 1.
    """
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    update_rule = CONSTRUCTORS[config.name](config, learning_rate, momentum)
    return optax.chain(clip, update_rule, *([_scale_subtrees(multipliers)] if multipliers else []))


def _lars(config: Optimizer, learning_rate: Scalar, momentum: Scalar) -> optax.GradientTransformation:
    return lars(
        learning_rate,
        momentum,
        weight_decay=config.weight_decay,
        trust_coefficient=config.trust_coefficient,
        eps=config.eps,
        nesterov=config.nesterov,
        denominator=config.denominator,
    )


def _sgd(config: Optimizer, learning_rate: Scalar, momentum: Scalar) -> optax.GradientTransformation:
    """SGD with the rate outside the velocity, equation 9 of Goyal et al. (arXiv 1706.02677): a change of the rate needs no
    correction of the momentum."""
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=is_matrix_or_larger),
        optax.trace(decay=momentum, nesterov=config.nesterov),
        optax.scale(-learning_rate),
    )


CONSTRUCTORS: dict[str, Callable[[Optimizer, Scalar, Scalar], optax.GradientTransformation]] = OPTIMIZERS.implement(
    {"lars": _lars, "sgd": _sgd}
)


def _scale_subtrees(multipliers: Mapping[str, float]) -> optax.GradientTransformation:
    """Scale the updates, which are proportional to the learning rate in every optimizer."""

    def update(updates: Any, params: Any) -> Any:
        return updates | {name: jax.tree.map(lambda u, k=k: k * u, updates[name]) for name, k in multipliers.items()}

    return optax.stateless(update)
