"""Audits in the training loop: when the program of `jaxdp.training.audit_program` runs, and how the run ends if it fails."""

import jax

from jaxdp.checkpoint.manager import CheckpointManager, Rollback
from jaxdp.distributed.preemption import SignalHandler
from jaxdp.distributed.process_group import barrier
from jaxdp.planning import PlannedPhase
from jaxdp.training import audit_program
from jaxdp.training.run_setup import RunSetup
from jaxdp.training.state import TrainState
from jaxdp.training.step_compiler import StepCompiler
from jaxdp.training.step_timer import StepTimer


class Auditor:
    """Decides which steps are audited and runs the audit (see `jaxdp.training.audit_program`).

    resume_action: what resumes the run, as the subject of a sentence.
    """

    def __init__(
        self,
        setup: RunSetup,
        compiler: StepCompiler,
        *,
        timer: StepTimer,
        checkpoints: CheckpointManager,
        signals: SignalHandler,
        resume_action: str,
    ) -> None:
        self.compiler, self.timer, self.progress, self.checkpoints = compiler, timer, timer.progress, checkpoints
        self.signals, self.group, self.resume_action = signals, signals.group, resume_action
        self.every_steps = setup.config.guard.audit_every_steps

    def is_due(self, phase: PlannedPhase) -> bool:
        """Whether the next step is audited."""
        return self.every_steps is not None and phase.devices > 1 and (self.progress.steps + 1) % self.every_steps == 0

    def is_due_in(self, phase: PlannedPhase) -> bool:
        """Whether any remaining step of the phase is audited."""
        if self.every_steps is None or phase.devices == 1:
            return False
        steps, remaining = self.progress.steps, -(-(phase.end - self.progress.samples) // phase.global_batch)
        return (steps + remaining) // self.every_steps > steps // self.every_steps

    def wait_for_program(self, phase: PlannedPhase) -> audit_program.AuditProgram:
        """The compiled audit of a phase, when every process has it."""
        step = self.progress.steps + 1
        self.group.set_activity("compile", step, "waiting for the audit's program")
        with self.timer.waiting_for_compiler():
            program = self.signals.wait_for(self.compiler.prepare_audit(phase))
            self.group.set_activity("audit", step)
            barrier(self.group, f"the audit of step {step}")
        return program

    def run(
        self, program: audit_program.AuditProgram, state: TrainState, batch: dict[str, jax.Array], *, phase: PlannedPhase
    ) -> dict[str, float]:
        """Audit the next step and return its fields of the log.

        Raises AuditFailed if a reduction differs from its reference; checkpoints later than the last audit are then renamed.
        """
        progress, step = self.progress, self.progress.steps + 1
        with self.timer.paused("audit"):
            findings = program(state, batch, self.compiler.hyperparameters(phase, progress.samples))
            # No check for a stop: if one process stopped here, the rest would wait in the collectives of the step.
            all_findings = self.group.all_gather_object("the audit's findings", findings, while_waiting=lambda: None)
            if error := audit_program.describe(all_findings, program, self.group.hosts):
                self.checkpoints.wait()
                rollback = self.checkpoints.quarantine_unaudited() if self.group.is_rank0 else Rollback(None, [], [])
                message = audit_program.failure_message(
                    error, step, last_passed=progress.audited_step, rollback=rollback, resume_action=self.resume_action
                )
                messages = self.group.all_gather_object("the audit's failure", message, while_waiting=lambda: None)
                raise audit_program.AuditFailed(messages[0])
            progress.audits, progress.audited_step = progress.audits + 1, step
            progress.audited_checkpoint = self.checkpoints.mark_audited()
        return {"audit_share": max(finding["share"] for finding in all_findings)}
