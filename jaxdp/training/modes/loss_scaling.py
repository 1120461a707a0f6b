"""Loss scaling, `optimizer.loss_scale`: the backward pass of a scaled loss. `optim/loss_scale.py` adapts the scale."""

import jax
from jax import lax
from jax.typing import ArrayLike

from jaxdp.parallel.mesh import AXES
from jaxdp.training.objective import Batch, Gradient, LocalGradient, Loss
from jaxdp.training.state import TrainState


def with_loss_scale(gradient_of: LocalGradient, loss: Loss) -> Gradient:
    """The derivative of the loss is multiplied by the scale before the backward pass.

    The division by the number of devices follows the backward pass, which then uses the full range of float16.
    """

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        factor = state.loss_scale.scale * lax.axis_size(AXES)
        return gradient_of(lambda logits, examples: scale_derivative(loss(logits, examples), factor))(state, batch, seed)

    return gradient


@jax.custom_jvp
def scale_derivative(value: jax.Array, factor: jax.Array) -> jax.Array:
    """`value`, whose derivative is multiplied by a factor."""
    return value


@scale_derivative.defjvp
def _scale_derivative_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (value, factor), (tangent, _) = primals, tangents
    return value, tangent * factor


def with_unscaled_gradient(gradient_of: Gradient) -> Gradient:
    """The reduced gradient is divided by the scale."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        scaled, aux = gradient_of(state, batch, seed)
        return jax.tree.map(lambda g: g / state.loss_scale.scale, scaled), aux

    return gradient
