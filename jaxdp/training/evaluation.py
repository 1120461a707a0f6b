"""Evaluation: when it is due, its compiled step, and the loop that feeds it. Every held-out image counts once."""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp import metrics
from jaxdp.choices import TASKS, kind_of_task
from jaxdp.config import Config
from jaxdp.data import prefetch
from jaxdp.data.augment import normalize, resize_for_evaluation
from jaxdp.distributed import status
from jaxdp.errors import TrainingError, first_line, place_in_user_code
from jaxdp.metrics import COUNT, LOSS, METRICS
from jaxdp.network import Network
from jaxdp.parallel.mesh import AXES
from jaxdp.planning import Plan, interval_elapsed
from jaxdp.tasks.own import as_text
from jaxdp.training import request_flags
from jaxdp.training.objective import Batch, PixelStats

# Called with this process's rows of a batch before they are evaluated; returns a function of the classes predicted for them.
Observer = Callable[[dict[str, np.ndarray]], Callable[[np.ndarray], Any] | None]

GATHERED = ("outputs", "labels", "weights")


def evaluation_is_due(plan: Plan, *, before: int, after: int) -> bool:
    """Whether `evaluation.every_epochs` asks for one after the step from `before` to `after` samples seen."""
    return interval_elapsed(plan.config.evaluation.every_epochs, unit=plan.examples, before=before, after=after)


def make_evaluation_step(config: Config, model: Network, mesh: Mesh, *, pixel_stats: PixelStats) -> jax.stages.Wrapped:
    """step(params, batch_stats, batch, constants=None) -> (sums, predicted), jitted.

    batch: {"images" [B, H, W, 3] uint8, "labels" of the task, "positions" [B] uint32, "seen" [B] int32, 1 for an example and 0
    for padding, "weights" [B] int32, 0 also for examples that do not count}. sums: of all devices, {"eval_NAME"} for
    every metric of single images, int32 or float32, {"eval_loss"} float32, {"eval_examples", "seen"} int32, {"positions"}
    uint32 modulo 2^32. predicted: by row, [B] int32 classes or as the task has it, sharded. The loss is the training loss of
    plain labels, without class weights. A tie counts as an error: the predicted class is then not the label. If the batch holds
    "requests", sums has their maximum as "request". If a metric needs all images, it has {"outputs", "labels", "weights"} of
    the batch. constants: of a registered task.
    """

    present = metrics.names(config.task, config.model.class_count)
    of_images = {name: METRICS.implementation(name) for name in present if name != LOSS and METRICS[name].of == "images"}
    gathers = any(METRICS[name].of == "all" for name in present)
    task = TASKS.implementation(config.task)
    plain = dataclasses.replace(config.optimizer, label_smoothing=0.0, target_threshold=None, class_weights=())

    def device_step(  # noqa: PLR0917 - shard_map passes arguments by position
        params: dict, batch_stats: dict, batch: Batch, constants: Any
    ) -> tuple[dict[str, jax.Array], Any, Batch]:
        images = evaluation_images(config, batch["images"], pixel_stats)
        logits, _ = model.apply(params, batch_stats, images, train=False)
        weights, labels = batch["weights"], batch["labels"]
        losses = jnp.where(weights > 0, task.loss(plain, logits, labels, images=images, constants=constants), 0.0)
        sums = {name: _sum(metric(logits, labels), weights, name) for name, metric in of_images.items()} | {
            COUNT: jnp.sum(weights, dtype=jnp.int32),
            "seen": jnp.sum(batch["seen"], dtype=jnp.int32),
            "positions": jnp.sum(jnp.where(batch["seen"] > 0, batch["positions"], 0), dtype=jnp.uint32),
            LOSS: jnp.sum(losses),
        }
        if request_flags.BATCH_KEY in batch:  # joins the loss in one message
            sums[LOSS] = jnp.append(sums[LOSS], request_flags.as_flags(batch[request_flags.BATCH_KEY]))
        sums = lax.psum(sums, AXES)
        if request_flags.BATCH_KEY in batch:
            sums |= {LOSS: sums[LOSS][0], "request": request_flags.from_total(sums[LOSS][1:])}
        return (
            sums,
            task.predicted(logits, labels),
            {"outputs": logits, "labels": labels, "weights": weights} if gathers else {},
        )

    replicated, sharded = PartitionSpec(), PartitionSpec(AXES)
    in_specs, out_specs = (replicated, replicated, sharded, replicated), (replicated, sharded, sharded)
    of_devices = jax.shard_map(device_step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def step(  # noqa: PLR0917 - compiled programs take arguments by position
        params: dict, batch_stats: dict, batch: Batch, constants: Any = None
    ) -> tuple[dict[str, jax.Array], Any]:
        sums, predicted, rows = of_devices(params, batch_stats, batch, constants)
        return sums | lax.with_sharding_constraint(rows, NamedSharding(mesh, replicated)), predicted

    return jax.jit(step)


def _sum(values: jax.Array, weights: jax.Array, name: str) -> jax.Array:
    """The sum of a metric over the images that count: int32 of bool and integers, else float32. values, weights: [B]."""
    metrics.check_values(name, values, len(weights))
    exact = jnp.issubdtype(values.dtype, jnp.integer) or values.dtype == bool
    return jnp.sum(jnp.where(weights > 0, values, 0), dtype=jnp.int32 if exact else jnp.float32)


def evaluation_images(config: Config, images: jax.Array, pixel_stats: PixelStats) -> jax.Array:
    """The images as a network takes them: float32, resized if they have `stored_size`, then normalized."""
    return normalize(resize_for_evaluation(config, images), *pixel_stats)


def evaluation_logits(
    config: Config, model: Network, params: dict, *, batch_stats: dict, images: jax.Array, pixel_stats: PixelStats
) -> jax.Array:
    """Logits [B, classes] float32 of uint8 images [B, S, S, 3], resized if S is `stored_size`, then normalized.

    A registered task may have other outputs.
    """
    logits, _ = model.apply(params, batch_stats, evaluation_images(config, images, pixel_stats), train=False)
    return logits


def evaluate(
    step: Callable[[dict, dict, Batch], tuple[dict[str, jax.Array], Any]],
    params: dict,
    batch_stats: dict,
    *,
    source: Any,
    batch: tuple[int, int],
    mesh: Mesh,
    task: str = "classes",
    before_batch: Callable[[], dict[str, jax.Array]] = dict,
    on_request: Callable[[int], None] = lambda request: None,
    wait_for: Callable[[Future], Any] = Future.result,
    observer: Observer | None = None,
) -> dict[str, float]:
    """The metrics of `jaxdp.metrics` over a whole source, such as "eval_accuracy", then "eval_loss" and "eval_examples".

    batch: (images that a step counts, rows of its batch: a multiple of the devices). task: of the step. before_batch: called
    before the step of every batch, when the batch is loaded; may return requests. on_request: called with the largest request
    that a completed step has carried. wait_for: returns the result of a future. observer: see `Observer`. Raises TrainingError
    unless the number and the sum of positions of the images counted on the devices agree with the source.
    """
    totals: Counter[str] = Counter()
    gathered: list[dict[str, Any]] = []  # the rows of batches, for metrics of all images
    pending: deque[tuple[Any, Callable[[np.ndarray], Any] | None]] = deque()

    @status.current().waiting(status.DEVICES)
    def add_oldest() -> None:
        (sums, predicted), observe = pending.popleft()
        sums = jax.device_get(sums)
        on_request(int(sums.pop("request", 0)))
        if "outputs" in sums:
            gathered.append({name: sums.pop(name) for name in GATHERED})
        for name, value in sums.items():
            totals[name] += value.item()
        if observe:
            observe(_local_rows(predicted))

    images, rows = batch
    local = prefetch.local_rows(mesh, rows)
    with closing(prefetch.evaluation_prefetcher(source, batch_size=images, rows=local)) as batches:
        while (local_batch := batches.next(wait_for)) is not None:
            more = before_batch()  # no process may stop between here and the step: the rest would wait in its collective
            observe = observer(local_batch) if observer is not None else None
            pending.append((step(params, batch_stats, prefetch.to_global(local_batch, mesh) | more), observe))
            if len(pending) > 2:  # limits the batches that wait on the devices
                add_oldest()
    while pending:
        add_oldest()
    expected_positions = len(source) * (len(source) - 1) // 2
    if totals["seen"] != len(source) or (totals["positions"] - expected_positions) % 2**32:
        raise TrainingError(
            f"evaluation counted {totals['seen']} examples, but the source has {len(source)}, or some were counted twice; make "
            "sure that nothing changes the data during the run"
        )
    count = totals[COUNT]
    if count == 0:
        raise TrainingError("no evaluation image can be decoded")
    found = {name: value / count for name, value in totals.items() if name.startswith(metrics.PREFIX)}
    if gathered:
        found |= _of_all(task, **jax.tree.map(lambda *parts: np.concatenate(parts), *gathered))
    return {name: found[name] for name in metrics.names(task) if name in found} | {COUNT: count}


def _of_all(task: str, *, outputs: Any, labels: Any, weights: np.ndarray) -> dict[str, float]:
    """The metrics of all held-out images together. Raises TrainingError for one that fails or returns no number."""
    found = {}
    outputs, labels = jax.tree.map(lambda rows: rows[weights > 0], (outputs, labels))
    for name in [name for name in metrics.names(task) if METRICS[name].of == "all"]:
        try:
            found[name] = float(METRICS.implementation(name)(outputs, labels))
        except Exception as error:
            place = place_in_user_code(error)
            raise TrainingError(f"{name} cannot be computed: {type(error).__name__}{place}: {first_line(error)}") from error
    return found


def _local_rows(rows: Any) -> Any:
    """The rows of a batch, an array or a tree, on this process's devices, in their order."""

    def local(array: jax.Array) -> np.ndarray:
        shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return np.concatenate([np.asarray(shard.data) for shard in shards])

    return jax.tree.map(local, rows)


class ExampleCollector:
    """An `Observer` that keeps up to `limit` images, evenly spread over all `total`.

    task: of the run. Targets and predictions of a registered task that is not like a built-in one are kept as texts.
    """

    def __init__(self, total: int, limit: int = 16, *, task: str = "classes") -> None:
        self.own = None if kind_of_task(task) else TASKS.implementation(task)
        self.selected = np.unique(np.linspace(0, total - 1, min(limit, total)).round().astype(np.int64))
        self.collected: dict[int, tuple[np.ndarray, Any, Any]] = {}  # position -> (image, target, prediction)

    def __call__(self, batch: dict[str, Any]) -> Callable[[np.ndarray], None] | None:
        rows = np.flatnonzero(np.isin(batch["positions"], self.selected) & (batch["weights"] > 0))
        positions, images, labels = (batch[name][rows].copy() for name in ("positions", "images", "labels"))

        def add_predictions(predicted: np.ndarray) -> None:
            for index, row in enumerate(rows):
                label, prediction = labels[index], jax.tree.map(itemgetter(row), predicted)
                if self.own:
                    label, prediction = as_text(label), self.own.shown(prediction)
                self.collected[int(positions[index])] = images[index], label, prediction

        return add_predictions if len(rows) else None

    def arrays(self) -> list[np.ndarray]:
        """[images uint8 [E, H, W, 3], labels [E], predictions [E]], ordered by position; [] if empty."""
        return [np.array(column) for column in zip(*(self.collected[p] for p in sorted(self.collected)), strict=True)]
