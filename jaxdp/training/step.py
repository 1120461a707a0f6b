"""The training step: one `jit(shard_map)` over the mesh, a pure function of (state, batch, hyperparameters).

From the inside out: `local_gradient` differentiates the loss on one device, `compute_gradients` averages over micro-batches and
devices, `step_gradients` applies it to a placed state, `make_train_step` adds the update of the state and compiles the whole.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxdp.choices import LOSSES
from jaxdp.config import Config, skips_steps
from jaxdp.data.augment import MODEL_KEY, PixelStat, augment, image_keys, mix, normalize, worker_key
from jaxdp.data.policies import change_pixels, erase
from jaxdp.losses import label_weights, rank_of_label
from jaxdp.network import Network
from jaxdp.optim import loss_scale
from jaxdp.optim.squares import Squares, norm
from jaxdp.parallel import allreduce
from jaxdp.parallel.allreduce import Overlap
from jaxdp.parallel.mesh import AXES
from jaxdp.training import request_flags
from jaxdp.training.state import Placement, TrainState, make_optimizer, make_placement, with_seed

HYPERPARAMETERS = ("learning_rate", "momentum")

Batch = dict[str, jax.Array]
PixelStats = tuple[PixelStat, PixelStat]  # mean and standard deviation, on the 0-255 scale


def local_gradient(
    config: Config,
    model: Network,
    params: dict,
    *,
    batch_stats: dict,
    batch: Batch,
    pixel_stats: PixelStats,
    scale: float | jax.Array,
    label_weight: jax.Array | None = None,
    overlap: Overlap | None = None,
) -> tuple[dict, dict]:
    """Gradient of `scale` times the mean loss over one micro-batch, on one device and before any reduction.

    params: varying over the mesh. label_weight: divides the loss, if given. overlap: receives the gradient of every segment as
    soon as it is computed; the gradient returned is then empty. Returns (gradient of the trainable parameters, aux); aux:
    {"loss" and "accuracy", means over the micro-batch, "moments" for the running statistics}.
    """
    labels, mixed_labels = batch["labels"], None
    with jax.named_scope("augmentation"):
        x = augment(config, batch["images"], batch["positions"])
        x = change_pixels(config, x, batch["positions"], mean=pixel_stats[0])
        x = erase(config, normalize(x, *pixel_stats), batch["positions"])
        if config.data.mix != "none":
            x, partner, share = mix(config, x, batch["positions"])
            mixed_labels = labels[partner], share

    def mean_loss(logits: jax.Array) -> jax.Array:
        loss = LOSSES.implementation(config.optimizer.loss)(config.optimizer, logits, labels, mix=mixed_labels).mean()
        return loss if label_weight is None else loss / label_weight

    keys = image_keys if model.draws_for_each_image else worker_key
    key = keys(config.seed, batch["positions"], MODEL_KEY)
    vjp_fns: list[Callable] = []
    moments: dict[str, Any] = {}
    frozen, trainable = model.split_frozen(config.finetune.frozen_stages)
    with jax.named_scope("forward"):
        for segment in frozen:
            x, _ = model.apply_segment(_select(params, segment), batch_stats, x, segment=segment, train=False)
        for index, segment in enumerate(trainable):
            stop_gradient = bool(frozen) and index == 0  # nothing before this segment is trained

            def forward(
                segment_params: dict, x: jax.Array, *, segment: tuple[str, ...] = segment, stop_gradient: bool = stop_gradient
            ) -> tuple[jax.Array, dict]:
                x = lax.stop_gradient(x) if stop_gradient else x
                return model.apply_segment(segment_params, batch_stats, x, segment=segment, key=key)

            x, vjp_fn, segment_moments = jax.vjp(forward, _select(params, segment), x, has_aux=True)
            vjp_fns.append(vjp_fn)
            moments |= segment_moments
        loss, loss_vjp_fn = jax.vjp(mean_loss, x)
        accuracy = (rank_of_label(x, labels) == 0).mean(dtype=jnp.float32)
    with jax.named_scope("backward"):
        (cotangent,) = loss_vjp_fn(jnp.ones_like(loss) * scale)
    gradient: dict[str, Any] = {}
    for vjp_fn in reversed(vjp_fns):
        with jax.named_scope("backward"):
            segment_gradient, cotangent = vjp_fn(cotangent)
        if overlap:
            cotangent = overlap.enqueue(cotangent, segment_gradient)
        else:
            gradient |= segment_gradient
    return gradient, {"moments": moments, "loss": loss, "accuracy": accuracy}


def _select(params: dict, segment: Sequence[str]) -> dict:
    return {name: params[name] for name in segment}


def accumulate_gradients(gradient_of: Callable[[Batch], Any], batch: Batch, count: int) -> Any:
    """Mean over `count` equal micro-batches of what `gradient_of` returns for each, summed by `lax.scan`."""
    if count == 1:
        return gradient_of(batch)
    micro_batches = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
    shapes = jax.eval_shape(gradient_of, jax.tree.map(lambda x: x[0], micro_batches))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(total: Any, micro_batch: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient_of(micro_batch)), None

    total, _ = lax.scan(add, allreduce.varying(zeros), micro_batches)
    return jax.tree.map(lambda x: x / count, total)


def compute_gradients(
    config: Config,
    model: Network,
    params: dict,
    *,
    batch_stats: dict,
    batch: Batch,
    pixel_stats: PixelStats,
    accumulation: int = 1,
    scale: float | jax.Array = 1.0,
    images: jax.Array | None = None,
    reductions: list | None = None,
) -> tuple[dict, dict]:
    """Mean gradient and aux (see `local_gradient`) over all workers, equal on every device. Call inside `shard_map`.

    With `reduce.update sharded` each device gets its shard of the gradient. params: whole on every device.
    The loss is multiplied by `scale` before differentiation, and the gradient divided by it after the reduction. The mean class
    weight of the global batch divides the loss before, so that a factor of all weights cancels. images: all training images,
    uint8 [N, H, W, 3], if the batch holds "indices" in place of "images". reductions: a list to which (tree, buckets) of every
    reduction is appended, for an audit. If the batch holds "requests", so does aux: see `request_flags.as_flags`.
    """
    varying, batch = allreduce.varying(params), dict(batch)
    own_requests = batch.pop(request_flags.BATCH_KEY, None)
    # The gradient of the mean loss is the sum over devices of gradients that are divided by their number. Loss scaling divides
    # after the backward pass, so that the scaled backward pass uses the full range of float16.
    scaled = config.optimizer.loss_scale != "none"
    local_scale = scale if scaled else scale / lax.axis_size(AXES)
    divisor = lax.axis_size(AXES) if scaled else 1
    strategy, wire_dtype = config.reduce.strategy, allreduce.wire_dtype_of(config.reduce)
    bucket_bytes, sharded, overlap = config.reduce.bucket_bytes, config.reduce.update == "sharded", None
    if config.reduce.overlap:
        overlap = Overlap(strategy, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, divisor=divisor, sharded=sharded)

    def mean(tree: Any) -> Any:
        local = allreduce.divide(allreduce.varying(tree), lax.axis_size(AXES))
        return allreduce.reduce_tree(local, strategy, bucket_bytes=None, sent=reductions)

    weights = label_weights(config.optimizer, batch["labels"], mixed=config.data.mix != "none")
    label_weight = None if weights is None else mean({"label_weight": weights.mean()})["label_weight"]

    def gradient_of(batch: Batch) -> tuple[dict, dict]:
        if images is not None:
            batch = batch | {"images": jnp.take(images, batch["indices"], axis=0)}
        return local_gradient(
            config,
            model,
            varying,
            batch_stats=batch_stats,
            batch=batch,
            pixel_stats=pixel_stats,
            scale=local_scale,
            label_weight=label_weight,
            overlap=overlap if accumulation == 1 else None,
        )

    gradient, aux = accumulate_gradients(gradient_of, batch, accumulation)
    if overlap:
        _, trainable = model.split_frozen(config.finetune.frozen_stages)
        for segment in reversed(trainable) if gradient else ():  # accumulated: no segment was enqueued yet
            overlap.enqueue((), _select(gradient, segment))
        gradient = overlap.wait_all()
        if reductions is not None:
            reductions += overlap.sent
    else:
        gradient = allreduce.divide(gradient, divisor)
        gradient = allreduce.reduce_tree(
            gradient, strategy, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, sharded=sharded, sent=reductions
        )
    if scaled:
        gradient = jax.tree.map(lambda g: g / scale, gradient)
    if own_requests is not None:
        aux |= {request_flags.BATCH_KEY: request_flags.as_flags(own_requests)}
    # With synchronized batch normalization the moments are equal on all devices.
    return gradient, mean(aux)


def update_statistics(batch_stats: dict, moments: dict, decay: float) -> dict:
    """One moving-average update of the running statistics from the moments of all workers.

    The variance is the mean of squares minus the squared mean, both averaged over workers first.
    """

    def update(stats: dict, new: dict) -> dict:
        if "mean" not in stats:
            return {name: update(stats[name], new[name]) for name in stats}
        variance = jnp.maximum(new["square"] - new["mean"] ** 2, 0.0)
        return {
            "mean": decay * stats["mean"] + (1 - decay) * new["mean"],
            "var": decay * stats["var"] + (1 - decay) * variance,
        }

    return update(batch_stats, moments)


def step_gradients(
    config: Config, placement: Placement, *, pixel_stats: PixelStats, accumulation: int
) -> Callable[..., tuple[dict, dict]]:
    """f(state, batch, seed, images=images or None): `compute_gradients` of a placed state, for a step and what reads it."""
    gather_params = placement.params_gatherer()

    def gradients(state: TrainState, batch: Batch, seed: jax.Array, **others: Any) -> tuple[dict, dict]:
        return compute_gradients(
            with_seed(config, seed),
            placement.model,
            gather_params(state.params),
            batch_stats=state.batch_stats,
            batch=batch,
            pixel_stats=pixel_stats,
            accumulation=accumulation,
            scale=state.loss_scale.scale if config.optimizer.loss_scale != "none" else 1.0,
            **others,
        )

    return gradients


def without_reduction(config: Config) -> Config:
    """The config with a step that sends no gradients."""
    reduction: dict[str, Any] = {"strategy": allreduce.no_reduce, "update": "replicated"}  # a function, which no file can name
    return dataclasses.replace(config, reduce=dataclasses.replace(config.reduce, overlap=False, **reduction))


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

    config: its augmentation, loss, optimizer and reduction are those of the step. model: `jaxdp.models.create(config.model)`.
    pixel_stats: mean and standard deviation of pixels, 0 to 255, with which images are normalized.
    state: of `jaxdp.create_state`, or as `make_placement(config, model, mesh)` places it.
    batch: {"images" [B, H, W, 3] uint8, "labels" [B] int32, "positions" [B] uint32}, rows sharded over all devices. With
    `resident` it has "indices" [B] int32 in place of "images", and all training images, uint8 [N, H, W, 3], are the fourth
    argument. hyperparameters: {"learning_rate", "momentum"}, float32 scalars, and {"seed"}, a uint32 scalar that draws the
    augmentation; all can change without a new compilation. accumulation: micro-batches of one device.
    The batch may also hold "requests" (see `jaxdp.training.request_flags`); their maximum is then the metric "request".

    metrics: float32 scalars {"loss", "accuracy", "gradient_norm"} of this batch before the update; with loss scaling
    {"loss_scale"}; with loss scaling or `guard.non_finite=skip` also {"skipped_steps", "skipped_in_a_row"}. A step whose
    loss or gradient is not finite then leaves the state unchanged but for these counters and the loss scale.
    """
    if mesh.size == 1:  # without communication; XLA would copy the gradient nevertheless
        config = without_reduction(config)
    trainable = partial(model.trainable, frozen_stages=config.finetune.frozen_stages)
    placement = make_placement(config, model, mesh)
    gradients = step_gradients(config, placement, pixel_stats=pixel_stats, accumulation=accumulation)

    def update(state: TrainState, gradient: dict, *, squares: Squares, moments: dict, hyperparameters: dict) -> TrainState:
        optimizer = make_optimizer(config, model, **{name: hyperparameters[name] for name in HYPERPARAMETERS})
        params = trainable(state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, params, squares=squares)
        params = optax.apply_updates(params, updates)
        statistics = update_statistics(trainable(state.batch_stats), moments, config.model.norm_momentum)
        average = state.average
        if config.optimizer.average_decay is not None:
            average = average.include(params, statistics, config.optimizer)
        return TrainState(state.params | params, state.batch_stats | statistics, opt_state, average, state.loss_scale)

    def step(  # noqa: PLR0917 - shard_map passes arguments by position
        state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array], images: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        gradient, aux = gradients(state, batch, hyperparameters["seed"], images=images)
        with jax.named_scope("gradient_norm"):
            squares = placement.squares(gradient, trainable(state.params))
            gradient_norm = norm(squares.gradient)
        metrics = {"loss": aux["loss"], "accuracy": aux["accuracy"], "gradient_norm": gradient_norm}
        if request_flags.BATCH_KEY in aux:
            metrics["request"] = request_flags.from_total(aux[request_flags.BATCH_KEY])
        with jax.named_scope("optimizer"):
            new_state = update(state, gradient, squares=squares, moments=aux["moments"], hyperparameters=hyperparameters)
        if skips_steps(config):
            finite = jnp.isfinite(gradient_norm) & jnp.isfinite(aux["loss"])
            new_state = jax.tree.map(partial(jnp.where, finite), new_state, state)
            new_state = new_state._replace(loss_scale=loss_scale.update(config.optimizer.loss_scale, state.loss_scale, finite))
            metrics |= {"loss_scale": state.loss_scale.scale} if config.optimizer.loss_scale != "none" else {}
            metrics |= {
                "skipped_steps": new_state.loss_scale.skipped,
                "skipped_in_a_row": new_state.loss_scale.consecutive_skips,
            }
        return new_state, metrics

    replicated, rows, state_specs = PartitionSpec(), PartitionSpec(AXES), placement.specs
    in_specs = (state_specs, rows, replicated) + (replicated,) * resident
    check_vma = allreduce.check_vma(config.reduce.strategy)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(state_specs, replicated), check_vma=check_vma)
    return jax.jit(mapped, donate_argnums=0)
