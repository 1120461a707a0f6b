"""Gradient accumulation: a device with several workers computes their gradients one after another."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxdp.parallel.allreduce import varying
from jaxdp.training.objective import Batch, Gradient
from jaxdp.training.state import TrainState


def with_micro_batches(gradient_of: Gradient, count: int) -> Gradient:
    """The mean over `count` equal micro-batches of a device, one after another in `lax.scan`."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        def one(batch: Batch) -> tuple[dict, dict]:
            return gradient_of(state, batch, seed)

        micro_batches = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)  # [count, B / count, ...]
        shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], micro_batches))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def add(total: Any, micro_batch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, one(micro_batch)), None

        total, _ = lax.scan(add, varying(zeros), micro_batches)
        return jax.tree.map(lambda x: x / count, total)

    return gradient
