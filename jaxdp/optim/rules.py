"""The update rules of optimizers, composed from optax transformations: LARS, Adam and LAMB, and what all optimizers share.

Optimizers compute in float32, and keep their state in float32, whatever the dtypes of gradient and parameters. In every
optimizer, matrices and larger tensors decay: not biases, not parameters of batch normalization. `decays`, a function
of the parameters, returns a tree of other factors on weight decay; tensors of factor 0 do not decay.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxdp.optim.squares import SquaredNorms, local_sums_of_squares

Decays: TypeAlias = Callable[[Any], Any] | None


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


def is_matrix_or_larger(params: Any) -> Any:
    """A tree of bools, True for tensors with two or more dimensions: not biases, not batch normalization."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


MASKS: dict[str, Callable[[Any], Any]] = {
    "weights": is_matrix_or_larger,
    "all": lambda params: jax.tree.map(lambda _: True, params),
}
"""The tensors with LARS's trust ratio and decay, by `optimizer.adapt`."""


def add_weight_decay(weight_decay: Any, decays: Decays = None) -> optax.GradientTransformation:
    """g -> g + weight_decay * w for the tensors that decay: SGD applies it to the gradient, AdamW and LAMB to Adam's update."""
    factors_of = decays or is_matrix_or_larger

    def update(updates: Any, params: Any) -> Any:
        return jax.tree.map(partial(_decayed, weight_decay=weight_decay), updates, params, factors_of(params))

    # masked, although nothing is left out: checkpoints keep the structure of optax.add_decayed_weights with a mask
    return optax.masked(optax.stateless(update), lambda params: jax.tree.map(lambda _: True, params))


def _decayed(gradient: jax.Array, weight: jax.Array, factor: float, *, weight_decay: Any) -> jax.Array:
    """gradient + decay * weight, without a computation for no decay."""
    is_zero = not factor or (isinstance(weight_decay, int | float) and not weight_decay)
    return gradient if is_zero else gradient + weight_decay * factor * weight


def scale_by_lars_ratio(
    *, weight_decay: float, trust_coefficient: float, eps: float, mask: Any, decays: Decays = None
) -> optax.GradientTransformation:
    """g -> t * (g + decay * w) with a trust ratio t per tensor; t = 1, and decay = 0 without `decays`, outside the mask.

    t = trust_coefficient * |w| / (|g| + decay * |w| + eps), as in You et al.'s code, TensorFlow and MLPerf; t = 1 if |w| or |g|
    is 0. optax.lars has |g + decay * w| in the denominator. `update` takes the sums of squares of the whole tensors as
    `squares` if gradient and parameters are shards.
    """

    def ratio(weight_square: jax.Array, gradient_square: jax.Array, factor: float) -> jax.Array:
        weight_norm, gradient_norm = jnp.sqrt(weight_square), jnp.sqrt(gradient_square)
        usable = (weight_norm > 0) & (gradient_norm > 0)
        bottom = gradient_norm + weight_decay * factor * weight_norm + eps
        return jnp.where(usable, trust_coefficient * weight_norm / bottom, 1.0)

    def update(
        updates: Any, state: optax.EmptyState, params: Any = None, *, squares: SquaredNorms | None = None, **_: Any
    ) -> tuple[Any, optax.EmptyState]:
        if params is None:
            raise ValueError("LARS requires the parameters: call update(gradients, state, params)")
        masks = mask(params) if callable(mask) else mask
        squares, factors = squares or SquaredNorms.compute(updates, params), decays(params) if decays else masks
        decayed = jax.tree.map(partial(_decayed, weight_decay=weight_decay), updates, params, factors)
        norms = squares.params, squares.gradient, factors
        ratios = jax.tree.map(lambda masked, *norms: ratio(*norms) if masked else 1.0, masks, *norms)
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
    decays: Decays = None,
) -> optax.GradientTransformation:
    """LARS (You et al., arXiv 1708.03888): momentum SGD whose rate for each tensor follows the norms of its weights w and
    gradient g.

    v = m v + L t (g + b w); w = w - v (Nesterov: w = w - (L t (g + b w) + m v)), with learning rate L, velocity v, momentum m
    and decay b. t = trust_coefficient * norm(w) / (norm(g) + b * norm(w) + eps), or 1 if a norm is 0.

    learning_rate, momentum: a float, a traced scalar or a schedule (step -> value). mask: a tree of bools, or a function of the
    parameters that returns one: whether trust ratio and decay apply (default: to tensors of two or more dimensions).
    decays: a function of the parameters that returns a tree of factors on weight decay (default: 1 in the mask, else 0).
    Its `update` needs the parameters. optax.lars has norm(g + b w) in the denominator, and a constant momentum.
    """
    mask = is_matrix_or_larger if mask is None else mask

    def build(learning_rate: Any, momentum: Any) -> optax.GradientTransformation:
        return optax.chain(
            scale_by_lars_ratio(
                weight_decay=weight_decay, trust_coefficient=trust_coefficient, eps=eps, mask=mask, decays=decays
            ),
            optax.scale(learning_rate),
            optax.trace(decay=momentum, nesterov=nesterov),
            optax.scale(-1.0),
        )

    return with_schedules(build, learning_rate=learning_rate, momentum=momentum)


def scale_by_adam(*, b1: float | jax.Array, b2: float, eps: float) -> optax.GradientTransformation:
    """g -> m / (sqrt(s) + eps), with unbiased moving averages m of g and s of g^2.

    Adam divides a moving average by 1 - b^t, which is wrong once b has changed. Here the average is divided by the moving
    average of the constant 1, which equals 1 - b^t while b is constant. b1: may differ in every step.
    """

    def init(params: Any) -> Any:
        zero = (optax.tree.zeros_like(params), jnp.zeros((), jnp.float32))
        return {"mean": zero, "square": zero}

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        sample = (gradients, jnp.ones((), jnp.float32))
        mean, mean_weight = optax.tree.update_moment(sample, state["mean"], b1, order=1)
        square, square_weight = optax.tree.update_moment(sample, state["square"], b2, order=2)
        updates = jax.tree.map(lambda m, s: m / mean_weight / (jnp.sqrt(s / square_weight) + eps), mean, square)
        return updates, {"mean": (mean, mean_weight), "square": (square, square_weight)}

    return optax.GradientTransformation(init, update)


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


def lamb(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: float = 0.999,
    *,
    eps: float = 1e-6,
    weight_decay: float = 1e-4,
    decays: Decays = None,
) -> optax.GradientTransformation:
    """LAMB, algorithm 2 of You et al. (arXiv 1904.00962): u = m / (sqrt(s) + eps) + b w; w = w - L norm(w) / norm(u) u.

    m and s are unbiased moving averages of the gradient and its square, even if b1 changes. Decay b and the ratio of norms
    apply to tensors of two or more dimensions, as with LARS.

    learning_rate, b1: a float, a traced scalar or a schedule (step -> value). decays: as of `lars`.
    Its `update` needs the parameters.
    """

    def build(learning_rate: Any, b1: Any) -> optax.GradientTransformation:
        return optax.chain(
            scale_by_adam(b1=b1, b2=b2, eps=eps),
            add_weight_decay(weight_decay, decays),
            scale_by_trust_ratio(),
            optax.scale(-learning_rate),
        )

    return with_schedules(build, learning_rate=learning_rate, b1=b1)
