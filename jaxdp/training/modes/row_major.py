"""The gradient of a step on one GPU, in the memory order of the parameters.

cuDNN writes the gradient of a kernel [K, K, C, F] in the order F, K, K, C. XLA would compute the update in this order too, and
write parameters and momentum twice.
"""

import jax
from jax import lax
from jax.typing import ArrayLike

from jaxdp.training.objective import Batch, Gradient
from jaxdp.training.state import TrainState


def with_row_major_gradient(gradient_of: Gradient) -> Gradient:
    """One kernel for each gradient of a convolution writes it in the order of its dimensions."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        found, aux = gradient_of(state, batch, seed)
        return lax.platform_dependent(found, cuda=_row_major, rocm=_row_major, default=lambda tree: tree), aux

    return gradient


def _row_major(tree: dict) -> dict:
    def written(leaf: jax.Array) -> jax.Array:
        return lax.optimization_barrier(leaf.ravel()).reshape(leaf.shape)  # a vector has one order only

    return jax.tree.map(lambda leaf: written(leaf) if leaf.ndim > 2 else leaf, tree)
