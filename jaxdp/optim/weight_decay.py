"""The tensors that decay in every optimizer: matrices and larger ones, not biases, not parameters of batch normalization."""

from collections.abc import Callable
from typing import Any

import jax
import optax


def is_matrix_or_larger(params: Any) -> Any:
    """A tree of bools, True for tensors with two or more dimensions: not biases, not batch normalization."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


MASKS: dict[str, Callable[[Any], Any]] = {
    "weights": is_matrix_or_larger,
    "all": lambda params: jax.tree.map(lambda _: True, params),
}
"""The tensors with LARS's trust ratio and decay, by `optimizer.adapt`."""


def add_weight_decay(weight_decay: Any) -> optax.GradientTransformation:
    """g -> g + weight_decay * w for the tensors that decay: SGD applies it to the gradient, AdamW and LAMB to Adam's update."""
    return optax.add_decayed_weights(weight_decay, mask=is_matrix_or_larger)
