"""Evaluations in the training loop: runs `jaxdp.training.evaluation`, then logs, shows and records the result."""

from collections.abc import Callable
from typing import Any

from jaxdp.distributed.preemption import SignalHandler
from jaxdp.distributed.process_group import barrier
from jaxdp.loggers.console import Quiet, Screen
from jaxdp.loggers.step_log import StepLog
from jaxdp.planning import PlannedPhase
from jaxdp.training.early_stopping import EarlyStopping
from jaxdp.training.evaluation import evaluate
from jaxdp.training.run_setup import RunSetup
from jaxdp.training.state import on_mesh
from jaxdp.training.step_compiler import StepCompiler
from jaxdp.training.step_timer import StepTimer


class Evaluator:
    """Evaluates parameters on the devices of a phase; logs, shows and records the result.

    stopping: whether the evaluation is the best so far, and whether it ends the run.
    """

    def __init__(
        self,
        setup: RunSetup,
        compiler: StepCompiler,
        *,
        timer: StepTimer,
        log: StepLog,
        signals: SignalHandler,
        screen: Screen | Quiet,
    ) -> None:
        self.setup, self.compiler, self.timer, self.progress = setup, compiler, timer, timer.progress
        self.log, self.signals, self.group, self.screen = log, signals, signals.group, screen
        self.stopping = EarlyStopping(setup.config, self.progress, self.group)

    def evaluate(self, evaluated: Callable[[], tuple[dict, dict]], phase: PlannedPhase) -> dict[str, Any]:
        """Evaluate all held-out images and return the record. Raises StopTraining between two batches if the run must stop.

        evaluated: returns (params, batch_stats), whole on every device.
        """
        progress, source, mesh = self.progress, self.setup.datasets.evaluation, self.compiler.mesh(phase)
        self.screen.status("evaluating")
        self.group.set_activity("compile", progress.steps, "waiting for the evaluation's program")
        with self.timer.waiting_for_compiler():
            program = self.signals.wait_for(self.compiler.prepare_evaluation(phase))
        self.group.set_activity("evaluate")
        with self.timer.paused("evaluation"):
            barrier(self.group, "evaluation")
            self.signals.pass_sync_point()  # before the collectives that gather the parameters
            params, batch_stats = on_mesh(evaluated(), mesh)
            examples = self.log.example_collector(len(source))
            record: dict[str, Any] = progress.position(self.setup.plan.examples)
            record |= evaluate(
                program,
                params,
                batch_stats,
                source=source,
                batch=self.compiler.evaluation_rows(phase),
                mesh=mesh,
                before_batch=self._before_batch,
                wait_for=self.signals.wait_for,
                observer=examples,
            )
            self.group.set_activity("evaluate", detail="writing the log")
            self.log.write_evaluation(record, examples)
            self.screen.evaluated(record)
            self.stopping.update(record)
            progress.finish_evaluation(record)
        return record

    def _before_batch(self) -> None:
        self.signals.pass_sync_point()
        self.group.status.begin_iteration("evaluate")
        self.group.set_activity("evaluate", detail="a batch")
