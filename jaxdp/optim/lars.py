"""LARS, layer-wise adaptive rate scaling (You et al., arXiv 1708.03888), composed from optax transformations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.optim.squares import SquaredNorms, local_sums_of_squares


def is_matrix_or_larger(params: Any) -> Any:
    """A tree of bools, True for tensors with two or more dimensions: not biases, not batch normalization."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


MASKS: dict[str, Callable[[Any], Any]] = {
    "weights": is_matrix_or_larger,
    "all": lambda params: jax.tree.map(lambda _: True, params),
}
"""The tensors with trust ratio and decay, by `optimizer.adapt`."""


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


def scale_by_trust_ratio() -> optax.GradientTransformation:
    """u -> |w| / |u| * u for tensors with two or more dimensions, unless a norm is 0: `optax.scale_by_trust_ratio` for shards.

    `update` takes the sums of squares of the whole tensors as `squares` if updates and parameters are shards.
    """

    def update(
        updates: Any, state: optax.EmptyState, params: Any = None, *, squares: SquaredNorms | None = None, **_: Any
    ) -> tuple[Any, optax.EmptyState]:
        squares = squares or SquaredNorms((), local_sums_of_squares(params)[0], local_sums_of_squares)

        def ratio(weight_square: jax.Array, update_square: jax.Array) -> jax.Array:
            usable = (weight_square > 0) & (update_square > 0)
            return jnp.where(usable, jnp.sqrt(weight_square) / jnp.sqrt(update_square), 1.0)

        ratios = jax.tree.map(ratio, squares.params, squares.of(updates)[0])
        masks = is_matrix_or_larger(params)
        return jax.tree.map(lambda u, t, masked: t * u if masked else u, updates, ratios, masks), state

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


def with_schedules(build: Callable[..., optax.GradientTransformation], **hyperparameters: Any) -> optax.GradientTransformation:
    """`build` of hyperparameters, in float32. Each may be a schedule (step -> value)."""
    if any(callable(value) for value in hyperparameters.values()):
        return in_float32(optax.inject_hyperparams(build)(**hyperparameters))
    return in_float32(build(**hyperparameters))


def in_float32(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """A rule that computes and keeps its state in float32 even if gradient and parameters have 16 bits.

    Updates have the dtypes of the parameters, and the state keeps its own, whatever the dtypes of hyperparameters.
    """
    inner = optax.with_extra_args_support(rule)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        found, new_state = inner.update(_wide(updates), state, _wide(params), **extra)
        return _with_dtypes(found, updates if params is None else params), _with_dtypes(new_state, state)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(_wide(params)), update)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)


def _with_dtypes(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda leaf, other: leaf.astype(other.dtype), tree, like)
