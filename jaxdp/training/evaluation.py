"""Exact evaluation: every held-out example is counted once, whatever the batch and the number of devices."""

from collections import deque
from concurrent.futures import Future
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.config import Config
from jaxdp.data import feed
from jaxdp.data.augment import for_evaluation, normalise
from jaxdp.losses import cross_entropy, rank_of_label
from jaxdp.parallel.mesh import AXES
from jaxdp.training.guard import TrainingError


def make_evaluation_step(config: Config, model, pixels, mesh):
    """step(params, batch_stats, batch) -> (sums over the batch's real rows: top1, top5, examples, seen (int32), positions
    (uint32, modulo 2^32) and loss (float32); the class predicted for each row, [B] int32, spread over the devices).

    batch: {"images" [B, H, W, 3] uint8, "labels" [B] int32, "positions" [B] uint32, "seen" [B] int32, 1 for an
    example and 0 for padding, "weights" [B] int32, 0 too for an example that is left out}.
    The loss is plain cross entropy, without label smoothing. A tie counts against the model: the class predicted is then
    another than the label.
    """

    def step(params, batch_stats, batch):
        logits = _logits(config, model, pixels, params, batch_stats, batch)
        weights, labels, rank = batch["weights"], batch["labels"], rank_of_label(logits, batch["labels"])
        losses = jnp.where(weights > 0, cross_entropy(logits, labels), 0.0)
        others = jnp.where(jnp.arange(logits.shape[-1]) == labels[:, None], -jnp.inf, logits)
        predicted = jnp.where(rank < 1, labels, others.argmax(-1).astype(jnp.int32))
        sums = {
            "top1": jnp.sum(weights * (rank < 1)),
            "top5": jnp.sum(weights * (rank < 5)),
            "examples": jnp.sum(weights),
            "seen": jnp.sum(batch["seen"]),
            "positions": jnp.sum(jnp.where(batch["seen"] > 0, batch["positions"], 0), dtype=jnp.uint32),
            "loss": jnp.sum(losses),
        }
        return lax.psum(sums, AXES), predicted

    everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(everywhere, everywhere, rows), out_specs=(everywhere, rows))
    return jax.jit(mapped)


def make_prediction_step(config: Config, model, pixels, mesh, top: int):
    """step(params, batch_stats, batch) -> (classes int32, probabilities float32), [B, top] each, the likeliest first.

    batch: as for `make_evaluation_step`. Of equally likely classes the one of the lower number comes first.
    """

    def step(params, batch_stats, batch):
        logits = _logits(config, model, pixels, params, batch_stats, batch).astype(jnp.float32)
        found, classes = lax.top_k(logits, top)
        return classes, jnp.exp(found - jax.nn.logsumexp(logits, axis=-1, keepdims=True))

    everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(everywhere, everywhere, rows), out_specs=rows)
    return jax.jit(mapped)


def _logits(config: Config, model, pixels, params, batch_stats, batch):
    logits, _ = model.apply(params, batch_stats, normalise(for_evaluation(config, batch["images"]), *pixels), train=False)
    return logits


def evaluate(
    step, params, batch_stats, source, batch: tuple[int, int], mesh, between=lambda: None, result=Future.result, look=None
) -> dict:
    """{"eval_accuracy", "eval_top5", "eval_loss", "eval_examples"} over the whole source, accuracies in [0, 1].

    batch: (images a step counts, rows of its batch, which the devices divide). between: called before every batch; result: how
    to wait for a future. look: to see single predictions, called with this process's rows of every batch (see
    `feed.evaluation_batch`); it returns a function that is called with the classes predicted for them, int32 [R]. Raises
    TrainingError if the examples counted on the devices are not those of the source, by their number and by the sum of their
    positions.
    """
    totals = {"top1": 0, "top5": 0, "examples": 0, "seen": 0, "positions": 0, "loss": 0.0}
    pending = deque()

    def add_oldest():
        (sums, predicted), tell = pending.popleft()
        for name, value in jax.device_get(sums).items():
            totals[name] += value.item()
        if tell:
            tell(_of_this_process(predicted))

    images, rows = batch
    here = feed.rows_here(mesh, rows)
    load = partial(feed.evaluation_batch, source, images, here)
    starts = range(0, len(source), images)
    ahead = feed.Ahead(load, starts, threads=1)
    try:
        for _ in starts:
            between()
            part = ahead.next(result)
            tell = look(part) if look else None
            pending.append((step(params, batch_stats, feed.put(part, mesh)), tell))
            if len(pending) > 2:  # no more batches than this wait on the devices
                add_oldest()
    finally:
        ahead.close()
    while pending:
        add_oldest()
    expected = len(source) * (len(source) - 1) // 2
    if totals["seen"] != len(source) or (totals["positions"] - expected) % 2**32:
        raise TrainingError(
            f"evaluation counted {totals['seen']} examples and the source has {len(source)}, or some were counted twice: "
            "the accuracy would be wrong; make sure that nothing changes the data during the run"
        )
    count = totals["examples"]
    if count == 0:
        raise TrainingError("no evaluation image can be used")
    return {
        "eval_accuracy": totals["top1"] / count,
        "eval_top5": totals["top5"] / count,
        "eval_loss": totals["loss"] / count,
        "eval_examples": count,
    }


def _of_this_process(rows) -> np.ndarray:
    """The rows of a batch that this process's devices hold, in their order."""
    shards = sorted(rows.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


class Confusion:
    """Counts of images by label and predicted class, int64 [classes, classes]: to be given to `evaluate` as `look`."""

    def __init__(self, classes: int):
        self.counts = np.zeros((classes, classes), np.int64)

    def __call__(self, part: dict):
        labels, weights = part["labels"], part["weights"]
        return lambda predicted: np.add.at(self.counts, (labels, predicted), weights)


class Examples:
    """A few of the held-out images, spread evenly over all of them, with what the network takes them for: a `look`."""

    def __init__(self, total: int, most: int = 16):
        self.wanted = np.unique(np.linspace(0, total - 1, min(most, total)).round().astype(np.int64))
        self.found = {}

    def __call__(self, part: dict):
        rows = np.flatnonzero(np.isin(part["positions"], self.wanted) & (part["weights"] > 0))
        positions, images, labels = (part[name][rows].copy() for name in ("positions", "images", "labels"))

        def tell(predicted):
            for place, row in enumerate(rows):
                self.found[int(positions[place])] = images[place], labels[place], predicted[row]

        return tell if len(rows) else None

    def arrays(self) -> list[np.ndarray]:
        """[images uint8 [E, H, W, 3], labels int32 [E], predicted classes int32 [E]], in the order of the images."""
        return [np.array(column) for column in zip(*(self.found[position] for position in sorted(self.found)), strict=True)]
