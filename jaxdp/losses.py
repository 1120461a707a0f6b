"""Label-smoothed cross entropy, and metrics as sums and counts, so that parts of a batch add up exactly."""

import jax
import jax.numpy as jnp


def cross_entropy(logits, labels, label_smoothing: float = 0.0):
    """Cross entropy against (1 - s) * onehot + s / K (Szegedy et al., arXiv 1512.00567, section 7).

    logits: [B, K]; labels: [B] integers in [0, K); label_smoothing: s in [0, 1). Returns [B] float32.
    """
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    of_label = jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)[:, 0]
    return -(1.0 - label_smoothing) * of_label - label_smoothing * log_probabilities.mean(-1)


def rank_of_label(logits, labels):
    """How many classes score above the true one, 0 when it is the best. A tie counts against the model. [B] int32."""
    of_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    classes = jnp.arange(logits.shape[-1])
    above = ~(logits < of_label) & (classes != labels[:, None])
    return above.sum(-1, dtype=jnp.int32)
