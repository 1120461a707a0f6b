"""Early stopping: which evaluation of a run is the best so far, and when the run ends."""

import math
from collections.abc import Mapping
from typing import Any

from jaxdp.checkpoint.manifest import Manifest
from jaxdp.checkpoint.progress import Progress
from jaxdp.errors import plural
from jaxdp.metrics import METRICS
from jaxdp.planning import Plan
from jaxdp.run_records import TIMING
from jaxdp.training.callback import Callback
from jaxdp.training.run import Run
from jaxdp.validation import RESUME_SAFE_FIELDS, changes


class EarlyStopping(Callback):
    """Follows `stop.metric` over the evaluations of a run with `stop.patience`.

    Saves a checkpoint at every evaluation that is the best so far. Its state is in `Progress`, and so in every checkpoint: a
    resumed run ends at the same evaluation.
    """

    def on_start(self, run: Run) -> None:
        if run.restored is not None:
            adapt(run, run.restored)
        evaluation = run.progress.last_evaluation
        if evaluation is not None and evaluation["samples"] == run.progress.samples:
            self._stop_if_due(run)

    def after_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        """All processes call this with the same record; rank 0's value counts."""
        if run.config.stop.patience is None:
            return
        metric = run.config.deciding_metric
        values = run.processes.all_gather_object("the metric of early stopping", evaluation[metric], while_waiting=lambda: None)
        record = {name: value for name, value in evaluation.items() if name not in TIMING}
        update(run.progress, metric, record | {metric: values[0]})
        best = run.progress.best
        if best is not None and best["samples"] == run.progress.samples:
            run.save()
        self._stop_if_due(run)

    def _stop_if_due(self, run: Run) -> None:
        patience = run.config.stop.patience
        if patience is not None and run.progress.not_improved >= patience:
            metric = run.config.deciding_metric
            run.stop(f"{metric} did not improve for {plural(run.progress.not_improved, 'evaluation')}")


def update(progress: Progress, metric: str, record: Mapping[str, Any]) -> None:
    """Record whether an evaluation is the best one, and whether it has improved."""
    value = record[metric]
    if not math.isfinite(value):
        progress.not_improved += 1
        return
    gain = math.inf if progress.best is None else METRICS[metric].sign * (value - progress.best[metric])
    if gain >= 0:  # of equal evaluations, the newer counts, as among checkpoints
        progress.best = {**record}
    progress.not_improved = 0 if gain > 0 else progress.not_improved + 1


def adapt(run: Run, manifest: Manifest) -> None:
    """Adapt a checkpoint's record of the evaluations to the configuration that continues from it.

    If only `stop.patience` changes, the whole record is kept. Other changes restart the count of evaluations without
    improvement. A different metric, different data, or a different directory (which lacks the earlier checkpoints) also
    restarts the search for the best evaluation.
    """
    progress, saved = run.progress, manifest.config
    names = {line.partition(":")[0] for line in changes(saved, run.config)}
    same_data = manifest.metadata.get("data") == run.data_fingerprint
    same_images = same_data and manifest.path.parent == run.checkpoints.folder
    has_stop = run.config.stop.patience is not None
    if not has_stop or not same_images or any(name.startswith(("data.", "task", "stop.metric")) for name in names):
        progress.best, progress.not_improved = None, 0
    elif changes(saved, run.config, ignore=(*RESUME_SAFE_FIELDS, "stop")):
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
