"""LARS, layer-wise adaptive rate scaling (You et al., arXiv 1708.03888), composed from optax transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.optim.precision import with_schedules
from jaxdp.optim.squares import SquaredNorms
from jaxdp.optim.weight_decay import is_matrix_or_larger


def scale_by_lars_ratio(
    *, weight_decay: float, trust_coefficient: float, eps: float, mask: Any
) -> optax.GradientTransformation:
    """g -> t * (g + decay * w) with a trust ratio t per tensor; tensors outside the mask are unchanged.

    t = trust_coefficient * |w| / (|g| + decay * |w| + eps), as in You et al.'s code, TensorFlow and MLPerf; t = 1 if |w| or |g|
    is 0. optax.lars has |g + decay * w| in the denominator. `update` takes the sums of squares of the whole tensors as
    `squares` if gradient and parameters are shards.
    """

    def ratio(weight_square: jax.Array, gradient_square: jax.Array) -> jax.Array:
        weight_norm, gradient_norm = jnp.sqrt(weight_square), jnp.sqrt(gradient_square)
        usable = (weight_norm > 0) & (gradient_norm > 0)
        bottom = gradient_norm + weight_decay * weight_norm + eps
        return jnp.where(usable, trust_coefficient * weight_norm / bottom, 1.0)

    def update(
        updates: Any, state: optax.EmptyState, params: Any = None, *, squares: SquaredNorms | None = None, **_: Any
    ) -> tuple[Any, optax.EmptyState]:
        if params is None:
            raise ValueError("LARS requires the parameters: call update(gradients, state, params)")
        masks = mask(params) if callable(mask) else mask
        squares = squares or SquaredNorms.compute(updates, params)
        decayed = jax.tree.map(lambda g, w, masked: g + weight_decay * w if masked else g, updates, params, masks)
        ratios = jax.tree.map(lambda masked, *norms: ratio(*norms) if masked else 1.0, masks, squares.params, squares.gradient)
        return jax.tree.map(lambda u, t, masked: t * u if masked else u, decayed, ratios, masks), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def lars(
    learning_rate: Any,
    momentum: Any = 0.9,
    *,
    weight_decay: float = 1e-4,
    trust_coefficient: float = 0.001,
    eps: float = 1e-6,
    nesterov: bool = False,
    mask: Any = None,
) -> optax.GradientTransformation:
    """LARS (You et al., arXiv 1708.03888): momentum SGD whose rate for each tensor follows the norms of its weights w and
    gradient g.

    v = m v + L t (g + b w); w = w - v (Nesterov: w = w - (L t (g + b w) + m v)), with learning rate L, velocity v, momentum m
    and decay b. t = trust_coefficient * norm(w) / (norm(g) + b * norm(w) + eps), or 1 if a norm is 0.

    learning_rate, momentum: a float, a traced scalar or a schedule (step -> value). mask: a tree of bools, or a function of the
    parameters that returns one: whether trust ratio and decay apply (default: to tensors of two or more dimensions).
    Its `update` needs the parameters. optax.lars has norm(g + b w) in the denominator, and a constant momentum.
    """
    mask = is_matrix_or_larger if mask is None else mask

    def build(learning_rate: Any, momentum: Any) -> optax.GradientTransformation:
        return optax.chain(
            scale_by_lars_ratio(weight_decay=weight_decay, trust_coefficient=trust_coefficient, eps=eps, mask=mask),
            optax.scale(learning_rate),
            optax.trace(decay=momentum, nesterov=nesterov),
            optax.scale(-1.0),
        )

    return with_schedules(build, learning_rate=learning_rate, momentum=momentum)
