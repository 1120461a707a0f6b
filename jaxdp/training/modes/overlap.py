"""The overlapped gradient, `reduce.overlap`: the default on several devices, in place of `local_gradient` in `step.py`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxdp.config import Config
from jaxdp.parallel.allreduce import Overlap, varying
from jaxdp.parallel.mesh import AXES
from jaxdp.training.objective import Batch, Gradient, Loss, PixelStats, batch_metrics, training_examples
from jaxdp.training.state import StateLayout, TrainState


def overlapped_gradient(
    config: Config, layout: StateLayout, loss: Loss, *, pixel_stats: PixelStats, overlap: Overlap
) -> Gradient:
    """The backward pass goes segment by segment, and starts the all-reduce of each as soon as possible.

    `apply_segment` applies a part of the network, such as a residual block. Returns an empty gradient: the
    reduced one comes from `overlap.wait_all`, which `mean_gradient` calls.
    """

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        examples = training_examples(config, layout.model, batch, seed=seed, pixel_stats=pixel_stats)
        x, params = examples.images, varying(state.params)
        backwards: list[Callable] = []
        moments: dict[str, Any] = {}
        with jax.named_scope("forward"):
            for segment in layout.network.segments:

                def forward(own: dict, x: Any, *, segment: tuple[str, ...] = segment) -> tuple[Any, dict]:
                    return layout.network.apply_segment(params | own, state.batch_stats, x, segment=segment, key=examples.key)

                own = {name: params[name] for name in segment}
                x, backward, new_moments = jax.vjp(forward, own, x, has_aux=True)
                backwards.append(backward)
                moments |= new_moments

            def share_of_loss(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
                mean = loss(logits, examples)
                return mean / lax.axis_size(AXES), mean

            share, backward, mean = jax.vjp(share_of_loss, x, has_aux=True)
            shares = batch_metrics(config, x, examples)
        with jax.named_scope("backward"):
            (cotangent,) = backward(jnp.ones_like(share))
        for backward in reversed(backwards):
            with jax.named_scope("backward"):
                own_gradient, cotangent = backward(cotangent)
            cotangent = overlap.enqueue(cotangent, own_gradient)
        return {}, {"moments": moments, "loss": mean} | shares

    return gradient
