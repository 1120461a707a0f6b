"""What stops a run that cannot go on, with the reason."""

import math
import re


class TrainingError(RuntimeError):
    """The run cannot go on: one line with what happened, where, and what to do."""


def check_finite(record: dict) -> None:
    """Raise TrainingError, naming step, samples and learning rate, if a step's loss or gradient is not finite."""
    for name in ("loss", "gradient_norm"):
        if not math.isfinite(record[name]):
            raise TrainingError(
                f"{name} is {record[name]} at step {record['step']} (samples {record['samples']}, "
                f"learning rate {record['learning_rate']:.6g}): lower schedule.learning_rate or lengthen "
                "schedule.warmup_epochs, and look at the images of that step"
            )


def is_out_of_memory(error: Exception) -> bool:
    return re.search(r"RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE) is not None
