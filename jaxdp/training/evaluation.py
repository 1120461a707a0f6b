"""Exact evaluation: every held-out example is counted once, whatever the batch and the number of devices."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.config import Config
from jaxdp.data import feed
from jaxdp.data.augment import normalise
from jaxdp.losses import cross_entropy, rank_of_label
from jaxdp.parallel.mesh import AXES


def make_evaluation_step(config: Config, model, pixels, mesh):
    """step(params, batch_stats, batch) -> sums over the batch's real rows: top1, top5, examples (int32), loss (float32).

    batch: {"images" [B, H, W, 3] uint8, "labels" [B] int32, "weights" [B] int32, 1 for a real row and 0 for padding}.
    The loss is plain cross entropy, without label smoothing.
    """

    def step(params, batch_stats, batch):
        logits, _ = model.apply(params, batch_stats, normalise(batch["images"], *pixels), train=False)
        weights, rank = batch["weights"], rank_of_label(logits, batch["labels"])
        losses = jnp.where(weights > 0, cross_entropy(logits, batch["labels"]), 0.0)
        sums = {
            "top1": jnp.sum(weights * (rank < 1)),
            "top5": jnp.sum(weights * (rank < 5)),
            "examples": jnp.sum(weights),
            "loss": jnp.sum(losses),
        }
        return lax.psum(sums, AXES)

    everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(everywhere, everywhere, rows), out_specs=everywhere)
    return jax.jit(mapped)


def evaluate(step, params, batch_stats, source, batch: tuple[int, int], mesh) -> dict:
    """{"accuracy", "top5", "loss", "eval_examples"} over the whole source; accuracies are shares in [0, 1].

    batch: (images a step counts, rows of its batch, which the devices divide). Raises RuntimeError if the examples counted on the devices are not exactly those of the source.
    """
    pending = [
        step(params, batch_stats, feed.put(host_batch, mesh)) for host_batch in feed.evaluation_batches(source, *batch)
    ]
    totals = {"top1": 0, "top5": 0, "examples": 0, "loss": 0.0}
    for sums in jax.device_get(pending):
        for name, value in sums.items():
            totals[name] += value.item()
    if totals["examples"] != len(source):
        raise RuntimeError(f"evaluation counted {totals['examples']} examples, the source has {len(source)}")
    count = totals["examples"]
    return {
        "accuracy": totals["top1"] / count,
        "top5": totals["top5"] / count,
        "loss": totals["loss"] / count,
        "eval_examples": count,
    }
