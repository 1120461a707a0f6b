"""The task `labels`: any number of labels for each image. targets: float32 [B, C], 0 or 1; outputs: logits [B, C] float32."""

import jax
import jax.numpy as jnp

from jaxdp.losses import of_config as loss

__all__ = ("loss", "predicted", "probabilities")


def predicted(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Whether each label is predicted, with a probability of at least 0.5, int32 [B, C]."""
    return (logits >= 0).astype(jnp.int32)


def probabilities(logits: jax.Array) -> jax.Array:
    """The probability of each label, [B, C]."""
    return jax.nn.sigmoid(logits)
