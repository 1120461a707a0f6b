"""Counters and records of a run that every checkpoint stores with the arrays."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat

Count = Annotated[int, Field(ge=0, lt=2**63)]
POSITION = ("step", "samples", "epoch")


def _with_position(record: dict[str, float]) -> dict[str, float]:
    if missing := [name for name in POSITION if name not in record]:
        raise ValueError(f"lacks {missing[0]}")
    return record


Evaluation = Annotated[dict[str, float], AfterValidator(_with_position)]  # an evaluation's record


@dataclass
class Progress:
    """Position and history of a run, saved with every checkpoint. Seconds add up over all sessions of the run.

    first_step_seconds: from the start of the command to the first step, in the last session that took one. last_evaluation:
    record of the last evaluation. evaluation_due: an evaluation was requested and has not run. It follows step evaluation_step.
    best, not_improved (early stopping): record of the best evaluation, and number of evaluations since the last one that
    improved. retained: samples of checkpoints that are never removed. audits: number of audits that passed; audited_step: step
    of the last one; audited_checkpoint: samples of the newest checkpoint at that time. loss_exploded: the warning about an
    exploded loss was shown. stop_reason: why the run ends after step stop_step; None if it continues. sessions: number of times
    the run was started. records: number of records that the log had received. unfrozen: the state
    covers stages that `finetune.unfreeze_epoch` has unfrozen.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    samples: Count = 0
    steps: Count = 0
    wall_seconds: FiniteFloat = 0.0
    training_seconds: FiniteFloat = 0.0
    evaluation_seconds: FiniteFloat = 0.0
    input_seconds: FiniteFloat = 0.0
    saving_seconds: FiniteFloat = 0.0
    audit_seconds: FiniteFloat = 0.0
    compilation_seconds: FiniteFloat = 0.0
    first_step_seconds: FiniteFloat | None = None
    last_evaluation: Evaluation | None = None
    evaluation_due: bool = False
    evaluation_step: Count = 0
    best: Evaluation | None = None
    not_improved: Count = 0
    skipped_steps: Count = 0
    bad_images: dict[str, str] = field(default_factory=dict)
    retained: list[Count] = field(default_factory=list)
    audits: Count = 0
    audited_step: Count | None = None
    audited_checkpoint: Count | None = None
    loss_exploded: bool = False
    stop_reason: str | None = None
    stop_step: Count = 0
    sessions: Count = 1
    records: Count = 0
    unfrozen: bool = False

    def position(self, examples: int) -> dict[str, Any]:
        """Step, samples and epoch, for a record of the log. examples: images of an epoch."""
        return {"step": self.steps, "samples": self.samples, "epoch": self.samples / examples}

    @property
    def evaluates_now(self) -> bool:
        """Whether an evaluation is due at this position."""
        return self.evaluation_due and self.steps >= self.evaluation_step

    @property
    def ends_now(self) -> bool:
        """Whether the run ends at this position because it was asked to stop."""
        return self.stop_reason is not None and self.steps >= self.stop_step

    def evaluate_after(self, step: int) -> None:
        """Ask for an evaluation; the request for the earliest step counts."""
        self.evaluation_step = min(step, self.evaluation_step) if self.evaluation_due else step
        self.evaluation_due = True

    def stop_after(self, step: int, reason: str) -> None:
        """Ask for the end of the run; the first reason stays, and the earliest step counts."""
        self.stop_step = step if self.stop_reason is None else min(step, self.stop_step)
        self.stop_reason = self.stop_reason or reason

    def add_seconds(self, activity: str, seconds: float) -> None:
        """Add to the seconds of "training", "evaluation", "input", "saving", "audit" or "compilation"."""
        vars(self)[f"{activity}_seconds"] += seconds

    def finish_step(self, samples: int) -> None:
        """Count a step that was dispatched."""
        self.steps += 1
        self.samples += samples
