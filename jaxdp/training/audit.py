"""Audits in the training loop: which steps are audited, and how the run ends if an audit fails."""

import jax

from jaxdp.checkpoint.manager import Rollback
from jaxdp.distributed.process_group import barrier
from jaxdp.planning import PlannedPhase
from jaxdp.training import audit_program
from jaxdp.training.callback import Callback
from jaxdp.training.loop import complete_steps
from jaxdp.training.run import Run


class Audit(Callback):
    """Audits every `guard.audit_every_steps`-th step (see `jaxdp.training.audit_program`); attached with this field.

    Raises AuditFailed if a reduction differs from its reference; checkpoints later than the last audit are then renamed.
    """

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps
        self.phase: PlannedPhase | None = None

    def before_step(self, run: Run, batch: dict[str, jax.Array]) -> None:
        if run.phase is not self.phase:
            self.phase = run.phase
            if self._is_due_in_phase(run):
                run.compiler.prepare_audit(run.phase)
        step = run.progress.steps + 1
        if run.phase.devices > 1 and step % self.every_steps == 0:
            complete_steps(run)
            self._audit(run, batch, step)

    def _is_due_in_phase(self, run: Run) -> bool:
        """Whether any remaining step of the phase is audited."""
        phase, steps = run.phase, run.progress.steps
        remaining = -(-(phase.end - run.progress.samples) // phase.global_batch)
        return phase.devices > 1 and (steps + remaining) // self.every_steps > steps // self.every_steps

    def _audit(self, run: Run, batch: dict[str, jax.Array], step: int) -> None:
        processes, progress = run.processes, run.progress
        processes.set_activity("compile", step, "waiting for the audit's program")
        with run.clock.waiting_for_compiler():
            program = run.compiler.prepare_audit(run.phase).result()  # no check for a stop: the others would wait here
        processes.set_activity("audit", step)
        barrier(processes, f"the audit of step {step}")
        with run.clock.paused("audit"):
            findings = program(
                run.state, batch, run.compiler.hyperparameters(run.phase, run.plan.learning_rate(progress.samples))
            )
            all_findings = processes.all_gather_object("the audit's findings", findings, while_waiting=lambda: None)
            if error := audit_program.describe(all_findings, program, processes.hosts):
                raise audit_program.AuditFailed(self._fail(run, step, error))
            progress.audits, progress.audited_step = progress.audits + 1, step
            progress.audited_checkpoint = run.checkpoints.mark_audited()
        run.log(audit_share=max(finding["share"] for finding in all_findings))

    def _fail(self, run: Run, step: int, error: str) -> str:
        """Rename the checkpoints that may be wrong, and return the message of rank 0."""
        run.checkpoints.wait()
        rollback = run.checkpoints.quarantine_unaudited() if run.is_rank0 else Rollback(None, [], [])
        message = audit_program.failure_message(
            error, step, last_passed=run.progress.audited_step, rollback=rollback, resume_action=run.resume_action
        )
        return run.processes.all_gather_object("the audit's failure", message, while_waiting=lambda: None)[0]
