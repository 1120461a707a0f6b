"""The loop: the only place with effects. It feeds, steps, logs and evaluates."""

import dataclasses
import math
import platform
import time
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path

import jax
from pydantic import TypeAdapter, ValidationError

from jaxdp import __version__, models
from jaxdp.config import Config, ConfigError
from jaxdp.data import feed
from jaxdp.data.groups import rows_a_group
from jaxdp.data.sources import keeps_images, open_datasets
from jaxdp.parallel import distributed
from jaxdp.planning import Plan, make_plan, model_summary, summary_table
from jaxdp.training import guard
from jaxdp.training import workdir as directories
from jaxdp.training.console import Quiet, clock
from jaxdp.training.evaluation import evaluate
from jaxdp.training.metrics import to_json, writers_for
from jaxdp.training.programs import Programs
from jaxdp.training.state import create_state, replicated
from jaxdp.training.strategy import chosen_strategies
from jaxdp.validation import validate

SETTLED_STEPS = 10  # after which it can be told whether input keeps up


@dataclass(frozen=True)
class TrainResult:
    """What a finished run gave. accuracy and top5 are shares in [0, 1]; seconds are wall-clock.

    images_per_second leaves out compilation and evaluation; seconds_to_first_step counts from the start of the command.
    """

    accuracy: float
    top5: float
    loss: float
    eval_examples: int
    steps: int
    samples: int
    epochs: float
    wall_seconds: float
    seconds_to_first_step: float
    training_seconds: float
    evaluation_seconds: float
    images_per_second: float
    devices: int
    device_kind: str
    mesh: tuple[int, int]
    versions: dict
    workdir: str
    skipped_steps: int = 0
    strategy: str = ""
    input_seconds: float = 0.0
    bad_images: dict = dataclasses.field(default_factory=dict)


def train(config: Config, workdir=None, resume="auto", screen=None, started=None, datasets=None) -> TrainResult:
    """Train as `config` says, into `workdir` (default runs/NAME); a finished run there is returned as it is.

    resume: "auto", or "never" for a new directory beside one that holds a run. started: `time.monotonic()` at the start of the
    command, for the times reported. datasets: (training, evaluation), objects with `__len__` and `__getitem__` -> (uint8
    pixels or encoded bytes, label), in place of the config's source. Raises ConfigError where the run cannot be begun, or does
    not fit into memory, and TrainingError where it cannot go on.
    """
    started = time.monotonic() if started is None else started
    screen = screen or Quiet()
    if datasets is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, source="given"))
    config = validate(config)
    path = Path("runs") / config.name if workdir is None else Path(workdir)
    if workdir == "":
        raise ConfigError("--workdir: '' is not allowed; give a directory")
    if resume not in ("auto", "never"):
        raise ConfigError(f"--resume: {resume!r} is not allowed; give auto or never")
    if resume == "never":
        path = directories.next_free(path)
    prepared = Prepared.of(config, datasets)
    with directories.claimed(path):
        finished, remarks = directories.settle(path, config)
        if finished is not None:
            result = _read_result(path, finished)
            for remark in [f"{path} holds this run, finished; for a new one: --resume never", *remarks]:
                screen.say(remark)
            show_result(screen, result)
            return result
        screen.table(summary_table(prepared.plan, distributed.describe(prepared.devices), prepared.model_summary))
        for remark in remarks:
            screen.say(remark)
        result = Run(prepared, path, screen, started).to_the_end()
        show_result(screen, result)
        return result


def _read_result(path: Path, text: str) -> TrainResult:
    try:
        return dataclasses.replace(TypeAdapter(TrainResult).validate_json(text), workdir=str(path))
    except ValidationError:
        raise ConfigError(
            f"--workdir: {str(path)!r} is not allowed; its result.json is damaged; "
            "delete that file to train again, or give another directory"
        ) from None


@dataclass(frozen=True)
class Prepared:
    """A config with its devices, data and plan: everything that can be wrong is known to be right."""

    config: Config
    devices: list
    datasets: tuple
    plan: Plan
    model_summary: dict

    @classmethod
    def of(cls, config: Config, given=None) -> "Prepared":
        devices = distributed.start(config.mesh)
        datasets = open_datasets(config, given)
        keeps_images(config.data, datasets.train, devices[0].platform)  # says here what cannot be
        plan = make_plan(config, len(datasets.train), len(devices), jax.process_count())
        return cls(config, devices, datasets, plan, model_summary(config))


class Run:
    """One training run from its first step to its result."""

    def __init__(self, prepared: Prepared, workdir: Path, screen, started: float):
        self.config, self.plan, self.datasets = prepared.config, prepared.plan, prepared.datasets
        self.workdir, self.screen, self.started = workdir, screen, started
        self.device_kind = prepared.devices[0].device_kind
        pixels = (self.datasets.mean, self.datasets.std)
        model = models.create(self.config.model)
        strategies = chosen_strategies(self.plan, model, workdir, screen)
        self.resident = keeps_images(self.config.data, self.datasets.train, prepared.devices[0].platform)
        images = self.datasets.train.images if self.resident else None
        self.programs = Programs(self.plan, model, pixels, len(self.datasets.evaluation), strategies, images)
        self.model = model
        self.samples, self.steps = 0, 0
        self.training_seconds = self.evaluation_seconds = self.input_seconds = 0.0
        self.first_step_seconds = None
        self.since_log = [0, 0.0, 0.0]  # images, seconds, seconds of them waiting for images
        self.told_input = False
        self.pending = None
        self.evaluated = None
        self.skipped_steps = 0

    def to_the_end(self) -> TrainResult:
        with ExitStack() as stack:
            stack.callback(self.programs.close)
            self.writers = writers_for(self.workdir, self.config.logging.tensorboard)
            for writer in self.writers:
                stack.callback(self._close, writer)
            self.screen.begin(self.plan.total_steps)
            stack.callback(self.screen.end)
            for index, phase in enumerate(self.plan.phases):
                try:
                    self._phase(index)
                    if index + 1 == len(self.plan.phases):
                        self._finish(phase)
                except Exception as error:
                    if not guard.is_out_of_memory(error):
                        raise
                    raise ConfigError(guard.out_of_memory_message(phase, error)) from None
            result = self._result()
            directories.write_atomically(self.workdir / "result.json", to_json(dataclasses.asdict(result), indent=2) + "\n")
        return result

    def _close(self, writer) -> None:
        """A picture or an event file that cannot be finished is worth a remark, not the run."""
        try:
            writer.close()
        except Exception as error:
            self.screen.say(f"{type(writer).__name__} could not be finished: {error}")

    def _finish(self, phase) -> None:
        """The evaluation at the end, if the last step was not evaluated already."""
        guard.check_skipped(self.skipped_steps, self.steps, self.config.loss_scale)
        if self.evaluated is None or self.evaluated["samples"] != self.samples:
            self._evaluate(phase)
        if not math.isfinite(self.evaluated["eval_loss"]):
            raise guard.TrainingError(
                f"the held-out loss is {self.evaluated['eval_loss']} after the last step ({self.steps}, samples "
                f"{self.samples}): the parameters are no longer finite; {guard.LOWER_THE_RATE}"
            )

    def _phase(self, index: int) -> None:
        phase = self.plan.phases[index]
        following = self.plan.phases[index + 1] if index + 1 < len(self.plan.phases) else None
        future = self.programs.prepare_train(phase)
        self.programs.prepare_evaluation(phase)
        mesh = self.programs.mesh(phase)
        if index == 0:
            self.screen.busy("compiling")
            self.state = create_state(self.config, self.model, mesh)
        else:
            self.state = jax.device_put(self.state, replicated(mesh))
        step = future.result()
        if following:
            self.programs.prepare_train(following)
        self._steps(phase, step, mesh)

    def _steps(self, phase, step, mesh) -> None:
        end = phase.first_sample + phase.steps * phase.global_batch
        data = self.config.data
        group = None if self.resident else rows_a_group(phase.per_device_batch, mesh.size, data.image_bytes, data.ahead_bytes)
        feeder = feed.Feeder(
            self.datasets.train, self.config.seed, mesh, self.samples, end, phase.global_batch, group, self.resident
        )
        try:
            self._steps_of(phase, step, feeder, end)
        finally:
            feeder.close()

    def _steps_of(self, phase, step, feeder, end: int) -> None:
        self.clock = time.perf_counter()
        batch = self._fed(feeder)
        while self.samples < end:
            before = self.samples
            self.state, metrics = step(self.state, batch, self.programs.hyperparameters(phase, before))
            self.samples += phase.global_batch
            self.steps += 1
            batch = self._fed(feeder)
            self._fetch()
            self.pending = (self._record(phase, before), metrics, before == phase.first_sample)
            if self._evaluation_due(before):
                self._fetch()
                self._evaluate(phase)
        self._fetch()

    def _fed(self, feeder):
        before = feeder.waited
        batch = feeder.next()
        self.input_seconds += feeder.waited - before
        self.since_log[2] += feeder.waited - before
        return batch

    def _record(self, phase, before: int) -> dict:
        """What is known of a step when it is dispatched; before: samples seen before it."""
        return {
            "step": self.steps,
            "samples": self.samples,
            "epoch": self.samples / self.plan.examples,
            "phase": phase.index,
            "learning_rate": self.plan.learning_rate(before),
            "momentum": phase.momentum,
            "global_batch": phase.global_batch,
        }

    def _fetch(self) -> None:
        """Read the metrics of the step before the one just dispatched, and log them when their turn has come."""
        if self.pending is None:
            return
        (record, metrics, first_of_phase), self.pending = self.pending, None
        record |= {name: value.item() for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        self.training_seconds += now - self.clock
        self.since_log[0] += record["global_batch"]
        self.since_log[1] += now - self.clock
        self.clock = now
        if self.first_step_seconds is None:
            self.first_step_seconds = time.monotonic() - self.started
        self.skipped_steps = record.get("skipped_steps", 0)
        guard.check_step(record, self.config.loss_scale)
        images, seconds, waited = self.since_log
        record |= {"images_per_second": images / seconds, "input_seconds": waited}
        if not self.told_input and record["step"] > SETTLED_STEPS:
            remark = guard.input_remark(self.samples, self.training_seconds, self.input_seconds, self.datasets.train)
            self.told_input = remark is not None
            if remark:
                self.screen.say(remark)
        self.screen.step(record)
        last = record["step"] == self.plan.total_steps
        if record["step"] % self.config.logging.every_steps == 0 or first_of_phase or last:
            self._write(record)
            self.since_log = [0, 0.0, 0.0]

    def _write(self, record: dict) -> None:
        for writer in self.writers:
            writer.write(record)

    def _evaluation_due(self, before: int) -> bool:
        every = self.config.evaluation.every_epochs
        if every is None:
            return False
        unit = Fraction(str(every)) * self.plan.examples
        return math.floor(before / unit) < math.floor(self.samples / unit)

    def _evaluate(self, phase) -> None:
        began = time.perf_counter()
        self.screen.busy("evaluating")
        position = {"step": self.steps, "samples": self.samples, "epoch": self.samples / self.plan.examples}
        self.evaluated = position | evaluate(
            self.programs.prepare_evaluation(phase).result(),
            *self.state.evaluated,
            self.datasets.evaluation,
            self.programs.evaluation_rows(phase),
            self.programs.mesh(phase),
        )
        self._write(self.evaluated)
        self.screen.evaluated(self.evaluated)
        self.clock = time.perf_counter()
        self.evaluation_seconds += self.clock - began

    def _result(self) -> TrainResult:
        phase, last = self.plan.phases[-1], self.evaluated
        return TrainResult(
            accuracy=last["eval_accuracy"],
            top5=last["eval_top5"],
            loss=last["eval_loss"],
            eval_examples=last["eval_examples"],
            steps=self.steps,
            samples=self.samples,
            epochs=self.samples / self.plan.examples,
            wall_seconds=time.monotonic() - self.started,
            seconds_to_first_step=self.first_step_seconds,
            training_seconds=self.training_seconds,
            evaluation_seconds=self.evaluation_seconds,
            images_per_second=self.samples / self.training_seconds,
            devices=phase.devices,
            device_kind=self.device_kind,
            mesh=(phase.vertical, phase.horizontal),
            versions={"jaxdp": __version__, "python": platform.python_version()}
            | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
            workdir=str(self.workdir),
            skipped_steps=self.skipped_steps,
            input_seconds=self.input_seconds,
            bad_images=self.datasets.bad_images,
            strategy=", ".join(dict.fromkeys(self.programs.strategy(phase) for phase in self.plan.phases)),
        )


def show_result(screen, result: TrainResult) -> None:
    skipped = f", {result.skipped_steps} of them skipped for a gradient that was not finite" if result.skipped_steps else ""
    screen.say(
        f"accuracy {100 * result.accuracy:.2f} %  (top-5 {100 * result.top5:.2f} %, all {result.eval_examples} held-out "
        f"images)  after {result.epochs:.1f} epochs, {result.steps} steps{skipped}"
    )
    screen.say(
        f"time {clock(result.wall_seconds)}, first step after {result.seconds_to_first_step:.0f} s, "
        f"{result.images_per_second:.0f} images/s without compilation and evaluation"
    )
    if result.bad_images:
        first = ", ".join(f"{name} ({reason})" for name, reason in list(result.bad_images.items())[:5])
        screen.say(f"{len(result.bad_images)} images could not be used and were replaced, all listed in result.json: {first}")
    files = [
        name
        for name in ("result.json", "metrics.jsonl", "training.png", "tensorboard")
        if (Path(result.workdir) / name).exists()
    ]
    screen.say(f"results in {result.workdir}: {', '.join(files)}")
