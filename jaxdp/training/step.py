"""The training step: what each device of the mesh computes, a pure function of (state, batch, hyperparameters).

The plain step stands first and whole: `local_gradient` (forward pass, loss, backward pass), `mean_gradient` (all-reduce) and
`with_update` (optimizer, running statistics). A mode of the config, such as gradient accumulation or loss scaling, wraps one of
these functions; each has a module in `modes/`. `step_gradient` and `make_train_step` choose the modes and their order.
By default, on several devices, `modes/overlap.py` computes the gradient of `local_gradient` and reduces it meanwhile, with the
strategy `torus`. All other modes are off, but an accelerator holds a small set of training images (`resident_images`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from jaxdp.config import Config, divides_by_class_weights, skips_steps
from jaxdp.network import Network
from jaxdp.optim.squares import norm
from jaxdp.parallel import allreduce
from jaxdp.parallel.allreduce import Overlap
from jaxdp.parallel.mesh import AXES
from jaxdp.training.batch_statistics import update_statistics
from jaxdp.training.modes.accumulation import with_micro_batches
from jaxdp.training.modes.average import with_average
from jaxdp.training.modes.class_weights import with_class_weights
from jaxdp.training.modes.loss_scaling import with_loss_scale, with_unscaled_gradient
from jaxdp.training.modes.overlap import overlapped_gradient
from jaxdp.training.modes.resident_images import with_resident_images
from jaxdp.training.modes.row_major import with_row_major_gradient
from jaxdp.training.modes.skipped_steps import with_skipped_steps
from jaxdp.training.objective import (
    Batch,
    Gradient,
    LocalGradient,
    Loss,
    Metrics,
    PixelStats,
    Step,
    batch_metrics,
    mean_loss,
    training_examples,
)
from jaxdp.training.request_flags import with_request_metric, with_requests
from jaxdp.training.state import StateLayout, TrainState, make_optimizer

HYPERPARAMETERS = ("learning_rate", "momentum")


def local_gradient(config: Config, layout: StateLayout, loss: Loss, *, pixel_stats: PixelStats) -> Gradient:
    """The gradient of one device's share of the mean loss, before any reduction.

    aux: {"loss" and the first metric, such as "accuracy", means over the device's images, "moments" for the running
    statistics}.
    """

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        state = state._replace(params=allreduce.varying(state.params))
        examples = training_examples(config, layout.model, batch, seed=seed, pixel_stats=pixel_stats)

        def share_of_loss(params: dict) -> tuple[jax.Array, dict]:
            logits, moments = layout.network.apply(  # [B, K]
                state.params | params, state.batch_stats, examples.images, train=True, key=examples.key
            )
            mean = loss(logits, examples)
            aux = {"moments": moments, "loss": mean} | batch_metrics(config, logits, examples)
            return mean / lax.axis_size(AXES), aux

        with jax.named_scope("forward"):
            share, backward, aux = jax.vjp(share_of_loss, layout.trained(state.params), has_aux=True)
        with jax.named_scope("backward"):
            (gradient,) = backward(jnp.ones_like(share))
        return gradient, aux

    return gradient


def mean_gradient(local: Gradient, all_reduce: Callable[[dict], dict], mean: Callable[[dict], dict]) -> Gradient:
    """The gradient of the mean loss over all devices, and the mean of aux, equal on every device."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        share, aux = local(state, batch, seed)
        return all_reduce(share), mean(aux)

    return gradient


def with_update(config: Config, layout: StateLayout, gradient_of: Gradient) -> Step:
    """The step that moves the state along a gradient."""

    def step(state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        gradient, aux = gradient_of(state, batch, hyperparameters["seed"])
        moments = aux.pop("moments")
        params = layout.trained(state.params)
        with jax.named_scope("gradient_norm"):
            squares = layout.squares(gradient, params)
            metrics = aux | {"gradient_norm": norm(squares.gradient)}
        with jax.named_scope("optimizer"):
            optimizer = make_optimizer(config, layout.model, **{name: hyperparameters[name] for name in HYPERPARAMETERS})
            updates, opt_state = optimizer.update(gradient, state.opt_state, params, squares=squares)
            params = state.params | optax.apply_updates(params, updates)
            trained_stats = layout.trained(state.batch_stats)
            batch_stats = state.batch_stats | update_statistics(trained_stats, moments, config.model.norm_momentum)
        return state._replace(params=params, batch_stats=batch_stats, opt_state=opt_state), metrics

    return step


def step_gradient(config: Config, layout: StateLayout, *, pixel_stats: PixelStats, accumulation: int = 1) -> Callable[..., Any]:
    """f(state, batch, seed, images=None, constants=None, sent=None): `mean_gradient` with the modes of a config.

    It is called inside `shard_map`.

    With `reduce.update sharded` each device gets its shard of the gradient. If the batch holds "requests", aux returns them, to
    be reduced with the metrics. accumulation: micro-batches of one device. images: all training images, uint8 [N, H, W, 3], if
    the batch holds "indices" in place of "images". constants: of a registered task. sent: for an audit, a list that receives
    (tree, buckets) of every reduction.
    """
    reduce, is_scaled, gather_params = config.reduce, config.optimizer.loss_scale != "none", layout.params_gatherer()
    options: dict[str, Any] = {
        "wire_dtype": allreduce.wire_dtype_of(reduce),
        "bucket_bytes": reduce.bucket_bytes,
        "sharded": reduce.update == "sharded",
    }

    def gradient(
        state: TrainState,
        batch: Batch,
        seed: ArrayLike,
        *,
        images: jax.Array | None = None,
        constants: Any = None,
        sent: list | None = None,
    ) -> tuple[dict, dict]:
        devices = lax.axis_size(AXES)
        divisor = devices if is_scaled else 1
        overlap = Overlap(reduce.strategy, **options, divisor=divisor, sent=sent)

        def all_reduce(share: dict) -> dict:
            if reduce.overlap:
                return overlap.wait_all() if accumulation == 1 else overlap.reduce(share, layout.network.segments)
            return allreduce.reduce_tree(allreduce.divide(share, divisor), reduce.strategy, **options, sent=sent)

        def mean(aux: dict) -> dict:
            share = allreduce.divide(allreduce.varying(aux), devices)
            return allreduce.reduce_tree(share, reduce.strategy, bucket_bytes=None, sent=sent)

        def local(loss: Loss) -> Gradient:
            if reduce.overlap and accumulation == 1:
                found = overlapped_gradient(config, layout, loss, pixel_stats=pixel_stats, overlap=overlap)
            else:
                found = local_gradient(config, layout, loss, pixel_stats=pixel_stats)
            if images is not None:
                found = with_resident_images(found, images)
            if accumulation > 1:
                found = with_micro_batches(found, accumulation)
            if layout.sharded:
                return lambda state, batch, seed: found(state._replace(params=gather_params(state.params)), batch, seed)
            return found

        local_gradient_of: LocalGradient = local
        if divides_by_class_weights(config):
            local_gradient_of = partial(with_class_weights, config, local_gradient_of, mean=mean)
        if is_scaled:
            local_gradient_of = partial(with_loss_scale, local_gradient_of)
        loss = partial(mean_loss, config, constants=constants)
        found = mean_gradient(with_requests(local_gradient_of(loss)), all_reduce, mean)
        return (with_unscaled_gradient(found) if is_scaled else found)(state, batch, seed)

    return gradient


def without_reduction(config: Config) -> Config:
    """The config of a step that sends no gradients."""
    reduction: dict[str, Any] = {"strategy": allreduce.no_reduce, "update": "replicated"}  # a function, which no file can name
    return dataclasses.replace(config, reduce=dataclasses.replace(config.reduce, overlap=False, **reduction))


def make_layout(config: Config, model: Network, mesh: Mesh | AbstractMesh) -> StateLayout:
    """Where the state of a config is between two steps. On one device there is nothing to shard."""
    if config.reduce.update == "sharded" and mesh.size > 1:
        from jaxdp.training.modes.sharded_update import Sharded

        return Sharded(config, model, mesh)
    return StateLayout(config, model, mesh)


def make_train_step(
    config: Config,
    model: Network,
    mesh: Mesh | AbstractMesh,
    *,
    pixel_stats: PixelStats,
    accumulation: int = 1,
    resident: bool = False,
) -> jax.stages.Wrapped:
    """step(state, batch, hyperparameters) -> (state, metrics), jitted; the state is donated.

    config: its augmentation, loss, optimizer and reduction are used. model: `jaxdp.models.create(config.model)`.
    pixel_stats: mean and standard deviation of pixels, 0 to 255, with which images are normalized.
    state: of `jaxdp.create_state`, or as `make_layout(config, model, mesh)` places it.
    batch: {"images" [B, H, W, 3] uint8, "labels" [B] int32, "positions" [B] uint32}, rows sharded over all devices. With
    `resident` it has "indices" [B] int32 in place of "images", and all training images, uint8 [N, H, W, 3], are the fourth
    argument. hyperparameters: {"learning_rate", "momentum"}, float32 scalars, and {"seed"}, a uint32 scalar that draws the
    augmentation; all can change without a new compilation. {"constants"} of a registered task are there, too. accumulation:
    micro-batches of one device.
    The batch may also hold "requests" (see `jaxdp.training.request_flags`); their maximum is then the metric "request".

    metrics: float32 scalars {"loss", "accuracy", "gradient_norm"} of this batch before the update; with loss scaling
    {"loss_scale"}; with loss scaling or `guard.non_finite=skip` also {"skipped_steps", "skipped_in_a_row"}. A step whose
    loss or gradient is not finite then leaves the state unchanged but for these counters and the loss scale.
    """
    if mesh.size == 1:  # without communication; XLA would copy the gradient nevertheless
        config = without_reduction(config)
    layout = make_layout(config, model, mesh)
    gradients = step_gradient(config, layout, pixel_stats=pixel_stats, accumulation=accumulation)

    def step(  # noqa: PLR0917 - shard_map passes arguments by position
        state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array], images: jax.Array | None = None
    ) -> tuple[TrainState, Metrics]:
        constants = hyperparameters.get("constants")
        gradient: Gradient = partial(gradients, images=images, constants=constants)
        if mesh.size == 1:
            gradient = with_row_major_gradient(gradient)
        device_step = with_update(config, layout, gradient)
        if config.optimizer.average_decay is not None:
            device_step = with_average(device_step, config, layout)
        if skips_steps(config):
            device_step = with_skipped_steps(device_step, config)
        return with_request_metric(device_step)(state, batch, hyperparameters)

    replicated, rows, state_specs = PartitionSpec(), PartitionSpec(AXES), layout.specs
    in_specs = (state_specs, rows, replicated) + (replicated,) * resident
    check_vma = allreduce.check_vma(config.reduce.strategy)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(state_specs, replicated), check_vma=check_vma)
    return jax.jit(mapped, donate_argnums=0)
