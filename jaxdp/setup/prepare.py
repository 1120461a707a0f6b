"""What a run is made of before anything is compiled: devices, data and plan, and warnings and errors about the plan."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax

from jaxdp import models
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.config import Config
from jaxdp.data import progress
from jaxdp.data.batch_sources import ArraySource, DataError
from jaxdp.data.classes import with_class_weights
from jaxdp.data.sources import Datasets, is_resident, open_datasets, with_classes
from jaxdp.distributed import runtime
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import ConfigError, StorageError, TrainingError, first_line, plural
from jaxdp.parallel.torus import default_rows
from jaxdp.planning import Plan, PlannedPhase, make_plan
from jaxdp.setup.consistency import data_digest
from jaxdp.training.run import Run
from jaxdp.training.step_compiler import StepCompiler

SavedBatches = dict[str, list[int]]  # {phase: [global batch, per-worker batch]} with which a run began


def prepare(
    config: Config,
    *,
    datasets: tuple[Any, Any] | None = None,
    group: ProcessGroup | None = None,
    saved_batches: SavedBatches | None = None,
    trained: Sequence[str] | None = None,
    adjust: Callable[[Config, int], Config] = lambda config, examples: config,
    run: Callable[..., Any] = lambda function, *arguments: function(*arguments),
) -> tuple[Plan, list[jax.Device], Datasets]:
    """Start JAX, open the data and make the plan. Raises ConfigError if the run cannot be planned.

    datasets: (training, evaluation) in place of the config's. saved_batches: per-worker batches that are kept if these devices
    allow it. adjust: changes the config once the number of training images is known. trained: see
    `jaxdp.data.datasets.Source.open`. run: calls the functions that may wait long: for the other processes and for the data.
    """
    group = group or runtime.current_group()
    start = partial(runtime.start, config.mesh, group, cache=True)
    devices = run(start) if group.num_processes > 1 else start()  # in a thread if it waits for others
    progress.listener = group.status.record_progress
    opened = run(_data_errors(config)(partial(open_datasets, trained=trained)), config, datasets)
    config = with_class_weights(with_classes(config, opened.class_count), opened.train)
    config = adjust(config, len(opened.train))
    sizes = {
        "examples": len(opened.train),
        "devices": len(devices),
        "processes": group.num_processes,
        "rows": default_rows(devices) or runtime.uniform_host_count(group),
    }
    plan = None
    if (saved := _with_saved_batches(config, saved_batches or {})) != config:
        with contextlib.suppress(ConfigError):
            plan = make_plan(saved, **sizes)
    plan = dataclasses.replace(plan or make_plan(config, **sizes), config=config)
    _check_profile(plan)
    return plan, devices, opened


def data_fingerprint(config: Config, datasets: Datasets) -> dict[str, str]:
    """Digests that identify the training and the held-out set. Raises ConfigError for data that cannot be read."""
    with _data_errors(config):
        return {"training data": data_digest(datasets.train), "held-out data": data_digest(datasets.evaluation)}


@contextlib.contextmanager
def _data_errors(config: Config) -> Iterator[None]:
    """Turn an error of object storage that will not go away into a ConfigError."""
    try:
        yield
    except DataError as error:
        if not (isinstance(error.__cause__, StorageError) and error.__cause__.permanent):
            raise
        hint = "check the credentials and permissions"
        raise ConfigError("data.directory", config.data.directory, reason=str(error), hint=hint) from None


def _with_saved_batches(config: Config, saved: SavedBatches) -> Config:
    """The config with the per-worker batches of the run's beginning, which keep the groups of batch normalization."""
    batch = tuple(
        dataclasses.replace(phase, per_worker_batch=saved[str(index)][1])
        if phase.per_worker_batch is None and saved.get(str(index), [None])[0] == phase.global_batch
        else phase
        for index, phase in enumerate(config.batch)
    )
    return dataclasses.replace(config, batch=batch)


def _check_profile(plan: Plan) -> None:
    """Raise ConfigError if the profile has steps after the last step of the run."""
    profile, steps = plan.config.logging.profile, plan.config.logging.profiled_steps
    if steps and steps[-1] > plan.total_steps:
        reason = f"steps {steps[0]} to {steps[-1]} are not all among the {plural(plan.total_steps, 'step')} of the run"
        raise ConfigError("logging.profile", profile, reason=reason, hint="use FIRST,COUNT within them")


def check_fits(manifest: Manifest | None, *, plan: Plan, data_fingerprint: dict[str, str], accept_changes: bool) -> None:
    """Raise ConfigError if a checkpoint is of other data, unless accepted, or of a position after the end of the run.

    manifest: None for a run that starts from the beginning; then, and for an early checkpoint, the schedule must have begun.
    """
    if plan.schedule_start > (manifest.samples if manifest else 0):
        at = f"{manifest.path} is at epoch {manifest.samples / plan.examples:g}" if manifest else "the run begins at epoch 0"
        first = plan.config.schedule.from_epoch
        hint = "use --schedule-from-now with --accept-changes to begin it there" if manifest else "use --schedule.from-epoch 0"
        raise ConfigError("schedule.from_epoch", first, reason=f"{at}, before the schedule", hint=hint)
    if manifest is None:
        return
    saved, current = manifest.metadata.get("data"), data_fingerprint
    if saved not in (None, current) and not accept_changes:
        different = [f"{name}: {saved.get(name)} -> {current[name]}" for name in current if saved.get(name) != current[name]]
        raise ConfigError(
            "data",
            reason=f"{manifest.path} is of a run on other data ({'; '.join(different)})",
            hint="restore the data, start over with --resume never, or resume on the new data with --accept-changes",
        )
    if manifest.samples > plan.total_samples:
        reason, hint = f"{manifest.path} is at epoch {manifest.epoch:g} already", "use more epochs, or another --workdir"
        raise ConfigError("epochs", plan.config.epochs, reason=reason, hint=hint)


def make_compiler(plan: Plan, devices: list[jax.Device], datasets: Datasets) -> StepCompiler:
    """The compiler of a plan's programs."""
    train = datasets.train
    return StepCompiler(
        plan,
        models.create(plan.config.model),
        pixel_stats=(datasets.mean, datasets.std),
        evaluation_examples=len(datasets.evaluation),
        images=train.images if isinstance(train, ArraySource) and is_resident(datasets, devices[0].platform) else None,
        devices=devices,
    )


def changed_batches_warning(plan: Plan, saved: SavedBatches) -> str | None:
    """A warning if these devices do not allow the per-worker batches with which the run began; else None."""
    wanted = _with_saved_batches(plan.config, saved).batch
    if all(wanted[phase.index].per_worker_batch in (None, phase.per_worker_batch) for phase in plan.phases):
        return None
    return (
        "these devices do not allow the per-worker batch with which the run began, so the groups of batch normalization "
        "change; the order of the data, the learning rate and the global batches stay the same"
    )


@contextlib.contextmanager
def out_of_memory_as_config_error(run: Run) -> Iterator[None]:
    """Turn an error of JAX or NumPy that a device or the host has no memory left into a ConfigError for the present phase."""
    try:
        yield
    except MemoryError as error:
        raise ConfigError(
            f"batch.{run.phase.index}.global_batch",
            run.phase.global_batch,
            reason=f"the images of a batch do not fit into the memory of this host ({first_line(error, 'no memory left')})",
            hint="use smaller images (data.image_size, data.stored_size), a smaller batch or more hosts",
        ) from None
    except RuntimeError as error:
        if isinstance(error, TrainingError) or not re.search(r"RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE):
            raise
        raise _device_memory_error(run.phase, first_line(error)) from None


def _device_memory_error(phase: PlannedPhase, reason: str) -> ConfigError:
    """Its hint is the largest per-worker batch that keeps the global batch and is at most half the present one."""
    per_device = phase.per_device_batch
    smaller = [size for size in range(1, phase.per_worker_batch // 2 + 1) if per_device % size == 0]
    hint = "it cannot be smaller, so use a smaller model, smaller images or more devices"
    if smaller:
        best = max(smaller)
        hint = (
            f"try --batch.{phase.index}.per-worker-batch {best}, which keeps the global batch {phase.global_batch} by "
            f"accumulating {per_device // best} micro-batches"
        )
    field = f"batch.{phase.index}.per_worker_batch"
    return ConfigError(field, phase.per_worker_batch, reason=f"out of memory ({reason})", hint=hint)
