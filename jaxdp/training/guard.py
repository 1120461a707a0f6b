"""What stops a run that cannot go on, with the reason."""

import math
import re
from collections import deque

from jaxdp.config import Config, LossScale
from jaxdp.errors import OneLine, first_line
from jaxdp.planning import PlannedPhase


class TrainingError(OneLine, RuntimeError):
    """The run cannot go on: one line with what happened, where, and what to do."""


LOWER_THE_RATE = "lower schedule.learning_rate or lengthen schedule.warmup_epochs, in a new --workdir or with --resume never"


def check_step(record: dict, config: Config) -> None:
    """Raise TrainingError, naming step, samples and learning rate, if a step's loss or gradient is not finite.

    Where such steps are left out (dynamic loss scaling, or the guard's skip), when too many of them have been.
    """
    scaling, limits = config.loss_scale, config.guard
    where = f"step {record['step']} (samples {record['samples']}, learning rate {record['learning_rate']:.6g}"
    if scaling.name == "dynamic" and record["skipped_in_a_row"] >= scaling.give_up_after:
        raise TrainingError(
            f"{record['skipped_in_a_row']} steps in a row were skipped, up to {where}, loss scale {record['loss_scale']:g}): "
            f"the gradient is not finite whatever the scale; use --model.dtype bfloat16, or {LOWER_THE_RATE}"
        )
    if limits.non_finite == "skip" and record["skipped_steps"] > limits.skip_at_most:
        raise TrainingError(
            f"{record['skipped_steps']} steps were skipped, their gradients not finite, up to {where}), and guard.skip_at_most "
            f"is {limits.skip_at_most}: {LOWER_THE_RATE}"
        )
    if scaling.name == "dynamic" or limits.non_finite == "skip":
        return
    for name in ("loss", "gradient_norm"):
        if not math.isfinite(record[name]):
            advice = LOWER_THE_RATE
            if scaling.name == "static":
                advice = (
                    f"if the scale {scaling.initial:g} is too large for float16, lower loss_scale.initial or give "
                    f"--loss-scale.name dynamic; else {LOWER_THE_RATE}"
                )
            raise TrainingError(f"{name} is {record[name]} at {where}): {advice}")


def check_skipped(skipped: int, steps: int, scaling: LossScale) -> None:
    """Raise TrainingError if a run has come to its end without one step that changed the parameters."""
    if skipped == steps:
        scales = f" at a loss scale of {scaling.minimum:g} to {scaling.initial:g}" if scaling.name != "none" else ""
        advice = "lower loss_scale.initial and loss_scale.minimum, or use --model.dtype bfloat16" if scales else LOWER_THE_RATE
        raise TrainingError(f"all {steps} steps were skipped, no gradient being finite{scales}: {advice}")


class LossWatch:
    """Says once that the loss has exploded: a mean over WINDOW steps above `factor` times ln(classes), that of guessing."""

    WINDOW = 20

    def __init__(self, classes: int, factor: float):
        self.limit, self.factor = factor * math.log(classes), factor
        self.recent, self.told = deque(maxlen=self.WINDOW), False  # told: in this session or an earlier one

    def exploded(self, record: dict) -> int | None:
        """The samples seen when the loss was last good, when it is found to have exploded; None at other times."""
        if math.isfinite(record["loss"]):
            self.recent.append((record["samples"] - record["global_batch"], record["loss"]))
        mean = sum(loss for _, loss in self.recent) / max(1, len(self.recent))
        if self.told or len(self.recent) < self.WINDOW or mean <= self.limit:
            return None
        self.told = True
        return self.recent[0][0]

    def remark(self, record: dict, good: str) -> str:
        return (
            f"the loss has exploded: {self.WINDOW} steps up to step {record['step']} (samples {record['samples']}, "
            f"learning rate {record['learning_rate']:.6g}) "
            f"have a mean above {self.limit:.4g}, {self.factor:g} times that of guessing; {good}"
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of JAX or NumPy says that memory on a device or on the host has run out."""
    told = re.search(r"RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and told is not None)


def out_of_memory_message(phase: PlannedPhase, error: Exception) -> str:
    """One line: the field to change, and the largest value of at most half the present one that keeps the global batch."""
    reason = first_line(error, "no memory left")
    if isinstance(error, MemoryError):
        return (
            f"batch.{phase.index}.global_batch: {phase.global_batch} is not allowed; this host has no memory for its images "
            f"({reason}); take smaller images (data.image_size, data.stored_size), a smaller batch or more hosts"
        )
    field, present = f"batch.{phase.index}.per_worker_batch", phase.per_worker_batch
    start = f"{field}: {present} is not allowed; out of memory ({reason})"
    per_device = phase.per_device_batch
    smaller = [n for n in range(1, present // 2 + 1) if per_device % n == 0]
    if not smaller:
        return f"{start}; it cannot be smaller, so take a smaller model, smaller images or more devices"
    best = max(smaller)
    return (
        f"{start}; try --batch.{phase.index}.per-worker-batch {best}, which keeps the global batch {phase.global_batch} "
        f"by accumulating {per_device // best} micro-batches"
    )
