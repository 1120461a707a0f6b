"""The compiled evaluation step, and the loop that feeds it: every held-out image counts once, on any number of devices."""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxdp.choices import LOSSES
from jaxdp.config import TOP5_CLASSES, Config
from jaxdp.data import prefetch
from jaxdp.data.augment import normalize, resize_for_evaluation
from jaxdp.distributed import status
from jaxdp.errors import TrainingError
from jaxdp.losses import rank_of_label
from jaxdp.network import Network
from jaxdp.parallel.mesh import AXES
from jaxdp.training import request_flags
from jaxdp.training.objective import Batch, PixelStats

# Called with this process's rows of a batch before they are evaluated; returns a function of the classes predicted for them.
Observer = Callable[[dict[str, np.ndarray]], Callable[[np.ndarray], Any] | None]


def make_evaluation_step(config: Config, model: Network, mesh: Mesh, *, pixel_stats: PixelStats) -> jax.stages.Wrapped:
    """step(params, batch_stats, batch) -> (sums, predicted), jitted.

    batch: {"images" [B, H, W, 3] uint8, "labels" [B] int32, "positions" [B] uint32, "seen" [B] int32, 1 for an example and 0
    for padding, "weights" [B] int32, 0 also for examples that do not count}. sums: over the examples of all devices, {"top1",
    "top5" (only with six classes or more), "examples", "seen"} int32, {"positions"} uint32 modulo 2^32, {"loss"} float32.
    predicted: class by row, [B] int32, sharded. The loss is the training loss of plain labels, without class weights. A tie
    counts as an error: the predicted class is then not the label. If the batch holds "requests", sums has their maximum as
    "request".
    """

    loss = LOSSES.implementation(config.optimizer.loss)
    plain = dataclasses.replace(config.optimizer, label_smoothing=0.0, target_threshold=None, class_weights=())

    def step(params: dict, batch_stats: dict, batch: Batch) -> tuple[dict[str, jax.Array], jax.Array]:
        logits = evaluation_logits(
            config, model, params, batch_stats=batch_stats, images=batch["images"], pixel_stats=pixel_stats
        )
        weights, labels, rank = batch["weights"], batch["labels"], rank_of_label(logits, batch["labels"])
        losses = jnp.where(weights > 0, loss(plain, logits, labels), 0.0)
        other_logits = jnp.where(jnp.arange(logits.shape[-1], dtype=labels.dtype) == labels[:, None], -jnp.inf, logits)
        predicted = jnp.where(rank < 1, labels, other_logits.argmax(-1).astype(jnp.int32))
        sums = {
            "top1": jnp.sum(weights * (rank < 1), dtype=jnp.int32),
            "examples": jnp.sum(weights, dtype=jnp.int32),
            "seen": jnp.sum(batch["seen"], dtype=jnp.int32),
            "positions": jnp.sum(jnp.where(batch["seen"] > 0, batch["positions"], 0), dtype=jnp.uint32),
            "loss": jnp.sum(losses),
        }
        if request_flags.BATCH_KEY in batch:  # joins the loss in one message
            sums["loss"] = jnp.append(sums["loss"], request_flags.as_flags(batch[request_flags.BATCH_KEY]))
        if logits.shape[-1] >= TOP5_CLASSES:
            sums["top5"] = jnp.sum(weights * (rank < 5), dtype=jnp.int32)
        sums = lax.psum(sums, AXES)
        if request_flags.BATCH_KEY in batch:
            sums |= {"loss": sums["loss"][0], "request": request_flags.from_total(sums["loss"][1:])}
        return sums, predicted

    replicated, sharded = PartitionSpec(), PartitionSpec(AXES)
    in_specs = (replicated, replicated, sharded)
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(replicated, sharded)))


def evaluation_logits(
    config: Config, model: Network, params: dict, *, batch_stats: dict, images: jax.Array, pixel_stats: PixelStats
) -> jax.Array:
    """Logits [B, classes] float32 of uint8 images [B, S, S, 3], resized if S is `stored_size`, then normalized."""
    images = normalize(resize_for_evaluation(config, images), *pixel_stats)
    logits, _ = model.apply(params, batch_stats, images, train=False)
    return logits


def evaluate(
    step: Callable[[dict, dict, Batch], tuple[dict[str, jax.Array], jax.Array]],
    params: dict,
    batch_stats: dict,
    *,
    source: Any,
    batch: tuple[int, int],
    mesh: Mesh,
    before_batch: Callable[[], dict[str, jax.Array]] = dict,
    on_request: Callable[[int], None] = lambda request: None,
    wait_for: Callable[[Future], Any] = Future.result,
    observer: Observer | None = None,
) -> dict[str, float]:
    """{"eval_accuracy", "eval_top5", "eval_loss", "eval_examples"} over a whole source; accuracies in [0, 1].

    With fewer than six classes there is no eval_top5.

    batch: (images that a step counts, rows of its batch: a multiple of the devices). before_batch: called before the step of
    every batch, when the batch is loaded; may return requests. on_request: called with the largest request that a completed
    step has carried. wait_for: returns the result of a future. observer: see `Observer`. Raises
    TrainingError unless the number and the sum of positions of the images counted on the devices agree with the source.
    """
    totals: Counter[str] = Counter()
    pending: deque[tuple[Any, Callable[[np.ndarray], Any] | None]] = deque()

    @status.current().waiting(status.DEVICES)
    def add_oldest() -> None:
        (sums, predicted), observe = pending.popleft()
        sums = jax.device_get(sums)
        on_request(int(sums.pop("request", 0)))
        for name, value in sums.items():
            totals[name] += value.item()
        if observe:
            observe(_local_rows(predicted))

    images, rows = batch
    starts = range(0, len(source), images)
    prefetcher = prefetch.evaluation_prefetcher(source, batch_size=images, rows=prefetch.local_rows(mesh, rows))
    try:
        for _ in starts:
            local_batch = prefetcher.next(wait_for)
            assert local_batch is not None  # there is one batch for every start
            more = before_batch()  # no process may stop between here and the step: the rest would wait in its collective
            observe = observer(local_batch) if observer is not None else None
            pending.append((step(params, batch_stats, prefetch.to_global(local_batch, mesh) | more), observe))
            if len(pending) > 2:  # limits the batches that wait on the devices
                add_oldest()
    finally:
        prefetcher.close()
    while pending:
        add_oldest()
    expected_positions = len(source) * (len(source) - 1) // 2
    if totals["seen"] != len(source) or (totals["positions"] - expected_positions) % 2**32:
        raise TrainingError(
            f"evaluation counted {totals['seen']} examples, but the source has {len(source)}, or some were counted twice; make "
            "sure that nothing changes the data during the run"
        )
    count = totals["examples"]
    if count == 0:
        raise TrainingError("no evaluation image can be decoded")
    return {
        "eval_accuracy": totals["top1"] / count,
        **({"eval_top5": totals["top5"] / count} if "top5" in totals else {}),
        "eval_loss": totals["loss"] / count,
        "eval_examples": count,
    }


def _local_rows(rows: jax.Array) -> np.ndarray:
    """The rows of a batch on this process's devices, in their order."""
    shards = sorted(rows.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


class ExampleCollector:
    """An `Observer` that keeps up to `limit` images, evenly spread over all `total`."""

    def __init__(self, total: int, limit: int = 16) -> None:
        self.selected = np.unique(np.linspace(0, total - 1, min(limit, total)).round().astype(np.int64))
        self.collected: dict[int, tuple[np.ndarray, int, int]] = {}  # position -> (image, label, predicted class)

    def __call__(self, batch: dict[str, Any]) -> Callable[[np.ndarray], None] | None:
        rows = np.flatnonzero(np.isin(batch["positions"], self.selected) & (batch["weights"] > 0))
        positions, images, labels = (batch[name][rows].copy() for name in ("positions", "images", "labels"))

        def add_predictions(predicted: np.ndarray) -> None:
            for index, row in enumerate(rows):
                self.collected[int(positions[index])] = images[index], labels[index], predicted[row]

        return add_predictions if len(rows) else None

    def arrays(self) -> list[np.ndarray]:
        """[images uint8 [E, H, W, 3], labels int32 [E], predicted classes int32 [E]], ordered by position; [] if empty."""
        return [np.array(column) for column in zip(*(self.collected[p] for p in sorted(self.collected)), strict=True)]
