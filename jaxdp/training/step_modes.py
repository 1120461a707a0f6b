"""The modes of a training step: each wraps a function of the plain step in `step.py`; `overlapped_gradient` replaces one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxdp.config import Config
from jaxdp.losses import label_weights
from jaxdp.optim import loss_scale
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES
from jaxdp.training import request_flags
from jaxdp.training.objective import Batch, Gradient, Loss, Metrics, PixelStats, Step, accuracy, training_examples
from jaxdp.training.state import StateLayout, TrainState

LocalGradient = Callable[[Loss], Gradient]


def with_micro_batches(gradient_of: Gradient, count: int) -> Gradient:
    """Gradient accumulation: the mean over `count` equal micro-batches of a device, one after another in `lax.scan`."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        def one(batch: Batch) -> tuple[dict, dict]:
            return gradient_of(state, batch, seed)

        micro_batches = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)  # [count, B / count, ...]
        shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], micro_batches))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def add(total: Any, micro_batch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, one(micro_batch)), None

        total, _ = lax.scan(add, allreduce.varying(zeros), micro_batches)
        return jax.tree.map(lambda x: x / count, total)

    return gradient


def with_resident_images(gradient_of: Gradient, images: jax.Array) -> Gradient:
    """Training images on the devices: a batch has "indices" [B] into them, uint8 [N, H, W, 3], in place of "images"."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        return gradient_of(state, batch | {"images": jnp.take(images, batch["indices"], axis=0)}, seed)

    return gradient


def with_gathered_params(gradient_of: Gradient, gather_params: Callable[[dict], dict]) -> Gradient:
    """`reduce.update sharded`: the step begins with the all-gather of the trained parameters."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        return gradient_of(state._replace(params=gather_params(state.params)), batch, seed)

    return gradient


def with_requests(gradient_of: Gradient) -> Gradient:
    """Runs of `jaxdp.train`: the requests of a batch join aux, so they travel in the same message."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        others = {name: value for name, value in batch.items() if name != request_flags.BATCH_KEY}
        gradient, aux = gradient_of(state, others, seed)
        if request_flags.BATCH_KEY in batch:
            aux |= {request_flags.BATCH_KEY: request_flags.as_flags(batch[request_flags.BATCH_KEY])}
        return gradient, aux

    return gradient


def with_class_weights(config: Config, gradient_of: LocalGradient, loss: Loss, *, mean: Callable[[dict], dict]) -> Gradient:
    """`optimizer.class_weights`: their mean over the global batch divides the loss, so a factor of all weights cancels.

    It divides before the backward pass, as in PyTorch. mean: over all devices.
    """

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        weights = label_weights(config.optimizer, batch["labels"])  # [B]
        weight = mean({"label_weight": weights.mean()})["label_weight"]
        return gradient_of(lambda logits, examples: loss(logits, examples) / weight)(state, batch, seed)

    return gradient


def with_loss_scale(gradient_of: LocalGradient, loss: Loss) -> Gradient:
    """`optimizer.loss_scale`: the derivative of the loss is multiplied by the scale before the backward pass.

    The division by the number of devices follows the backward pass, which then uses the full range of float16.
    """

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        factor = state.loss_scale.scale * lax.axis_size(AXES)
        return gradient_of(lambda logits, examples: scale_derivative(loss(logits, examples), factor))(state, batch, seed)

    return gradient


@jax.custom_jvp
def scale_derivative(value: jax.Array, factor: jax.Array) -> jax.Array:
    """`value`, whose derivative is multiplied by a factor."""
    return value


@scale_derivative.defjvp
def _scale_derivative_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (value, factor), (tangent, _) = primals, tangents
    return value, tangent * factor


def with_unscaled_gradient(gradient_of: Gradient) -> Gradient:
    """`optimizer.loss_scale`: the reduced gradient is divided by the scale."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        scaled, aux = gradient_of(state, batch, seed)
        return jax.tree.map(lambda g: g / state.loss_scale.scale, scaled), aux

    return gradient


def overlapped_gradient(
    config: Config, layout: StateLayout, loss: Loss, *, pixel_stats: PixelStats, overlap: allreduce.Overlap
) -> Gradient:
    """`reduce.overlap`: the backward pass goes segment by segment, and starts the all-reduce of each as soon as possible.

    Replaces `local_gradient`. Returns an empty gradient: the reduced one comes from `overlap.wait_all`, which `mean_gradient`
    calls.
    """

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        examples = training_examples(config, layout.model, batch, seed=seed, pixel_stats=pixel_stats)
        x, params = examples.images, allreduce.varying(state.params)
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
            correct = accuracy(x, examples)
        with jax.named_scope("backward"):
            (cotangent,) = backward(jnp.ones_like(share))
        for backward in reversed(backwards):
            with jax.named_scope("backward"):
                own_gradient, cotangent = backward(cotangent)
            cotangent = overlap.enqueue(cotangent, own_gradient)
        return {}, {"moments": moments, "loss": mean, "accuracy": correct}

    return gradient


def with_average(step: Step, config: Config, layout: StateLayout) -> Step:
    """`optimizer.average_decay`: an average of the trained parameters and statistics includes each new state."""

    def averaging(state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        new, metrics = step(state, batch, hyperparameters)
        with jax.named_scope("optimizer"):
            average = state.average.include(layout.trained(new.params), layout.trained(new.batch_stats), config.optimizer)
        return new._replace(average=average), metrics

    return averaging


def with_skipped_steps(step: Step, config: Config) -> Step:
    """Loss scaling or `guard.non_finite skip`: a step whose loss or gradient is not finite changes only the loss scale and the
    counters of skipped steps."""
    kind = config.optimizer.loss_scale

    def skipping(state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        new, metrics = step(state, batch, hyperparameters)
        finite = jnp.isfinite(metrics["gradient_norm"]) & jnp.isfinite(metrics["loss"])
        new = jax.tree.map(partial(jnp.where, finite), new, state)
        new = new._replace(loss_scale=loss_scale.update(kind, state.loss_scale, finite))
        counters = {"skipped_steps": new.loss_scale.skipped, "skipped_in_a_row": new.loss_scale.consecutive_skips}
        return new, metrics | ({"loss_scale": state.loss_scale.scale} if kind != "none" else {}) | counters

    return skipping


def with_request_metric(step: Step) -> Step:
    """Runs of `jaxdp.train`: the metric "request" is the largest request of any device."""

    def requesting(state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        new, metrics = step(state, batch, hyperparameters)
        if request_flags.BATCH_KEY in metrics:
            metrics["request"] = request_flags.from_total(metrics.pop(request_flags.BATCH_KEY))
        return new, metrics

    return requesting
