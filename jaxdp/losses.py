"""Losses of smoothed, mixed and weighted labels, and the rank of the true class."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.choices import LOSSES
from jaxdp.config import Optimizer
from jaxdp.errors import ConfigError


def cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """Cross entropy against (1 - s) * onehot + s / K (Szegedy et al., arXiv 1512.00567, section 7).

    logits: [B, K]; labels: [B] integers in [0, K); label_smoothing: s in [0, 1). Returns [B] float32.
    """
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    label_log_probability = jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)[:, 0]
    loss = -(1.0 - label_smoothing) * label_log_probability
    return loss - label_smoothing * log_probabilities.mean(-1) if label_smoothing else loss  # 0 times infinity is NaN


def binary_cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array | float = 1.0) -> jax.Array:
    """Mean over the classes of the binary cross entropy of each (Wightman et al., arXiv 2110.00476, section 2).

    logits, targets: [B, K]; targets in [0, 1]. weights: [K], of the positive targets, as `pos_weight` of PyTorch's
    binary_cross_entropy_with_logits. Returns [B] float32.
    """
    logits = logits.astype(jnp.float32)
    log_p, log_not_p = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return (-weights * _times(targets, log_p) - _times(1.0 - targets, log_not_p)).mean(-1)


def _times(share: jax.Array, loss: jax.Array) -> jax.Array:
    """share * loss, and 0 where the share is 0, also of an infinite loss, as of a class whose logit is -inf."""
    return share * jnp.where(share == 0, 0.0, loss)


Mix = tuple[jax.Array, jax.Array]  # (labels of the partners, share of the own label), [B] each


def soft_targets(optimizer: Optimizer, labels: jax.Array, classes: int, *, mix: Mix | None) -> jax.Array:
    """The mixed and then smoothed labels, as the share of each class [B, K] float32; with `target_threshold` 0 or 1.

    labels: int32 [B] classes, whose smoothing is divided among all classes; or float32 [B, K], each 0 or 1, and each
    smoothed alone, by half of the smoothing.
    """
    smoothing, shares = optimizer.label_smoothing, partial(_shares, classes=classes)
    targets, alternatives = shares(labels), classes if labels.ndim == 1 else 2
    if mix is not None:
        others, share = mix
        targets = share[:, None] * targets + (1 - share[:, None]) * shares(others)
    targets = (1 - smoothing) * targets + smoothing / alternatives
    if optimizer.target_threshold is not None:
        targets = (targets > optimizer.target_threshold).astype(jnp.float32)
    return targets


def _shares(labels: jax.Array, *, classes: int) -> jax.Array:
    return jax.nn.one_hot(labels, classes, dtype=jnp.float32) if labels.ndim == 1 else labels


def of_targets(loss: Callable[..., jax.Array], *, takes_weights: bool = False) -> Callable[..., jax.Array]:
    """The loss of labels, see `jaxdp.choices.Loss`, of `loss(logits [B, K] float32, targets [B, K] float32) -> [B]`.

    takes_weights: whether it also takes the weights of positive targets, [K].
    """

    def of_labels(optimizer: Optimizer, logits: jax.Array, labels: jax.Array, *, mix: Mix | None = None) -> jax.Array:
        targets = soft_targets(optimizer, labels, logits.shape[-1], mix=mix)
        options = {"weights": _class_weights(optimizer)} if takes_weights and optimizer.class_weights else {}
        return loss(logits.astype(jnp.float32), targets, **options)

    return of_labels


def label_weights(optimizer: Optimizer, labels: jax.Array) -> jax.Array:
    """[B]: the class weight of each label, whose mean over the global batch divides the mean loss.

    As in `torch.nn.functional.cross_entropy(weight=...)` where labels are classes, smoothed or not. Where they are
    probabilities, as mixup and CutMix make them, nothing divides the mean loss.
    """
    return _class_weights(optimizer)[labels]


def _class_weights(optimizer: Optimizer) -> jax.Array:
    """[C] float32. Raises ConfigError for balanced ones, before the data are opened."""
    if optimizer.class_weights == "balanced":
        raise ConfigError("optimizer.class_weights", "balanced", reason="needs training labels", hint="give numbers")
    return jnp.asarray(optimizer.class_weights, jnp.float32)


def softmax(optimizer: Optimizer, logits: jax.Array, labels: jax.Array, *, mix: Mix | None = None) -> jax.Array:
    """Cross entropy of smoothed, mixed and weighted labels, [B]."""
    if optimizer.class_weights:
        log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
        targets = soft_targets(optimizer, labels, logits.shape[-1], mix=mix)
        return -(_class_weights(optimizer) * _times(targets, log_probabilities)).sum(-1)
    loss = cross_entropy(logits, labels, optimizer.label_smoothing)
    if mix is None:
        return loss
    others, share = mix
    return _times(share, loss) + _times(1 - share, cross_entropy(logits, others, optimizer.label_smoothing))


def of_config(optimizer: Optimizer, logits: jax.Array, labels: jax.Array, *, mix: Mix | None = None, **_: Any) -> jax.Array:
    """The loss that `optimizer.loss` names, [B]."""
    return LOSSES.implementation(optimizer.loss)(optimizer, logits, labels, mix=mix)


LabelLoss = Callable[..., jax.Array]  # see `jaxdp.choices.Loss`
binary: LabelLoss = of_targets(binary_cross_entropy, takes_weights=True)
binary_sum: LabelLoss = of_targets(
    lambda logits, *targets, **weights: logits.shape[-1] * binary_cross_entropy(logits, *targets, **weights), takes_weights=True
)


def rank_of_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Number of classes with at least the score of the true class: 0 if it is the best. Ties and NaN count against the model.

    logits: [B, K]; labels: [B] integers in [0, K). Returns [B] int32.
    """
    label_logits = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    classes = jnp.arange(logits.shape[-1], dtype=labels.dtype)
    above = ~(logits < label_logits) & (classes != labels[:, None])
    return above.sum(-1, dtype=jnp.int32)


def is_correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Whether the true class has the highest score, bool [B]."""
    return rank_of_label(logits, labels) < 1


def is_among_five(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Whether the true class has one of the five highest scores, bool [B]."""
    return rank_of_label(logits, labels) < 5
