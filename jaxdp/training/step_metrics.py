"""Metrics of steps: read from the devices after the next step was dispatched, then checked, shown and logged."""

import time
from collections import deque
from typing import Any, NamedTuple

import jax

from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.config import chance_loss
from jaxdp.distributed.preemption import SignalHandler
from jaxdp.loggers.console import Quiet, Screen
from jaxdp.loggers.step_log import StepLog
from jaxdp.loggers.warnings import RunWarnings
from jaxdp.planning import PlannedPhase
from jaxdp.training import health
from jaxdp.training.run_setup import RunSetup
from jaxdp.training.step_timer import StepTimer


class DispatchedStep(NamedTuple):
    """A step whose metrics may still be computed on the devices.

    record: what is known without them. metrics: scalars on the devices. dispatched: `time.monotonic()` of the dispatch.
    """

    record: dict[str, Any]
    metrics: dict[str, jax.Array]
    first_of_phase: bool
    dispatched: float


class StepMetrics:
    """Queue of dispatched steps. `drain` waits for their metrics and logs them in order.

    Reading metrics one step late keeps the devices busy: they compute a step while the host handles the previous one.
    """

    def __init__(
        self,
        setup: RunSetup,
        *,
        timer: StepTimer,
        log: StepLog,
        checkpoints: CheckpointManager,
        signals: SignalHandler,
        screen: Screen | Quiet,
    ) -> None:
        self.setup, self.timer, self.progress, self.log = setup, timer, timer.progress, log
        self.checkpoints, self.group, self.screen = checkpoints, signals.group, screen
        self.loss_watch = health.LossWatch(chance_loss(setup.config), reported=self.progress.loss_exploded)
        self.warnings = RunWarnings(screen.info, setup.datasets.train)
        self.pending: deque[DispatchedStep] = deque()

    def enqueue(
        self, phase: PlannedPhase, metrics: dict[str, jax.Array], *, before: int, dispatched: float, audited: dict[str, float]
    ) -> None:
        """Add the step that was just dispatched. before: samples seen before it. audited: fields of the log from its audit."""
        plan = self.setup.plan
        record = self.progress.position(plan.examples) | {
            "phase": phase.index,
            "learning_rate": plan.learning_rate(before),
            "momentum": phase.momentum,
            "global_batch": phase.global_batch,
        }
        self.pending.append(DispatchedStep(record | audited, metrics, before == phase.first_sample, dispatched))

    def drain(self, keep: int = 0) -> None:
        """Read and log the metrics of all steps but the last `keep`. Raises TrainingError if a step makes the run fail."""
        while len(self.pending) > keep:
            self._finish(self.pending.popleft())

    def _finish(self, step: DispatchedStep) -> None:
        record = step.record | {name: value.item() for name, value in jax.device_get(step.metrics).items()}
        self.group.record_step(record["step"], step.dispatched, time.monotonic())
        self.group.status.record_progress()
        record = self.log.add_throughput(record, self.timer.end_step())
        self.progress.record_skipped_steps(record.get("skipped_steps", 0))
        health.check_step(record, self.setup.config)
        self.checkpoints.check()
        self._check_explosion(record)
        progress = self.progress
        self.warnings.check_input(
            record["step"],
            images=progress.samples,
            seconds=progress.training_seconds,
            input_seconds=progress.input_seconds,
        )
        self.warnings.check_bad_images(self.setup.datasets.bad_images)
        self.screen.step(record)
        is_last = record["samples"] >= self.setup.plan.total_samples
        if self.log.is_due(record) or step.first_of_phase or is_last or "audit_share" in record:
            with self.group.status.performing("writing the log"):
                self.log.write_step(record | self._straggler_record())

    def _check_explosion(self, record: dict[str, Any]) -> None:
        """Warn once if the loss exploded, and never remove the newest checkpoint from before."""
        samples = self.loss_watch.last_good_samples(record)
        if samples is None:
            return
        retained = self.checkpoints.retain_latest(samples)
        self.progress.record_explosion(self.checkpoints.retention.retained)
        path = retained and retained.path
        kept = f"the last checkpoint before that, {path}, is kept" if path else "there is no checkpoint from before that"
        self.screen.info(self.loss_watch.warning(record, kept))

    def _straggler_record(self) -> dict[str, Any]:
        """Fields of the log about processes that other processes wait for; {} if nothing is known."""
        report = self.group.straggler_report()
        if not report:
            return {}
        self.warnings.check_stragglers(report)
        return {"waiting_share": report["waiting_share"], "slowest_rank": report["slowest"][0]["rank"]}
