"""The task `classes`: one class for each image. targets: int32 [B]; outputs: logits [B, C] float32."""

import jax
import jax.numpy as jnp

from jaxdp.losses import of_config as loss
from jaxdp.losses import rank_of_label

__all__ = ("loss", "predicted", "probabilities")


def predicted(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The predicted class of each image, int32 [B]. A tie counts as an error: it is then not the label."""
    is_own = jnp.arange(logits.shape[-1], dtype=labels.dtype) == labels[:, None]
    other = jnp.where(is_own, -jnp.inf, logits).argmax(-1).astype(jnp.int32)
    return jnp.where(rank_of_label(logits, labels) < 1, labels, other)


def probabilities(logits: jax.Array) -> jax.Array:
    """The probability of each class, [B, C]; they add up to 1."""
    return jnp.exp(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
