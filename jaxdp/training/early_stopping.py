"""Early stopping: which evaluation of a run is the best so far, and when the run ends."""

import math
from fractions import Fraction
from typing import Any

from jaxdp.checkpoint.progress import Progress
from jaxdp.choices import STOP_METRICS
from jaxdp.config import RESUME_SAFE_FIELDS, Config
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import plural
from jaxdp.planning import Plan
from jaxdp.validation import changes

MOST_IMAGES = 10**7  # of an evaluation: a float64 determines a share of up to so many images


class EarlyStopping:
    """Follows `stop.metric` over the evaluations of a run, and does nothing without `stop.patience`.

    What it knows is in `Progress`, so every checkpoint has it, and a resumed run ends at the same evaluation.
    """

    def __init__(self, config: Config, progress: Progress, group: ProcessGroup) -> None:
        self.config, self.progress, self.group = config.stop, progress, group

    def update(self, record: dict[str, Any]) -> None:
        """Follow an evaluation. All processes call this with the same record; rank 0's value counts."""
        if self.config.patience is None:
            return
        metric, progress = self.config.metric, self.progress
        value = self.group.all_gather_object("the metric of early stopping", record[metric], while_waiting=lambda: None)[0]
        if not math.isfinite(value):
            progress.not_improved += 1
            return
        sign = STOP_METRICS[metric].sign
        if (
            progress.best is None or sign * (value - progress.best[metric]) >= 0
        ):  # of equal ones the newer, as among checkpoints
            progress.best = record | {metric: value}
        if progress.improved is None or (
            sign * (_exact(metric, value) - _exact(metric, progress.improved)) > Fraction(str(self.config.min_delta))
        ):
            progress.improved, progress.not_improved = value, 0
        else:
            progress.not_improved += 1

    @property
    def is_best(self) -> bool:
        """Whether the present state has been evaluated and is the best so far."""
        best = self.progress.best
        return best is not None and best["samples"] == self.progress.samples

    @property
    def ends_run(self) -> bool:
        """Whether the run ends with the present state, which has been evaluated."""
        if self.config.patience is None or self.progress.not_improved < self.config.patience:
            return False
        evaluation = self.progress.last_evaluation
        return evaluation is not None and evaluation["samples"] == self.progress.samples

    def reason(self) -> str:
        """Why the run ends, in a few words."""
        delta = f" by more than {self.config.min_delta:g}" if self.config.min_delta else ""
        return f"{self.config.metric} did not improve{delta} for {plural(self.progress.not_improved, 'evaluation')}"


def _exact(metric: str, value: float) -> Fraction:
    """The value without the rounding of binary numbers: a share of images, or a loss as the decimal number that is logged."""
    return Fraction(str(value)) if metric == "eval_loss" else Fraction(value).limit_denominator(MOST_IMAGES)


def adapt(progress: Progress, saved: Config, config: Config, *, same_images: bool) -> None:
    """Adapt what a checkpoint knows of the evaluations to the configuration that continues from it.

    A change of `stop.patience` and `stop.min_delta` only keeps it all. Another change starts the count of evaluations without
    improvement anew, and another metric or other data also the search for the best one. same_images: whether the checkpoints
    of those evaluations are in the directory of this run, and the data are the same.
    """
    names = {line.partition(":")[0] for line in changes(saved, config)}
    if config.stop.patience is None or not same_images or any(name.startswith(("data.", "stop.metric")) for name in names):
        progress.best, progress.improved, progress.not_improved = None, None, 0
    elif changes(saved, config, ignore=(*RESUME_SAFE_FIELDS, "stop")):
        progress.not_improved = 0


def too_few_evaluations(plan: Plan) -> str | None:
    """A warning if the run has too few evaluations before its end to stop early; else None."""
    patience, evaluations = plan.config.stop.patience, plan.evaluations_before_end
    if patience is None or evaluations > patience:
        return None
    return (
        f"stop.patience={patience}: the run cannot stop early, because it has {plural(evaluations, 'evaluation')} before its "
        f"end, and stopping takes at least {patience + 1}; lower --stop.patience or --evaluation.every-epochs"
    )
