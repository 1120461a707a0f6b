"""Adam's update (Kingma & Ba, arXiv 1412.6980) for a momentum that changes between steps, and LAMB, which scales it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.optim.precision import with_schedules
from jaxdp.optim.squares import SquaredNorms, local_sums_of_squares
from jaxdp.optim.weight_decay import add_weight_decay, is_matrix_or_larger


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
    learning_rate: Any, b1: Any = 0.9, b2: float = 0.999, *, eps: float = 1e-6, weight_decay: float = 1e-4
) -> optax.GradientTransformation:
    """LAMB, algorithm 2 of You et al. (arXiv 1904.00962): u = m / (sqrt(s) + eps) + b w; w = w - L norm(w) / norm(u) u.

    m and s are unbiased moving averages of the gradient and its square, even if b1 changes. Decay b and the ratio of norms
    apply to tensors of two or more dimensions, as with LARS.

    learning_rate, b1: a float, a traced scalar or a schedule (step -> value). Its `update` needs the parameters.
    """

    def build(learning_rate: Any, b1: Any) -> optax.GradientTransformation:
        return optax.chain(
            scale_by_adam(b1=b1, b2=b2, eps=eps),
            add_weight_decay(weight_decay),
            scale_by_trust_ratio(),
            optax.scale(-learning_rate),
        )

    return with_schedules(build, learning_rate=learning_rate, b1=b1)
