"""The training step: one `jit(shard_map)` over the mesh, a pure function of (state, batch, hyperparameters)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.config import Config, skips_steps
from jaxdp.data.augment import augment, mix, normalise
from jaxdp.losses import cross_entropy, rank_of_label
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES
from jaxdp.parallel.overlap import Overlap
from jaxdp.training import loss_scale
from jaxdp.training.state import TrainState, build_optimizer

HYPERPARAMETERS = ("learning_rate", "momentum")


def _varying(tree):
    """The same values, marked as one device's own, so that differentiation adds no reduction of its own."""
    return lax.pcast(tree, AXES, to="varying")


def local_gradient(config: Config, model, pixels, params, batch_stats, scale, batch, overlap: Overlap | None = None):
    """Gradient of the trained parts and sums of one worker's batch on its own device, not yet combined with any other.

    The gradient is that of `scale` times the loss. params must be varying. overlap: where the gradient of each part is sent as
    soon as it is known; it then holds them, and the gradient returned is empty. Returns (gradient, {"moments", "loss",
    "correct"}), loss and share of right answers being means.
    """
    labels, smoothing = batch["labels"], config.optimizer.label_smoothing
    with jax.named_scope("augmentation"):
        x, share = normalise(augment(config, batch["images"], batch["positions"]), *pixels), None
        if config.data.mix != "none":
            x, partner, share = mix(config, x, batch["positions"])

    def loss_of(logits):
        loss = cross_entropy(logits, labels, smoothing)
        if share is not None:
            loss = share * loss + (1 - share) * cross_entropy(logits, labels[partner], smoothing)
        return loss.mean()

    pulls, moments = [], {}
    frozen, trained = model.divided(config.finetune.frozen_stages)
    with jax.named_scope("forward"):
        for part in frozen:
            x, _ = model.apply_part(part, {name: params[name] for name in part}, batch_stats, x, train=False)
        for place, part in enumerate(trained):
            own, ends = {name: params[name] for name in part}, bool(frozen) and place == 0

            def run(own, x, part=part, ends=ends):
                return model.apply_part(part, own, batch_stats, lax.stop_gradient(x) if ends else x)

            x, pull, found = jax.vjp(run, own, x, has_aux=True)
            pulls.append(pull)
            moments |= found
        loss, pull = jax.vjp(loss_of, x)
        correct = (rank_of_label(x, labels) == 0).mean(dtype=jnp.float32)
    with jax.named_scope("backward"):
        (cotangent,) = pull(jnp.ones_like(loss) * scale)
    gradient = {}
    for pull in reversed(pulls):
        with jax.named_scope("backward"):
            own, cotangent = pull(cotangent)
        if overlap:
            cotangent = overlap.passed(cotangent, own)
        else:
            gradient |= own
    return gradient, {"moments": moments, "loss": loss, "correct": correct}


def accumulated(gradient_of, batch, count: int):
    """The mean over `count` micro-batches of what `gradient_of` returns for each, added up by `lax.scan`."""
    if count == 1:
        return gradient_of(batch)
    micro = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
    first = jax.tree.map(lambda x: x[0], micro)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(gradient_of, first))

    def add(total, part):
        return jax.tree.map(jnp.add, total, gradient_of(part)), None

    total, _ = lax.scan(add, _varying(zeros), micro)
    return jax.tree.map(lambda x: x / count, total)


def gradient_and_report(config: Config, model, pixels, accumulation: int, params, batch_stats, batch, scale=1.0, images=None):
    """The mean gradient and report over all workers, the same on every device. Call inside `shard_map`.

    The loss is multiplied by `scale` before differentiation and the gradient divided by it after it has travelled. images: all
    training images, where the batch has their numbers in place of them.
    """
    varying = _varying(params)
    # The gradient of the mean loss is the sum of all devices' parts of it. With loss scaling they are divided only after the
    # backward pass, of which the scale uses the whole range.
    scaling = config.loss_scale.name != "none"
    part = scale if scaling else scale / lax.axis_size(AXES)

    def gradient_of(batch):
        if images is not None:
            batch = batch | {"images": jnp.take(images, batch["numbers"], axis=0)}
        return local_gradient(config, model, pixels, varying, batch_stats, part, batch, overlap if accumulation == 1 else None)

    wire = None if config.reduce.wire_dtype == "float32" else jnp.dtype(config.reduce.wire_dtype)
    how = config.reduce.strategy, wire, config.reduce.bucket_bytes
    divisor = lax.axis_size(AXES) if scaling else 1
    overlap = Overlap(*how, divisor) if config.reduce.overlap else None
    gradient, report = accumulated(gradient_of, batch, accumulation)
    if overlap:
        _, trained = model.divided(config.finetune.frozen_stages)
        for part in reversed(trained) if gradient else ():  # of several micro-batches, of which nothing was sent yet
            overlap.passed((), {name: gradient[name] for name in part})
        gradient = overlap.arrived()
    else:
        gradient = allreduce.total(allreduce.divided(gradient, divisor), *how)
    if scaling:
        gradient = jax.tree.map(lambda g: g / scale, gradient)
    return gradient, allreduce.mean(report, config.reduce.strategy, bucket_bytes=None)


def update_statistics(batch_stats, moments, decay: float):
    """One moving-average update from the moments of all workers: var = mean of squares - mean^2, after averaging."""

    def update(stats, new):
        if "mean" not in stats:
            return {name: update(stats[name], new[name]) for name in stats}
        variance = jnp.maximum(new["square"] - new["mean"] ** 2, 0.0)
        return {
            "mean": decay * stats["mean"] + (1 - decay) * new["mean"],
            "var": decay * stats["var"] + (1 - decay) * variance,
        }

    return update(batch_stats, moments)


def make_train_step(config: Config, model, pixels, mesh, accumulation: int, resident: bool = False):
    """step(state, batch, hyperparameters) -> (state, metrics), compiled once for a batch size; the state is donated.

    pixels: (mean, std) of the pixels, for normalisation. batch: {"images" [B, H, W, 3] uint8, "labels" [B] int32,
    "positions" [B] uint32}, rows over all devices; with `resident` "numbers" [B] int32 in place of the images, and all images,
    uint8 [N, H, W, 3], as a fourth argument. hyperparameters: {"learning_rate", "momentum"}, float32 scalars, and {"seed"},
    uint32, which draws the augmentation in place of the config's: another seed is the same program.
    metrics: {"loss", "accuracy", "gradient_norm"}, float32 scalars of this step's batch before the update, and with loss
    scaling {"loss_scale"}; with it or where the guard skips {"skipped_steps", "skipped_in_a_row"}: a step whose gradient is
    not finite then changes nothing.
    """
    if mesh.size == 1:  # nobody to exchange with, and XLA would copy the gradient all the same
        alone = dataclasses.replace(config.reduce, strategy=allreduce.local, overlap=False)
        config = dataclasses.replace(config, reduce=alone)
    scaling, skipping = config.loss_scale.name != "none", skips_steps(config)
    trained = partial(model.trained, frozen_stages=config.finetune.frozen_stages)
    statistics_decay = 0.0 if config.model.statistics == "last_batch" else config.model.norm_momentum

    def updated(state: TrainState, gradient, moments, hyperparameters):
        optimizer = build_optimizer(config, model, *(hyperparameters[name] for name in HYPERPARAMETERS))
        params = trained(state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, params)
        params = optax.apply_updates(params, updates)
        statistics = update_statistics(trained(state.batch_stats), moments, statistics_decay)
        average = state.average
        if config.optimizer.average_decay is not None:
            average = average.include(params, statistics, config.optimizer.average_decay)
        return TrainState(state.params | params, state.batch_stats | statistics, opt_state, average, state.loss_scale)

    def step(state: TrainState, batch, hyperparameters, images=None):
        seeded = dataclasses.replace(config, seed=hyperparameters["seed"])
        scale = state.loss_scale.scale if scaling else 1.0
        gradient, report = gradient_and_report(
            seeded, model, pixels, accumulation, state.params, state.batch_stats, batch, scale, images
        )
        with jax.named_scope("gradient_norm"):
            norm = optax.tree.norm(gradient)
        metrics = {"loss": report["loss"], "accuracy": report["correct"], "gradient_norm": norm}
        with jax.named_scope("optimizer"):
            new = updated(state, gradient, report["moments"], hyperparameters)
        if skipping:
            finite = jnp.isfinite(norm) & jnp.isfinite(report["loss"])
            new = jax.tree.map(partial(jnp.where, finite), new, state)
            new = new._replace(loss_scale=loss_scale.update(config.loss_scale, state.loss_scale, finite))
            metrics |= {"loss_scale": scale} if scaling else {}
            metrics |= {
                "skipped_steps": new.loss_scale.skipped,
                "skipped_in_a_row": new.loss_scale.in_a_row,
            }
        return new, metrics

    everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
    proven = allreduce.proves_replication(config.reduce.strategy)
    specs = (everywhere, rows, everywhere) + (everywhere,) * resident
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=proven)
    return jax.jit(mapped, donate_argnums=0)
