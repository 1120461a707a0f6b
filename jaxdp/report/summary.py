"""Accuracy of a run, for ImageNet its epochs to 75.9 % compared with the MLPerf reference, and metrics of runs as CSV."""

import csv
import io
import math
import os
from collections.abc import Iterable
from typing import Any

from jaxdp.choices import SOURCES, TASKS
from jaxdp.config import Config
from jaxdp.errors import plural
from jaxdp.metrics import METRICS, bare, title_of
from jaxdp.report.run_history import read
from jaxdp.run_records import LOG, RECORD_FIELDS

TARGET = 0.759
POSITION = ("samples", "step", "epoch")  # the first columns of a CSV after the name of the run
# MLPerf Training v4.0, ResNet-50 with LARS: global batch -> mean epochs to 75.9 % in the reference convergence points
REFERENCE_EPOCHS = {
    1632: 35.0,
    3264: 35.15,
    4096: 39.88,
    8192: 41.88,
    13056: 45.5,
    32768: 56.0,
    49152: 68.0,
    58880: 80.0,
    65536: 84.5,
    67840: 85.85,
}


def report(workdir: str | os.PathLike) -> dict:
    """Summary of the run in a directory or at a URL, see `summarize`. Raises ConfigError if it holds no run."""
    run = read(workdir)
    return summarize(run.config, run.records, run.damaged, lost=run.lost)


def summarize(config: Config, records: list[dict], damaged: int = 0, *, lost: int = 0) -> dict:
    """Summary of a run: {"name", "source", "epochs", "accuracy", "best_accuracy", "best_epoch", "best_by",
    "epochs_to_target", "reference_epochs", "ratio", "damaged_lines", "lost_lines"}. damaged, lost: numbers of damaged and lost
    lines of the log.

    Accuracies are None before the first evaluation. best_accuracy and best_epoch: of the `best_evaluation` by `stop.metric`,
    which best_by names. The three before the last are None if they do not apply: another data set than ImageNet, target not
    reached, or no reference for this batch size or for several batch sizes.
    """
    name, decides = config.first_metric, config.deciding_metric
    evaluations = [record for record in records if record.get(name) is not None]
    last = evaluations[-1] if evaluations else {"epoch": records[-1]["epoch"] if records else 0.0, name: None}
    known = bool(config.stop.metric) or config.task in TASKS  # of another task, the first metric is not known
    best = (best_evaluation(evaluations, decides) if known else None) or {name: None, "epoch": None}
    epochs_to_target = reference = ratio = None
    if SOURCES[config.data.source].mlperf:
        epochs_to_target = next((record["epoch"] for record in evaluations if record[name] >= TARGET), None)
        batches = {phase.global_batch for phase in config.batch}
        reference = REFERENCE_EPOCHS.get(batches.pop()) if len(batches) == 1 else None
        ratio = epochs_to_target / reference if epochs_to_target and reference else None
    return {
        "name": config.name,
        "source": config.data.source,
        "epochs": last["epoch"],
        "metric": name,
        bare(name): last[name],
        f"best_{bare(name)}": best[name],
        "best_epoch": best["epoch"],
        "best_by": decides,
        "epochs_to_target": epochs_to_target,
        "reference_epochs": reference,
        "ratio": ratio,
        "damaged_lines": damaged,
        "lost_lines": lost,
    }


def best_evaluation(evaluations: Iterable[dict], metric: str) -> dict | None:
    """The best record of evaluations by `stop.metric`, as `--checkpoint best` chooses: of equal ones, and of those at the same
    number of samples, the last. None if none has the metric, or
    if it is registered, but not in this process."""
    latest = {record["samples"]: record for record in evaluations}
    scored = [record for record in latest.values() if record.get(metric) is not None and metric in METRICS]
    sign = METRICS[metric].sign
    return max(scored, key=lambda record: (sign * record[metric], record["samples"]), default=None)


def as_best(summary: dict) -> str | None:
    """The best value in a summary as text; None if there is none."""
    name = summary["metric"]
    return METRICS[name].shown(summary[f"best_{bare(name)}"]) or None


def as_text(summary: dict) -> str:
    """A summary as one line, or two for ImageNet, and one more each if lines of the log are damaged or lost."""
    damaged = summary["damaged_lines"]
    skipped = [f"{summary['name']}: skipped {plural(damaged, 'damaged line')} of {LOG}"] * (damaged > 0)
    if lost := summary["lost_lines"]:
        skipped.append(f"{summary['name']}: {LOG} lacks {plural(lost, 'record', ',')} that the run had written")
    name = summary["metric"]
    value, best = summary[bare(name)], as_best(summary)
    if value is None:
        return "\n".join([f"{summary['name']}: no evaluation yet after {summary['epochs']:.2f} epochs", *skipped])
    text = f"{summary['name']}: {title_of(name)} {METRICS[name].shown(value)} after {summary['epochs']:.2f} epochs"
    if best is not None:
        by = "" if summary["best_by"] == name else f" by {summary['best_by']}:"
        text += f", best{by} {best} at epoch {summary['best_epoch']:.2f}"
    lines = [text]
    if SOURCES[summary["source"]].mlperf:
        epochs, reference = summary["epochs_to_target"], summary["reference_epochs"]
        reached = "not reached" if epochs is None else f"reached after {epochs:.2f} epochs"
        mlperf = f"MLPerf reference: {reference:g} epochs (mean)" if reference else "no MLPerf reference for this batch size"
        ratio = "" if summary["ratio"] is None else f", ratio {summary['ratio']:.3f}"
        lines.append(f"{100 * TARGET:.1f} % {reached}; {mlperf}{ratio}")
    return "\n".join([*lines, *skipped])


def metrics_csv(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for every record of several runs, with the name of its run; as in RFC 4180, lines end in CR LF.

    runs: records of the log by name of the run. Columns: run, samples, step, epoch, and all other fields in the order of
    `RECORD_FIELDS`. A cell is empty if its record lacks the field, and NaN if the value was not finite (null in the log).
    """
    fields = {name for records in runs.values() for record in records for name in record}
    known = [name for name in RECORD_FIELDS if name in fields and name not in POSITION]
    columns = [*POSITION, *known, *sorted(fields.difference(POSITION, known))]
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["run", *columns])
    for run, records in runs.items():
        writer.writerows([run, *(_cell(record.get(name, "")) for name in columns)] for record in records)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return "NaN" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value
