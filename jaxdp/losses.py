"""Label-smoothed cross entropy, and the rank of the true class."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """Cross entropy against (1 - s) * onehot + s / K (Szegedy et al., arXiv 1512.00567, section 7).

    logits: [B, K]; labels: [B] integers in [0, K); label_smoothing: s in [0, 1). Returns [B] float32.
    """
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    label_log_probability = jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)[:, 0]
    return -(1.0 - label_smoothing) * label_log_probability - label_smoothing * log_probabilities.mean(-1)


def rank_of_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Number of classes with at least the score of the true class: 0 if it is the best. Ties and NaN count against the model.

    logits: [B, K]; labels: [B] integers in [0, K). Returns [B] int32.
    """
    label_logits = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    classes = jnp.arange(logits.shape[-1])
    above = ~(logits < label_logits) & (classes != labels[:, None])
    return above.sum(-1, dtype=jnp.int32)
