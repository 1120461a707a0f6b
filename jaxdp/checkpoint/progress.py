"""Counters and records of a run that every checkpoint stores beside the arrays."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field


@dataclass
class Progress:
    """Position and history of a run, saved with every checkpoint. Seconds add up over all sessions of the run.

    first_step_seconds: from the start of the command to the first step, in the last session that took one.
    last_evaluation: record of the last evaluation. evaluation_due: an evaluation is due at this position and has not run.
    best, improved, not_improved: of early stopping: record of the best evaluation, value of the metric at the last evaluation
    that improved, and number of evaluations since.
    retained: samples of checkpoints that are never removed. audits: number of audits that passed; audited_step: step of the
    last one; audited_checkpoint: samples of the newest checkpoint at that time. loss_exploded: the warning about an exploded
    loss was shown. sessions: number of times the run was started.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    samples: Annotated[int, Field(ge=0, lt=2**63)] = 0
    steps: Annotated[int, Field(ge=0, lt=2**63)] = 0
    wall_seconds: float = 0.0
    training_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    input_seconds: float = 0.0
    saving_seconds: float = 0.0
    audit_seconds: float = 0.0
    compilation_seconds: float = 0.0
    first_step_seconds: float | None = None
    last_evaluation: dict | None = None
    evaluation_due: bool = False
    best: dict | None = None
    improved: float | None = None
    not_improved: int = 0
    skipped_steps: int = 0
    bad_images: dict = dataclasses.field(default_factory=dict)
    retained: list = dataclasses.field(default_factory=list)
    audits: int = 0
    audited_step: int | None = None
    audited_checkpoint: int | None = None
    loss_exploded: bool = False
    sessions: int = 1

    def position(self, examples: int) -> dict[str, Any]:
        """Step, samples and epoch, for a record of the log. examples: images of an epoch."""
        return {"step": self.steps, "samples": self.samples, "epoch": self.samples / examples}

    def next_session(self) -> "Progress":
        """The progress at the start of another session."""
        return dataclasses.replace(self, sessions=self.sessions + 1)

    def count_sessions(self, earlier: int) -> None:
        """Count sessions that were killed before they saved. earlier: number of sessions before this one, or less."""
        self.sessions = max(self.sessions, earlier + 1)

    def add_seconds(self, activity: str, seconds: float) -> None:
        """Add to the seconds of "training", "evaluation", "input", "saving", "audit" or "compilation"."""
        name = f"{activity}_seconds"
        setattr(self, name, getattr(self, name) + seconds)

    def finish_step(self, samples: int) -> None:
        """Count a step that was dispatched."""
        self.steps += 1
        self.samples += samples

    def record_first_step(self, seconds: float) -> None:
        """Set the time to the first step of this session."""
        self.first_step_seconds = seconds

    def record_skipped_steps(self, total: int) -> None:
        self.skipped_steps = total

    def request_evaluation(self) -> None:
        """Mark an evaluation as due, so that a run that stops before it is over repeats it."""
        self.evaluation_due = True

    def finish_evaluation(self, record: dict[str, Any]) -> None:
        self.last_evaluation, self.evaluation_due = record, False

    def discard_evaluation(self) -> None:
        """Forget the last evaluation, which was of another configuration."""
        self.last_evaluation = None

    def finish_audit(self, step: int, checkpoint: int | None) -> None:
        """Count an audit that passed. checkpoint: samples of the newest checkpoint."""
        self.audits, self.audited_step, self.audited_checkpoint = self.audits + 1, step, checkpoint

    def record_explosion(self, retained: list[int]) -> None:
        """Record that the warning about an exploded loss was shown. retained: see the field."""
        self.loss_exploded, self.retained = True, [*retained]
