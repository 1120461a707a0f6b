"""The training loop: restore or initialize, then step, log, evaluate and save until the plan is done."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxdp import models
from jaxdp.checkpoint.progress import Progress
from jaxdp.config import chance_loss
from jaxdp.data import prefetch
from jaxdp.data.loader import DataError
from jaxdp.distributed.preemption import ForcedStop, SignalHandler, StopTraining
from jaxdp.distributed.process_group import barrier
from jaxdp.errors import TrainingError
from jaxdp.files import write_atomically
from jaxdp.loggers.console import Quiet, Screen
from jaxdp.loggers.step_log import StepLog
from jaxdp.loggers.writers import Writer, to_json
from jaxdp.optim import check_elementwise
from jaxdp.planning import PlannedPhase
from jaxdp.schedules import interval_elapsed
from jaxdp.training import health
from jaxdp.training.audit_program import AuditFailed
from jaxdp.training.auditor import Auditor
from jaxdp.training.autotune import check_registered_strategy, chosen_reductions
from jaxdp.training.evaluator import Evaluator
from jaxdp.training.initialize import StartPoint, restore_or_initialize
from jaxdp.training.mirror import Mirror, MirrorFollower, location_of
from jaxdp.training.placement import Replicated
from jaxdp.training.result import TrainResult
from jaxdp.training.run_checkpoints import RunCheckpoints
from jaxdp.training.run_log import open_profile, open_writers
from jaxdp.training.run_setup import RunSetup
from jaxdp.training.state import TrainState
from jaxdp.training.step_compiler import StepCompiler, mesh_of
from jaxdp.training.step_metrics import StepMetrics

LOG_EVERY, FEWEST_LOG_LINES = 10, 20  # steps between lines; lines of a run of at least as many steps


class Trainer:
    """Trains one run in a locked directory. `fit` is called once.

    started: `time.monotonic()` at the start of the command. writers: receive every record, beside those of the config. mirror:
    uploads the directory of a run at a URL.
    """

    def __init__(
        self,
        setup: RunSetup,
        workdir: Path,
        start: StartPoint,
        *,
        signals: SignalHandler,
        screen: Screen | Quiet,
        started: float,
        writers: Sequence[Writer],
        mirror: Mirror | MirrorFollower | None = None,
    ) -> None:
        self.setup, self.config, self.plan = setup, setup.config, setup.plan
        self.workdir, self.start, self.started, self.writers, self.mirror = workdir, start, started, writers, mirror
        self.signals, self.group, self.screen = signals, signals.group, screen
        every = self.config.logging.every_steps or min(LOG_EVERY, max(1, self.plan.total_steps // FEWEST_LOG_LINES))
        self.log = StepLog(every, started)
        self.placement: Replicated | None = None  # of the state; None while it is as it was restored or initialized

    def position(self) -> dict[str, Any]:
        """{"samples", "wall_seconds"} of the last step and the number of "sessions" for an event; {} before the log is open."""
        if not self.log.is_open:
            return {}
        return {"samples": self.progress.samples, "sessions": self.progress.sessions} | self.log.wall_time

    def fit(self) -> TrainResult:
        """Train to the end of the plan or to an early stop, from the newest checkpoint if there is one; write result.json.

        Raises Stopped after a stop signal, TrainingError if the run cannot continue, ConfigError if it cannot start.
        """
        with ExitStack() as stack:
            self._open_compiler_and_checkpoints(stack)
            with self._saving_before_exit():
                self.signals.pass_sync_point()
                self.state, self.timer, logged = restore_or_initialize(
                    self.setup,
                    self.workdir,
                    self.start,
                    compiler=self.compiler,
                    checkpoints=self.checkpoints,
                    signals=self.signals,
                    screen=self.screen,
                    command_start=self.started,
                )
                if self.mirror is not None:
                    self.mirror.begin(self.checkpoints.manager.retention)
                self.progress = self.timer.progress
                self._open_log(stack, logged)
                for index, phase in enumerate(self.plan.phases):
                    with health.out_of_memory_as_config_error(phase):
                        if self.progress.evaluation_due and phase is self.plan.phase_before(self.progress.samples):
                            self.evaluator.evaluate(self._evaluated, phase)  # the previous session stopped before or during it
                            self._save()
                        if self.evaluator.stopping.ends_run:
                            break
                        if self.progress.samples < phase.end:
                            self._train_phase(phase, self.plan.phases[index + 1 :])
                phase = self.plan.phase_before(self.progress.samples)
                with health.out_of_memory_as_config_error(phase):
                    self._finish(phase)
                self.group.set_activity("finish", self.progress.steps, "waiting for the last save")
                self.checkpoints.wait()
                result = TrainResult.collect(
                    self._progress_now(),
                    self.setup,
                    workdir=location_of(self.workdir, self.mirror),
                    evaluation=self.checkpoints.result_evaluation(self.progress),
                    stop_reason=self.evaluator.stopping.reason() if self.progress.samples < self.plan.total_samples else None,
                    strategies=[self.compiler.shown_strategy(phase) for phase in self.plan.phases[: phase.index + 1]],
                    group=self.group,
                    save_error=self.checkpoints.manager.last_error,
                )
            self.group.set_activity("finish", detail="writing the result")
            if self.group.is_rank0:
                write_atomically(self.workdir / "result.json", to_json(dataclasses.asdict(result), indent=2) + "\n")
        return result

    def _open_compiler_and_checkpoints(self, stack: ExitStack) -> None:
        group, model, devices = self.group, models.create(self.config.model), self.setup.devices
        group.set_activity("compile", detail="choosing the all-reduce strategy")
        mesh_on_devices = partial(mesh_of, devices=devices)
        reductions = chosen_reductions(
            self.plan,
            model,
            self.workdir,
            screen=self.screen,
            group=group,
            mesh_of=mesh_on_devices,
            before_measuring=self.signals.pass_sync_point,
        )
        check_registered_strategy(self.plan, mesh_on_devices, self.signals.pass_sync_point)
        if any(reduce.update == "sharded" for reduce in (self.config.reduce, *reductions.values())):
            check_elementwise(self.config.optimizer)
        self.compiler = StepCompiler.for_run(self.setup, model, reductions)
        stack.callback(self.compiler.close)
        self.checkpoints = RunCheckpoints(
            self.setup, self.workdir, signals=self.signals, screen=self.screen, mirror=self.mirror
        )
        stack.callback(self.checkpoints.manager.close)

    def _open_log(self, stack: ExitStack, logged: list[dict[str, Any]]) -> None:
        """Open the log, the profile and the progress bar, and create the objects that use them. logged: see `StepLog.open`."""
        group, screen, timer, signals, log = self.group, self.screen, self.timer, self.signals, self.log
        stack.callback(log.close, screen.info)
        stack.push(self._wait_for_save_after_error)
        samples, steps, checkpoints = self.progress.samples, self.progress.steps, self.checkpoints.manager
        writers = open_writers(self.setup, self.workdir, compiler=self.compiler, samples=samples, group=group, screen=screen)
        self.profile = open_profile(self.setup, self.workdir, steps=steps, group=group, screen=screen)
        log.open([*writers, *self.writers] if group.is_rank0 else [], self.progress.wall_seconds, logged)
        stack.callback(self.profile.close)
        setup, compiler, again = self.setup, self.compiler, screen.resume_action
        self.metrics = StepMetrics(setup, timer=timer, log=log, checkpoints=checkpoints, signals=signals, screen=screen)
        self.evaluator = Evaluator(setup, compiler, timer=timer, log=log, signals=signals, screen=screen)
        self.auditor = Auditor(setup, compiler, timer=timer, checkpoints=checkpoints, signals=signals, resume_action=again)
        screen.begin(steps + self.plan.steps_after(samples), steps, self.config.logging.print_seconds)
        stack.callback(screen.end)

    def _wait_for_save_after_error(self, error_type: type[BaseException] | None, *_: object) -> None:
        """After an error in a run of one process, wait for the save in progress, which needs the log. With several
        processes the save may wait for a process that has failed."""
        if error_type and not issubclass(error_type, ForcedStop) and self.group.num_processes == 1:
            self.checkpoints.manager.wait()

    def _train_phase(self, phase: PlannedPhase, later_phases: tuple[PlannedPhase, ...]) -> None:
        """Compile and take the remaining steps of a phase; compile the later phases in the background."""
        self.group.set_activity("compile")
        compiled_step = self.compiler.prepare_train(phase)
        self.compiler.prepare_evaluation(phase)
        mesh = self.compiler.mesh(phase)
        if (placement := self.compiler.placement(phase)) is not self.placement:
            self.signals.pass_sync_point()  # before the collectives that gather the state
            self.state, self.placement = placement.place(self._whole_state()), placement
        with self.timer.waiting_for_compiler():
            train_step = self.signals.wait_for(compiled_step)
        barrier(self.group, f"phase {phase.index}")
        for later in later_phases:
            self.compiler.prepare_train(later)
            self.compiler.prepare_evaluation(later)
        if self.auditor.is_due_in(phase):
            self.compiler.prepare_audit(phase)
        resident = self.compiler.images is not None
        with closing(self.setup.open_batches(phase, mesh, self.progress.samples, resident=resident)) as batches:
            self._run_steps(phase, train_step, batches)

    def _run_steps(self, phase: PlannedPhase, train_step: Callable, batches: prefetch.DeviceIterator) -> None:
        progress, group = self.progress, self.group
        self.timer.restart()
        batch = self._next_batch(batches)
        barrier(group, f"the first step of phase {phase.index}")
        while batch is not None:
            audit_program = None
            if self.auditor.is_due(phase):
                self.metrics.drain()
                audit_program = self.auditor.wait_for_program(phase)

            # From the sync point to the step no process may stop alone: the rest would wait in a collective forever.
            self.signals.pass_sync_point()
            group.status.begin_iteration("step")
            audited = self.auditor.run(audit_program, self.state, batch, phase=phase) if audit_program else {}
            group.set_activity("step", progress.steps + 1, "starting the step")
            before, dispatched, profiling_seconds = progress.samples, time.monotonic(), self.profile.overhead_seconds
            with self.profile.step(progress.steps + 1, self.state, train_step):
                self.state, metrics = train_step(self.state, batch, self.compiler.hyperparameters(phase, before))
            progress.finish_step(phase.global_batch)
            self.profile.after_step(progress.steps, self.state)
            self.timer.exclude(self.profile.overhead_seconds - profiling_seconds)

            every, examples = self.config.evaluation.every_epochs, self.plan.examples
            if interval_elapsed(every, unit=examples, before=before, after=progress.samples):
                progress.evaluation_due = True  # a run that stops before it is over repeats it
            self.metrics.enqueue(phase, metrics, before=before, dispatched=dispatched, audited=audited)
            batch = self._next_batch(batches)
            group.set_activity("step", progress.steps, "waiting for the results of the previous step")
            self.metrics.drain(keep=1)
            if progress.evaluation_due:
                self.metrics.drain()
                self.evaluator.evaluate(self._evaluated, phase)
            is_due = self.checkpoints.is_due(phase, before=before, after=progress.samples)
            if is_due or self.evaluator.stopping.is_best:
                self.metrics.drain()
                self._save()
            if self.evaluator.stopping.ends_run:
                break
        self.metrics.drain()

    def _next_batch(self, batches: prefetch.DeviceIterator) -> dict[str, jax.Array] | None:
        """The next batch on the devices; None after the last of the phase."""
        waited = batches.wait_seconds
        self.group.set_activity("load", self.progress.steps + 1, "waiting for images")
        batch = batches.next(self.signals.wait_for)
        self.progress.add_seconds("input", batches.wait_seconds - waited)
        self.log.add_input_seconds(batches.wait_seconds - waited)
        return batch

    def _finish(self, phase: PlannedPhase) -> None:
        """Evaluate and save after the last step, unless that was done. Raises TrainingError if the run has not succeeded."""
        progress = self.progress
        health.check_skipped(progress.skipped_steps, progress.steps, self.config.loss_scale)
        evaluation = progress.last_evaluation
        if is_new := evaluation is None or evaluation["samples"] != progress.samples:
            progress.evaluation_due = True  # a run that stops before it is over repeats it
            evaluation = self.evaluator.evaluate(self._evaluated, phase)
        health.check_evaluation(progress.best or evaluation)
        if warning := health.chance_level_warning(progress.best or evaluation, chance_loss(self.config)):
            self.screen.info(warning)
        if is_new or self.checkpoints.saved_samples != progress.samples:
            self._save()

    def _whole_state(self) -> TrainState:
        """The state, whole on every device of its mesh."""
        return self.placement.gather_state(self.state) if self.placement else self.state

    def _evaluated(self) -> tuple[dict, dict]:
        """(params, batch_stats) of an evaluation, whole on every device of their mesh."""
        return self.placement.evaluated(self.state) if self.placement else self.state.evaluated

    def _save(self) -> None:
        with self.timer.paused("saving"):
            self.checkpoints.save(self._whole_state(), self._progress_now(), placed=self.state, sync_log=self.log.sync)

    def _progress_now(self) -> Progress:
        wall_seconds, bad_images = self.log.wall_time["wall_seconds"], self.setup.datasets.bad_images
        return dataclasses.replace(self.progress, wall_seconds=wall_seconds, bad_images=bad_images)

    @contextmanager
    def _saving_before_exit(self) -> Iterator[None]:
        """Save the last step before a stop signal or unusable data end the run; add how to resume to errors."""
        try:
            with self._adding_resume_advice():
                yield
        except StopTraining:
            saved = self.progress if self._save_last_step() else None
            raise self.checkpoints.stop_exception(self.signals.stop_reason, saved) from None
        except DataError as error:
            if self.group.num_processes == 1:  # other processes are already in a step that this one cannot take
                self._save_last_step()
            raise DataError(f"{error}; {self.checkpoints.describe_latest()}") from None

    @contextmanager
    def _adding_resume_advice(self) -> Iterator[None]:
        """Add the checkpoint to resume from to a TrainingError, except to AuditFailed, which names it already."""
        try:
            yield
        except AuditFailed:
            raise
        except TrainingError as error:
            if not self.log.is_open:
                raise
            advice = "to resume from it with changes, use --resume {path} --accept-changes and a new --workdir"
            raise TrainingError(f"{error}; {self.checkpoints.describe_latest(advice)}") from None

    def _save_last_step(self) -> bool:
        """Save the state after the last step, unless no step has run or it is saved. Returns whether a step has run."""
        if not self.log.is_open or self.progress.steps == 0:
            return False
        with self._adding_resume_advice():
            self._drain_and_save()
        return True

    def _drain_and_save(self) -> None:
        self.group.set_activity("save", self.progress.steps, "waiting for the steps in progress")
        self.metrics.drain()
        if self.checkpoints.saved_samples != self.progress.samples:
            self._save()
        self.checkpoints.wait()
