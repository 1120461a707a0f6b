"""The loop: the only place with effects. It feeds, steps, logs, evaluates and saves."""

import dataclasses
import math
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path

import jax

from jaxdp import models
from jaxdp.config import ConfigError
from jaxdp.data import feed
from jaxdp.data.groups import rows_a_group
from jaxdp.data.loader import DataError
from jaxdp.data.sources import keeps_images
from jaxdp.training import checkpoint, finetuning, guard, seal
from jaxdp.training import workdir as directories
from jaxdp.training.evaluation import evaluate
from jaxdp.training.log import Log
from jaxdp.training.metrics import to_json, writers_for
from jaxdp.training.prepared import Prepared
from jaxdp.training.profile import NoProfile, profile_of
from jaxdp.training.programs import Programs, mesh_of
from jaxdp.training.remarks import Remarks
from jaxdp.training.result import Progress, TrainResult, versions
from jaxdp.training.state import abstract_state, create_state, moved
from jaxdp.training.stop import Signals, StopAsked, Stopped
from jaxdp.training.strategy import chosen_strategies
from jaxdp.training.tensorboard import About, mesh_table
from jaxdp.training.watchdog import Watchdog
from jaxdp.validation import changes, from_dict


class Run:
    """One training run, from its first step or its newest checkpoint to its result."""

    def __init__(
        self,
        prepared: Prepared,
        workdir: Path,
        screen,
        started: float,
        signals: Signals,
        origin,
        accept_changes,
        weights=None,
        writers=(),
    ):
        self.prepared, self.config, self.plan, self.datasets = prepared, prepared.config, prepared.plan, prepared.datasets
        self.workdir, self.screen, self.started, self.signals = workdir, screen, started, signals
        self.origin, self.accept_changes, self.weights, self.own_writers = origin, accept_changes, weights, list(writers)
        self.device_kind = prepared.devices[0].device_kind
        self.team = team = signals.team
        pixels = (self.datasets.mean, self.datasets.std)
        self.model = models.create(self.config.model)
        strategies = chosen_strategies(self.plan, self.model, workdir, screen, team, partial(mesh_of, devices=prepared.devices))
        self.resident = keeps_images(self.config.data, self.datasets.train, prepared.devices[0].platform)
        images = self.datasets.train.images if self.resident else None
        evaluated = len(self.datasets.evaluation)
        self.programs = Programs(self.plan, self.model, pixels, evaluated, strategies, images, prepared.devices)
        folder = workdir / directories.CHECKPOINTS
        self.checkpoints = checkpoint.Checkpoints(folder, self.config.checkpoint, screen.say, team)
        minutes = self.config.guard.step_minutes
        self.watchdog = Watchdog(minutes and 60 * minutes, f"{screen.again} goes on from the last checkpoint")
        self.loss_watch = guard.LossWatch(self.config.model.classes, self.config.guard.exploding)
        self.progress = Progress()
        self.log = Log(self.config.logging.every_steps, started)
        self.remarks = Remarks(screen.say, self.datasets.train)
        self.profile = NoProfile()
        self.pending = deque()  # steps dispatched whose metrics have not been read

    def to_the_end(self) -> TrainResult:
        with ExitStack() as stack:
            stack.callback(self.programs.close)
            stack.callback(self.checkpoints.close)
            stack.enter_context(self.watchdog)
            try:
                self.signals.look()
                self._begin()
                stack.callback(self.log.close, self.screen.say)
                self._begin_log()
                stack.callback(self.profile.close)
                self.screen.begin(self.progress.steps + self._steps_left(), self.progress.steps)
                stack.callback(self.screen.end)
                self._phases()
                self.checkpoints.wait()
                self.checkpoints.check()
                result = self._result()
            except StopAsked:
                raise self._stopped() from None
            except guard.TrainingError as error:
                if not self.log.begun:
                    raise
                advice = "--resume {} with --accept-changes and a new --workdir goes on from there"
                raise guard.TrainingError(f"{error}; {self._good_checkpoint(advice)}") from None
            except DataError as error:
                if self.team.processes == 1:  # the others are in a step that this process cannot take
                    self._save_here()
                raise DataError(f"{error}; {self._good_checkpoint()}") from None
            if self.team.first:
                text = to_json(dataclasses.asdict(result), indent=2)
                directories.write_atomically(self.workdir / "result.json", text + "\n")
        return result

    def _begin_log(self) -> None:
        """What the first process writes, and traces; the others write nothing."""
        writers, say = [], self.screen.say
        if self.team.first:
            table = mesh_table(self.plan.phases, self.device_kind, self.programs.strategy)
            about = About(self.config, table, self.datasets.classes)
            patient = self.team.processes == 1
            writers = writers_for(self.workdir, self.config.logging.tensorboard, self.progress.samples, patient, say, about)
            writers += self.own_writers
            self.profile = profile_of(self.config, self.workdir, self.progress.steps, say)
        self.log.begin(writers, self.progress.wall_seconds)

    def _begin(self) -> None:
        """The state before the next step: of the newest sound checkpoint, of the one to go on from, or from the seed."""
        self.saved_at, self.saved_samples = time.monotonic(), None
        own = False
        try:
            found = self.checkpoints.restore(self._abstract)
            own = found is not None
        except checkpoint.Unfit as error:
            raise ConfigError(f"--workdir: {str(self.workdir)!r} is not allowed; {error}; give another one") from None
        if found is None and self.origin is not None:
            found = self._restored_from_origin()
        if found is None:
            finetuning.check_begins(self.config, self.weights)
        else:
            self.prepared.check_fits(found[1], self.accept_changes)
        if self.team.first:
            directories.adopt(self.workdir, self.config)
            directories.keep_class_names(self.workdir, self.datasets.classes)
        if found is None:
            self.screen.busy("compiling")
            self.team.at("compile")
            first = self.plan.phases[0]
            self.programs.prepare_train(first)
            mesh = self.programs.mesh(first)
            with self._compiling():
                self.state = self.signals.run(create_state, self.config, self.model, mesh)
            if self.weights is not None:
                self.state = finetuning.begun_from(self.config, self.weights, self.state, mesh)
                self.screen.say(finetuning.in_words(self.config, self.weights))
                self.weights = None
            self._cut_log(self.workdir)
            return
        self.state, sealed = found
        self.team.advice = f"{self.screen.again} goes on from {sealed.path}"
        self.progress = Progress(**sealed.told["progress"])
        self.progress.sessions += 1
        if own:
            self.saved_samples = self.progress.samples
        self.checkpoints.pinned = [*self.progress.pinned] if own else []
        self.loss_watch.told = self.progress.told_exploded
        if changes(from_dict(sealed.told["config"]), self.config):  # what was evaluated was another run's
            self.progress.evaluated = None
        self.datasets.add_bad_images(self.progress.bad_images)
        self._cut_log(sealed.path.parent.parent)
        self.screen.say(
            f"going on from {sealed.path}: epoch {self.progress.samples / self.plan.examples:.2f}, {self.progress.steps} steps"
        )

    def _cut_log(self, source: Path) -> None:
        if self.team.first:
            evaluated = self.progress.evaluated is not None and not self.progress.evaluation_due
            remark = directories.cut_log(source, self.workdir, self.progress.samples, evaluated)
            if remark:
                self.screen.say(remark)

    def _restored_from_origin(self):
        try:
            return checkpoint.load(self.origin, self._abstract(self.origin.samples)), self.origin
        except (seal.Damaged, checkpoint.Unfit) as error:
            raise ConfigError(f"--resume: {str(self.origin.path)!r} is not allowed; {error}") from None

    def _abstract(self, samples: int):
        return abstract_state(self.config, self.model, self.programs.mesh(self._phase_before(samples)))

    def _phase_before(self, samples: int):
        """The phase of the step that brought the run to so many samples."""
        return self.plan.phases[self.plan.phase_at(max(0, samples - 1))]

    def _steps_left(self) -> int:
        seen = self.progress.samples
        return sum(-(-max(0, phase.end - max(seen, phase.first_sample)) // phase.global_batch) for phase in self.plan.phases)

    def _stopped(self) -> Stopped:
        """Save where the run stands, and say how it goes on."""
        signal, progress = self.signals.asked, self.progress
        if not self._save_here():
            good = seal.newest_good(self.checkpoints.folder)
            goes_on = f"goes on from {good.path}" if good else "begins again"
            return Stopped(f"stopped by {signal} before the first step; {self.screen.again} {goes_on}")
        return Stopped(
            f"stopped by {signal} after step {progress.steps} (epoch {progress.samples / self.plan.examples:.2f}); "
            f"{self._good_checkpoint()}"
        )

    def _save_here(self) -> bool:
        """Save the last step taken, wherever the run is; False where none was."""
        self.watchdog.rest()
        if not self.log.begun or self.progress.steps == 0:
            return False
        self._fetch_all()
        if self.saved_samples != self.progress.samples:
            self._save()
        self.checkpoints.wait()
        self.checkpoints.check()
        return True

    def _good_checkpoint(self, advice: str | None = None) -> str:
        """What a person is to know of the newest checkpoint, for an error or at the end of a session."""
        self.checkpoints.wait()
        good = seal.newest_good(self.checkpoints.folder)
        if good is None:
            return "there is no checkpoint yet"
        advice = advice or f"{self.screen.again} goes on from it"
        accuracy = "" if good.accuracy is None else f", accuracy {100 * good.accuracy:.2f} %"
        epoch = good.samples / self.plan.examples
        return f"the last good checkpoint is {good.path} (epoch {epoch:.2f}{accuracy}); {advice.format(good.path)}"

    def _phases(self) -> None:
        for index, phase in enumerate(self.plan.phases):
            try:
                if self.progress.evaluation_due and phase is self._phase_before(self.progress.samples):
                    self._evaluate(phase)
                    self._save()
                if self.progress.samples < phase.end:
                    self._phase(index)
                if index + 1 == len(self.plan.phases):
                    self._finish(phase)
            except Exception as error:
                if not guard.is_out_of_memory(error):
                    raise
                raise ConfigError(guard.out_of_memory_message(phase, error)) from None

    def _finish(self, phase) -> None:
        """The evaluation at the end, if the last step was not evaluated already, and the last checkpoint."""
        progress = self.progress
        guard.check_skipped(progress.skipped_steps, progress.steps, self.config.loss_scale)
        if progress.evaluated is None or progress.evaluated["samples"] != progress.samples:
            progress.evaluation_due = True
            self._evaluate(phase)
        if not math.isfinite(progress.evaluated["eval_loss"]):
            raise guard.TrainingError(
                f"the held-out loss is {progress.evaluated['eval_loss']} after the last step ({progress.steps}, samples "
                f"{progress.samples}): the parameters are no longer finite; {guard.LOWER_THE_RATE}"
            )
        if self.saved_samples != progress.samples:
            self._save()

    def _phase(self, index: int) -> None:
        phase = self.plan.phases[index]
        self.team.at("compile")
        future = self.programs.prepare_train(phase)
        self.programs.prepare_evaluation(phase)
        mesh = self.programs.mesh(phase)
        self.state = moved(self.state, mesh)
        with self._compiling():
            step = self.signals.result(future)
        self._meet(f"phase {phase.index}")
        for later in self.plan.phases[index + 1 :]:
            self.programs.prepare_train(later)
            self.programs.prepare_evaluation(later)
        self._steps(phase, step, mesh)

    @contextmanager
    def _compiling(self):
        """Time in which the run waits for a program is counted."""
        began = time.perf_counter()
        yield
        self.progress.compilation_seconds += time.perf_counter() - began

    def _steps(self, phase, step, mesh) -> None:
        data, seen = self.config.data, self.progress.samples
        group = None
        if not self.resident:
            group = rows_a_group(phase.per_device_batch, phase.local_devices, data.image_bytes, data.ahead_bytes)
        feeder = feed.Feeder(
            self.datasets.train, self.config.seed, mesh, seen, phase.end, phase.global_batch, group, self.resident
        )
        try:
            self._steps_of(phase, step, feeder)
        finally:
            feeder.close()

    def _steps_of(self, phase, step, feeder) -> None:
        progress = self.progress
        self.clock = time.perf_counter()
        self.watchdog.busy(f"loading the first images of phase {phase.index}")
        batch = self._fed(feeder)
        self._meet(f"the first step of phase {phase.index}")
        while progress.samples < phase.end:
            self.signals.look()
            before = progress.samples
            self.watchdog.busy(f"step {progress.steps + 1} of phase {phase.index}")
            self.team.at("step", progress.steps + 1)
            asked, spent = time.monotonic(), self.profile.spent
            with self.profile.step(progress.steps + 1, self.state, step):
                self.state, metrics = step(self.state, batch, self.programs.hyperparameters(phase, before))
            progress.samples += phase.global_batch
            progress.steps += 1
            self.profile.taken(progress.steps, self.state)
            self.clock += self.profile.spent - spent
            progress.evaluation_due = self._crossed(self.config.evaluation.every_epochs, before, self.plan.examples)
            self.pending.append((self._record(phase, before), metrics, before == phase.first_sample, asked))
            batch = self._fed(feeder)
            self._fetch_all(but=1)
            if progress.evaluation_due:
                self._fetch_all()
                self._evaluate(phase)
            if self._save_due(phase, before):
                self._fetch_all()
                self._save()
        self._fetch_all()
        self.watchdog.rest()

    def _meet(self, what: str) -> None:
        """Wait until every process has come so far: the first collective of a program gives up on one that compiles longer."""
        if self.team.processes > 1:
            self.team.exchange(f"the others to be ready for {what}", None)

    def _fed(self, feeder):
        before = feeder.waited
        batch = feeder.next(self.signals.result)
        self.progress.input_seconds += feeder.waited - before
        self.log.waited += feeder.waited - before
        return batch

    def _record(self, phase, before: int) -> dict:
        """What is known of a step when it is dispatched; before: samples seen before it."""
        return {
            "step": self.progress.steps,
            "samples": self.progress.samples,
            "epoch": self.progress.samples / self.plan.examples,
            "phase": phase.index,
            "learning_rate": self.plan.learning_rate(before),
            "momentum": phase.momentum,
            "global_batch": phase.global_batch,
        }

    def _fetch_all(self, but: int = 0) -> None:
        """Read the metrics of the steps dispatched, `but` the last ones, and log them when their turn has come."""
        while len(self.pending) > but:
            self._fetch(*self.pending.popleft())

    def _fetch(self, record, metrics, first_of_phase, asked: float) -> None:
        progress = self.progress
        record |= {name: value.item() for name, value in jax.device_get(metrics).items()}
        self.team.stepped(record["step"], asked, time.monotonic())
        self.watchdog.busy(f"the step after step {record['step']}")
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        progress.training_seconds += seconds
        record = self.log.timed(record, seconds)
        if progress.first_step_seconds is None:
            progress.first_step_seconds = time.monotonic() - self.started
        progress.skipped_steps = record.get("skipped_steps", 0)
        guard.check_step(record, self.config)
        self.checkpoints.check()
        if (good_until := self.loss_watch.exploded(record)) is not None:
            good = self.checkpoints.pin(good_until)
            progress.told_exploded, progress.pinned = True, self.checkpoints.pinned
            kept = f"the last checkpoint before is {good.path}, which is kept" if good else "there is no checkpoint before"
            self.screen.say(self.loss_watch.remark(record, kept))
        self.remarks.input(record["step"], progress)
        self.remarks.bad_images(self.datasets.bad_images)
        self.screen.step(record)
        last = record["samples"] >= self.plan.total_samples
        if self.log.due(record) or first_of_phase or last:
            self.log.step(record | self._waiting())

    def _waiting(self) -> dict:
        """What is known of processes that others wait for, for the log."""
        if not (waiting := self.team.waiting()):
            return {}
        self.remarks.waiting(waiting)
        slowest = waiting["slowest"][0]
        return {"waiting_share": waiting["waiting_share"], "slowest_rank": slowest["rank"]}

    def _crossed(self, every, before: int, unit: int) -> bool:
        """Whether the last step passed a multiple of `every` units of `unit` samples; never, where `every` is None."""
        if every is None:
            return False
        interval = Fraction(str(every)) * unit
        return math.floor(before / interval) < math.floor(self.progress.samples / interval)

    def _evaluate(self, phase) -> None:
        progress = self.progress
        self.screen.busy("evaluating")
        self.team.at("evaluate")
        self.watchdog.rest()
        with self._compiling():
            program = self.signals.result(self.programs.prepare_evaluation(phase))
        began = time.perf_counter()
        self._meet("evaluation")
        position = {"step": progress.steps, "samples": progress.samples, "epoch": progress.samples / self.plan.examples}
        examples = self.log.examples(len(self.datasets.evaluation))
        progress.evaluated = position | evaluate(
            program,
            *self.state.evaluated,
            self.datasets.evaluation,
            self.programs.evaluation_rows(phase),
            self.programs.mesh(phase),
            self._between_evaluation_batches,
            self.signals.result,
            examples,
        )
        self.watchdog.rest()
        self.log.evaluation(progress.evaluated, examples)
        self.screen.evaluated(progress.evaluated)
        progress.evaluation_due = False
        self.clock = time.perf_counter()
        progress.evaluation_seconds += self.clock - began

    def _between_evaluation_batches(self) -> None:
        self.signals.look()
        self.watchdog.busy("a batch of the evaluation")

    def _save_due(self, phase, before: int) -> bool:
        """At the end of a phase but the last (the end of the run is saved after its evaluation), or when it is time."""
        due = self.config.checkpoint
        if self.progress.samples >= phase.end:
            return phase is not self.plan.phases[-1]
        minutes = due.every_minutes is not None and time.monotonic() - self.saved_at >= 60 * due.every_minutes
        minutes = (minutes and self.team.first and self.team.ask("save")) or "save" in self.signals.wanted
        self.signals.wanted.discard("save")
        epochs = self._crossed(due.every_epochs, before, self.plan.examples)
        return minutes or epochs or self._crossed(due.every_samples, before, 1)

    def _save(self) -> None:
        """Begin a checkpoint of the state as it is; all metrics up to here have been read and logged."""
        progress, began = self.progress, time.perf_counter()
        self.watchdog.rest()
        self.team.at("save")
        self.saved_at, self.saved_samples = time.monotonic(), progress.samples
        evaluated = progress.evaluated
        here = evaluated is not None and evaluated["samples"] == progress.samples
        told = {
            "progress": dataclasses.asdict(self._progress_now()),
            "accuracy": evaluated["eval_accuracy"] if here else None,
            "epoch": progress.samples / self.plan.examples,
            "config": dataclasses.asdict(self.config),
            "versions": versions(),
            "data": self.prepared.data_facts,
            "per_worker_batch": {phase.index: [phase.global_batch, phase.per_worker_batch] for phase in self.plan.phases},
        }
        self.checkpoints.save(self.state, progress.samples, told, self.log.sync)
        self.clock = time.perf_counter()
        progress.saving_seconds += self.clock - began

    def _progress_now(self) -> Progress:
        return dataclasses.replace(self.progress, **self.log.wall, bad_images=self.datasets.bad_images)

    def _result(self) -> TrainResult:
        progress = self._progress_now()
        bad_images = {name: why for one in self.team.exchange("bad images", progress.bad_images) for name, why in one.items()}
        waiting = self.team.waiting(whole=True)
        return TrainResult.of(
            dataclasses.replace(progress, bad_images=bad_images),
            self.plan,
            device_kind=self.device_kind,
            workdir=str(self.workdir),
            strategy=", ".join(dict.fromkeys(self.programs.strategy(phase) for phase in self.plan.phases)),
            processes=self.team.processes,
            hosts=len(set(self.team.host_numbers)),
            waiting_share=waiting.get("waiting_share", 0.0),
            slowest=waiting.get("slowest", []),
        )
