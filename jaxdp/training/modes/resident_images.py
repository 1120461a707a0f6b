"""Training images that are all on the devices, if they fit: a batch has their indices, and the step takes them."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdp.training.objective import Batch, Gradient
from jaxdp.training.state import TrainState


def with_resident_images(gradient_of: Gradient, images: jax.Array) -> Gradient:
    """A batch has "indices" [B] into the images, uint8 [N, H, W, 3], in place of "images"."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        return gradient_of(state, batch | {"images": jnp.take(images, batch["indices"], axis=0)}, seed)

    return gradient
