"""Adam's update (Kingma & Ba, arXiv 1412.6980) for a momentum that changes between steps."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def scale_by_adam(*, b1: float | jax.Array, b2: float, eps: float) -> optax.GradientTransformation:
    """g -> m / (sqrt(s) + eps), with unbiased moving averages m of g and s of g^2.

    Adam divides a moving average by 1 - b^t, which is wrong once b has changed. Here the constant 1 is averaged beside each and
    divides it; that average equals 1 - b^t while b is constant. b1: may differ in every step.
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
