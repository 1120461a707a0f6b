"""The state of a run, and what the loop and its callbacks do with it."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdp.checkpoint.progress import Progress
from jaxdp.config import Config, at_image_size
from jaxdp.data.prefetch import (
    DeviceIterator,
    batch_sharding,
    evaluation_prefetcher,
    image_bytes,
    local_rows,
    rows_per_chunk,
    to_global,
)
from jaxdp.distributed import status
from jaxdp.errors import kind_of, printable
from jaxdp.run_records import RECORD_FIELDS
from jaxdp.training.clock import Clock, TimedStep
from jaxdp.training.evaluation import evaluation_logits
from jaxdp.training.state import StateLayout, TrainState, from_host, replicate, replicated

if TYPE_CHECKING:  # the loop imports none of them
    from jaxdp.checkpoint.manager import CheckpointManager
    from jaxdp.checkpoint.manifest import Manifest
    from jaxdp.data.datasets import Datasets
    from jaxdp.distributed.signal_handler import SignalHandler
    from jaxdp.planning import Plan, PlannedPhase
    from jaxdp.training.callback import Callbacks
    from jaxdp.training.result import TrainResult
    from jaxdp.training.step_compiler import StepCompiler

# Fields that a callback cannot log, also without the prefix that TensorBoard and trackers leave out. run: a column of the CSV.
RESERVED = {*RECORD_FIELDS, *(name.removeprefix("eval_") for name in RECORD_FIELDS), "request", "run"}
LOG_EVERY, FEWEST_LOG_LINES = 10, 20  # steps between logged steps; logged steps of a run of at least as many steps


class StartedStep(NamedTuple):
    """A step whose metrics may still be computed on the devices.

    record: what is known without them. start_seconds: how long its start took. is_logged: whether the log receives it.
    """

    record: dict[str, Any]
    metrics: dict[str, jax.Array]
    timed: TimedStep
    start_seconds: float
    is_logged: bool


class HeldOut(NamedTuple):
    """Predictions of held-out images. positions: [N] in `datasets.evaluation`; labels: [N]; logits: [N, classes] float32.

    A task may have other labels and outputs in their place.
    """

    positions: np.ndarray
    labels: Any
    logits: Any


class Run:
    """A run in training: what it is, where it stands, and what callbacks may ask for.

    config, plan: what is trained. workdir: the run directory. location: the same, or its URL. processes: rank and number of the
    processes. datasets: training and held-out images. devices: all that may be used. state: parameters, batch statistics and
    optimizer state after the last step that was started, on the devices, in the layout of the step. progress: position and
    times. info(text): shows a line. example_images: a few held-out images of the last evaluation with their classes, see
    `ExampleCollector.arrays`. is_logged: whether the log receives the current record. The log receives every evaluation, one of
    every few steps, the first step of a phase, the last step of the run, and each record with values of `log`.
    stop_reason: why the run ends early. error: the exception that ended it.

    Attributes that are not described here belong to the loop.
    """

    def __init__(
        self,
        compiler: "StepCompiler",
        datasets: "Datasets",
        workdir: Path,
        *,
        data_fingerprint: dict[str, str],
        location: str,
        signals: "SignalHandler",
        checkpoints: "CheckpointManager",
        callbacks: "Callbacks",
        info: Callable[[str], Any],
        status: Callable[[str], Any],
        resume_action: str,
        started: float,
    ) -> None:
        """compiler: of the plan's programs. data_fingerprint: digests of the data. status: shows the current activity, such as
        "compiling". resume_action: what resumes the run, as the subject of a sentence. started: `time.monotonic()` at the start
        of the command."""
        self.compiler, self.model = compiler, compiler.model
        self.devices, self.datasets, self.data_fingerprint = compiler.devices or jax.devices(), datasets, data_fingerprint
        self.workdir, self.location, self.checkpoints, self.callbacks = workdir, location, checkpoints, callbacks
        self.signals, self.processes, self.info, self.status = signals, signals.group, info, status
        self.resume_action, self.started, self.progress = resume_action, started, Progress()
        self.restored: Manifest | None = None  # the checkpoint from which this session continues
        self.clock = Clock(self.progress, started)
        self.has_started = False  # whether its callbacks have
        self.state: TrainState
        self.layout: StateLayout | None = None  # of the state; None while it is as it was restored or initialized
        self.phase, self.phase_began = self.plan.phases[0], 0  # and the steps before this session's first one in it
        self.result: TrainResult | None = None
        self.logged: list[dict[str, Any]] = []  # records of the log at the position where this session started
        self.log_every = self.config.logging.every_steps or min(LOG_EVERY, max(1, self.plan.total_steps // FEWEST_LOG_LINES))
        self.example_images: list[np.ndarray] = []
        self.stop_reason: str | None = None
        self.error: BaseException | None = None
        self.saved_samples: int | None = None
        self.step_times = (0.0, 0.0)  # seconds spent waiting for a step, and seconds of all steps up to it
        self.pending: deque[StartedStep] = deque()
        self.record: dict[str, Any] | None = None  # `log` adds to this record
        self.is_logged = False
        self.request_step = 0  # the step after which `evaluate` and `stop` take effect; 0: at once
        self.saving: int | None = None  # samples of the checkpoint that is being saved
        self.saved_at = time.monotonic()
        self.save_requested = False
        self.next_record: dict[str, Any] = {}  # values of `log` for the step that is started next
        self.before_manifest: Callable[[], None] = lambda: None  # called on rank 0 before a checkpoint is complete
        self._predictor = cache(self._make_predictor)

    @property
    def plan(self) -> "Plan":
        """What the run does."""
        return self.compiler.plan

    @property
    def config(self) -> Config:
        """What is trained."""
        return self.compiler.plan.config

    @property
    def is_rank0(self) -> bool:
        """Whether this process is the one that writes files and shows the run."""
        return self.processes.is_rank0

    @property
    def epoch(self) -> float:
        """The epochs of training that `state` has seen."""
        return self.progress.samples / self.plan.examples

    def position(self) -> dict[str, Any]:
        """{"samples", "wall_seconds"} of the last step and the number of "sessions", for an event; {} before the start."""
        if not self.has_started:
            return {}
        return {"samples": self.progress.samples, "sessions": self.progress.sessions, "wall_seconds": self.clock.wall_seconds}

    @property
    def mesh(self) -> Mesh:
        """The device mesh of the present phase."""
        return self.compiler.mesh(self.phase)

    @property
    @status.current().waiting(status.DEVICES)
    def eval_variables(self) -> tuple[dict, dict]:
        """(params, batch_stats) of an evaluation, whole on every device of their mesh: averaged ones with
        `optimizer.average_decay`. All processes must ask for them."""
        found = self.layout.eval_variables(self.state) if self.layout else self.state.eval_variables
        return replicate(found, self.mesh)

    @property
    def params(self) -> dict:
        """The parameters of an evaluation as `jaxdp.load_params(...)["params"]` has them, on the devices; see `eval_variables`.
        All processes must ask for them."""
        from jaxdp.models.finetune import module_variables

        return module_variables(*self.eval_variables)["params"]

    def predict(self, images: np.ndarray) -> Any:
        """Logits [N, classes] float32, or other outputs of the model, of images as `datasets.evaluation` has them.

        images: uint8 [N, S, S, 3], prepared as for evaluation. All processes must call this with the same images.
        """
        rows = -len(images) % self.mesh.size
        padded = np.concatenate([images, np.zeros((rows, *images.shape[1:]), images.dtype)])
        logits, _ = self._predict(self.eval_variables, {"images": from_host(padded, self.mesh)})
        return jax.tree.map(lambda rows: rows[: len(images)], logits)

    def predict_held_out(self) -> HeldOut:
        """Labels and logits of all held-out images, each once, in their order; the same on every process.

        The devices share the images, as in an evaluation, which takes as long. All processes must call this.
        """
        source, (count, rows) = self.datasets.evaluation, self.compiler.evaluation_rows(self.phase)
        evaluated, parts = self.eval_variables, []
        with closing(evaluation_prefetcher(source, batch_size=count, rows=local_rows(self.mesh, rows))) as batches:
            while (batch := batches.next(status.result_of)) is not None:
                logits, found = self._predict(evaluated, to_global(batch, self.mesh))
                counts = found["weights"] > 0  # neither padding nor an image that cannot be read
                of_batch = HeldOut(found["positions"], found["labels"], logits)
                parts.append(jax.tree.map(lambda array, counts=counts: array[counts], of_batch))
                self.processes.status.record_progress()
        return jax.tree.map(lambda *part: np.concatenate(part), *parts)

    @status.current().waiting(status.DEVICES)
    def _predict(self, variables: tuple[dict, dict], batch: dict[str, jax.Array]) -> tuple[Any, dict[str, np.ndarray]]:
        """(logits of a batch, its other columns), on the host."""
        return jax.device_get(self._predictor(self.mesh)(*variables, batch))

    def _make_predictor(self, mesh: Mesh) -> Callable:
        def outputs(params: dict, batch_stats: dict, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
            pixel_stats = (self.datasets.mean, self.datasets.std)
            images = jax.lax.with_sharding_constraint(batch["images"], batch_sharding(mesh))  # each device computes a part
            logits = evaluation_logits(
                self.config, self.model, params, batch_stats=batch_stats, images=images, pixel_stats=pixel_stats
            )
            return logits, {name: rows for name, rows in batch.items() if name != "images"}

        return jax.jit(outputs, out_shardings=replicated(mesh))

    def gradient(self, batch: dict[str, jax.Array]) -> dict:
        """The gradient of the step that follows, before clipping: a tree of float32 arrays, whole on every device.

        batch: as `Callback.before_step` gets it. The gradient is computed for this call, which takes about a step. All
        processes must call this.
        """
        with self.clock.excluded():
            program = status.result_of(self.compiler.prepare_gradient(self.phase))
        self.processes.barrier("a gradient")
        rate = self.plan.learning_rate(self.progress.samples)
        return program(self.state, batch, self.compiler.hyperparameters(self.phase, rate))

    def log(self, **values: float) -> None:
        """Add values to the record of the current step or evaluation, which is then logged. Call it on every process.

        May be called in before_step (for the step that follows), after_step and after_evaluation. Raises ValueError elsewhere,
        for a name that the record or jaxdp uses already, and for a value that is no number.
        """
        if self.record is None:
            raise ValueError("log() adds to a record: call it in before_step, after_step or after_evaluation")
        numbers: dict[str, float] = {}
        for name, value in values.items():
            try:
                if isinstance(value, str | bytes):
                    raise TypeError
                numbers[name] = value if isinstance(value, int) and abs(value) < 2**63 else float(value)
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"log({name}=...): must be a number that a float can hold, not {kind_of(value)}") from None
            if name in self.record or name in RESERVED:
                raise ValueError(f"log({name}={numbers[name]!r}): the record or jaxdp has this field; choose another name")
        add_to_record(self, numbers)

    def save(self) -> None:
        """Ask for a checkpoint, which is saved before the next step starts. Every process must ask."""
        self.save_requested = True

    def evaluate(self) -> None:
        """Ask for an evaluation after the next step, see `stop`; not in after_evaluation. Every process must ask."""
        self.progress.evaluate_after(self.request_step)

    def stop(self, reason: str) -> None:
        """End the run after the next step: it is evaluated and saved, and finished. Every process must ask.

        In after_step, the next step is the one after the step of the metrics, even if it is not running yet, such as before a
        save. An interrupted run therefore takes the same steps. If an evaluation is due after the step of the metrics, it
        serves the requests: `evaluate` adds none, and `stop` ends the run there. After an evaluation the run ends at once. A
        run takes at least one step. reason: text, shown in one line.
        """
        self.progress.stop_after(max(1, self.request_step), _checked_reason("stop", reason))
        self.stop_reason = self.progress.stop_reason

    def interrupt(self, reason: str) -> None:
        """Stop as after a signal: the run is saved after the same step on all processes, and the same command resumes it.

        One process may ask for all. reason: a noun phrase, such as "the limit of 60 minutes".
        """
        self.signals.request_stop(_checked_reason("interrupt", reason))

    @status.current().waiting(status.DEVICES)
    def whole_state(self) -> TrainState:
        """The state, whole on every device of its mesh. All processes must ask for it."""
        return self.layout.gather_state(self.state) if self.layout else self.state

    def call_hook(
        self, hook: str, record: dict[str, Any], argument: Any, *, is_logged: bool = False, request_step: int = 0
    ) -> bool:
        """Call a hook of the callbacks while `log` adds to a record. Returns whether the log receives it."""
        outer = self.record, self.is_logged, self.request_step  # an audit before a step completes the steps before
        self.record, self.is_logged, self.request_step = record, is_logged, request_step
        try:
            self.callbacks.call(hook, self, argument)
            return self.is_logged
        finally:
            self.record, self.is_logged, self.request_step = outer


def add_to_record(run: Run, values: Mapping[str, float]) -> None:
    """Log values as `Run.log` does, also under the RESERVED names of jaxdp's own callbacks."""
    assert run.record is not None
    run.record.update(values)
    run.is_logged = True


def _checked_reason(method: str, reason: str) -> str:
    """A reason in one line, safe to print. Raises ValueError for one that is no text, or empty."""
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError(f"{method}({printable(repr(reason))}): the reason must be text that is not empty")
    return printable(reason)


def open_batches(compiler: "StepCompiler", datasets: "Datasets", phase: "PlannedPhase", *, first: int = 0) -> DeviceIterator:
    """The batches of a phase from `first` samples seen on, loaded in the background. Close it when done."""
    config, resident = compiler.plan.config, compiler.images is not None
    data, chunk = at_image_size(config, phase.image_size).data, None
    if not resident:
        chunk = rows_per_chunk(phase.per_device_batch, devices=phase.local_devices, image_bytes=image_bytes(data))
    return DeviceIterator(
        datasets.train_at(phase.image_size),
        compiler.mesh(phase),
        seed=config.seed,
        first=first,
        end=phase.end,
        global_batch=phase.global_batch,
        chunk_rows=chunk,
        resident=resident,
        repeats=data.repeats,
    )
