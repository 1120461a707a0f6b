"""Tables of a report, as HTML."""

import dataclasses
from collections.abc import Callable, Iterable, Set
from html import escape
from itertools import groupby
from typing import Any

from jaxdp import metrics
from jaxdp.config_words import HELD_OUT_LABELS, training_labels
from jaxdp.errors import printable
from jaxdp.loggers.console import format_duration
from jaxdp.loggers.smoothing import METHOD
from jaxdp.metrics import METRICS
from jaxdp.report.confusion import MAX_LIST_ROWS, ConfusionReport
from jaxdp.report.plots import MAX_POINTS
from jaxdp.report.run_history import PARTS, History
from jaxdp.report.seeds import groups
from jaxdp.report.summary import as_best, as_text, summarize
from jaxdp.schedules import SCHEDULES
from jaxdp.validation import flatten

MAX_TIED = 3  # equally frequent wrong predictions of a class that are listed
NOT_MEASURED = "not measured"
MISSING = "—"
STATUS = {  # of a `History`, for people
    "finished": "finished",
    "running": "still training",
    "stopped": "stopped",
    "failed": "failed",
    "killed": "killed",
    "unknown": "not running here",
}


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the results table.

    value: a run's number, None if unknown. shown: the number as text. best: `max` or `min` of the runs; None for a column
    without a best value.
    """

    title: str
    value: Callable[[History], Any]
    shown: Callable[[Any], str] = str
    best: Callable[[Iterable[float]], float] | None = None

    def cell(self, run: History) -> str:
        value = self.value(run)
        return MISSING if value is None else self.shown(value)

    def best_cell(self, runs: list[History]) -> str | None:
        """The best number as text; None if all runs have the same."""
        found = [value for run in runs if (value := self.value(run)) is not None]
        return self.shown(self.best(found)) if self.best and len({*map(self.shown, found)}) > 1 else None


def _evaluated(name: str) -> Callable[[History], float | None]:
    return lambda run: run.evaluation.get(name)


def _logged(name: str) -> Callable[[History], float | None]:
    return lambda run: next((record[name] for record in reversed(run.records) if name in record), None)


def _measured(name: str) -> Callable[[History], Any]:
    """A field of the result of a finished run."""
    return lambda run: run.result[name] if run.status == "finished" else None


def _global_batches(run: History) -> str:
    """The global batches of the phases, without repetitions."""
    return " → ".join(f"{batch:,}" for batch, _ in groupby(phase.global_batch for phase in run.config.batch))


def _devices(run: History) -> str | None:
    return f"{run.result['devices']} {run.result['device_kind']}" if run.status == "finished" else None


def _rate(run: History) -> str:
    schedule = run.config.schedule
    rate = f"{schedule.learning_rate:g}" if schedule.name in SCHEDULES.builtin else schedule.name
    anew = f", anew from epoch {schedule.from_epoch:.2f}" if schedule.from_epoch else ""
    return f"{run.config.optimizer.name} {rate}{anew}"


def _metric_columns() -> list[Column]:
    """The metrics of the evaluation that is a run's result."""
    entries = [(name, METRICS[name]) for name in metrics.names()]
    return [
        Column(metrics.title_of(name), _evaluated(name), entry.shown, max if entry.sign > 0 else min) for name, entry in entries
    ]


STATUS_COLUMN = Column("status", lambda run: "stopped early" if run.result.get("stopped_early") else STATUS[run.status])
RESULTS = (
    Column("epochs", _logged("epoch"), "{:.2f}".format),
    Column("steps", _logged("step"), "{:,}".format),
    Column("global batch", _global_batches),
    Column("learning rate", _rate),
    Column("devices", _devices),
    Column("time", _measured("wall_seconds"), format_duration),  # no best: times of single runs vary
    Column("images/s", _measured("images_per_second"), "{:,.0f}".format),
)
MORE = (
    Column("directory", lambda run: printable(run.workdir, 4096)),
    Column("data", lambda run: run.config.data.source),
    Column("model", lambda run: f"{run.config.model.title}, width {run.config.model.width}, {run.config.model.dtype}"),
    Column("best evaluation", lambda run: as_best(summarize(run.config, run.records))),
    Column("epoch of the best evaluation", lambda run: summarize(run.config, run.records)["best_epoch"], "{:.2f}".format),
    Column("held-out images", _evaluated("eval_examples"), "{:,}".format),
    Column("mesh", _measured("mesh"), lambda mesh: f"{mesh[0]}x{mesh[1]}"),
    Column("all-reduce", _measured("strategy")),
    Column("sessions", lambda run: run.result.get("sessions")),
    Column("time to first step", _measured("seconds_to_first_step"), "{:.1f} s".format),
    Column("skipped steps", _measured("skipped_steps")),
    Column("reason of the early stop", lambda run: run.result.get("stop_reason") or None),
    Column("jaxdp, JAX", _measured("versions"), lambda versions: f"{versions['jaxdp']}, {versions['jax']}"),
    Column("traced steps (FIRST,COUNT), slower", lambda run: run.config.logging.profile),
    Column("damaged log lines, skipped", lambda run: run.damaged or None),
    Column("lost log lines", lambda run: run.lost or None),
)


def results_table(runs: list[History]) -> str:
    """The most important numbers, a row for each run. The best metrics are bold if the shown numbers differ."""
    shown = (STATUS_COLUMN, *_metric_columns(), *RESULTS)
    columns = [column for column in shown if any(column.value(run) is not None for run in runs)]
    cells = [[column.cell(run) for column in columns] for run in runs]
    best = [column.best_cell(runs) for column in columns]
    rows = [[run.label, *row] for run, row in zip(runs, cells, strict=True)]
    bold = {(y, x) for y, row in enumerate(cells) for x, cell in enumerate(row, 1) if cell == best[x - 1]}
    note = '<p class="quiet">Bold: best of these runs.</p>' if bold else ""
    return f'<div class="stacked results">{_table(["run", *(column.title for column in columns)], rows, bold)}</div>{note}'


def seeds_table(runs: list[History]) -> str:
    """Mean and standard deviation of the results of runs that differ in the seed; "" without such runs."""
    found = [(group, group.shown()) for group in groups(runs)]
    titles = list(dict.fromkeys(title for _, values in found for title in values))
    rows = [
        [group.label, str(len(group.finished)), *(values.get(title, MISSING) for title in titles)] for group, values in found
    ]
    note = '<p class="quiet">Mean ± standard deviation (n - 1) of the finished runs. Only the seeds of these runs differ.</p>'
    return f'<div class="stacked results">{_table(["runs", "finished", *titles], rows)}</div>{note}' if rows else ""


def remarks(runs: list[History]) -> list[str]:
    """A line for every run without an evaluation, and for ImageNet about the epochs to 75.9 %."""
    lines = []
    for run in runs:
        first, _, target = as_text(summarize(run.config, run.records) | {"name": run.label}).partition("\n")
        lines += [f"{run.label}: {target}."] if target else [] if run.evaluations else [f"{first}."]
    return lines


def curves_note(runs: list[History]) -> str:
    """What the curves show: how they are smoothed, and the labels of every loss."""
    kinds: dict[str, list[str]] = {}
    for run in runs:
        kinds.setdefault(training_labels(run.config), []).append(run.label)
    named = "; ".join(labels if len(kinds) == 1 else f"{labels} ({', '.join(names)})" for labels, names in kinds.items())
    note = (
        f"Training loss and held-out loss are different quantities. Training loss: training batches, {named}. Held-out loss: "
        f"held-out images, {HELD_OUT_LABELS}. Training curves: {METHOD}, until another smoothing is set; "
        "pale lines: every log line."
    )
    if any(len(run.records) > MAX_POINTS for run in runs):
        note += f" Curves with more than {MAX_POINTS:,} log lines are drawn from {MAX_POINTS:,} of them or fewer."
    if groups(runs):
        note += " Bands: mean of the seeds ± standard deviation, where all of them have a log line."
    return f'<p class="quiet">{escape(note)}</p>'


def _table(header: list[str], rows: list[list[str]], bold: Set[tuple[int, int]] = frozenset()) -> str:
    """An HTML table; the first cell of every row is its heading. bold: (row, column) of bold cells.

    Cells carry the heading of their column, which narrow screens show when they stack them.
    """
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = ""
    for y, (name, *texts) in enumerate(rows):
        cells = ""
        for x, text in enumerate(texts, 1):
            shown = f"<strong>{escape(text)}</strong>" if (y, x) in bold else escape(text)
            cells += f'<td data-label="{escape(header[x])}">{shown}</td>'
        body += f"<tr><th>{escape(name)}</th>{cells}</tr>\n"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def time_table(runs: list[History]) -> str:
    """Seconds and shares of every part of the wall time; a column per run."""
    columns = [run.seconds() for run in runs]
    totals = [sum(seconds.values()) for seconds in columns]

    def cell(seconds: float | None, total: float) -> str:
        return NOT_MEASURED if seconds is None else f"{seconds:.1f} s ({100 * seconds / total:.1f}\N{NO-BREAK SPACE}%)"

    rows = []
    for part, label in PARTS.items():
        rows.append([label, *(cell(seconds.get(part), total) for seconds, total in zip(columns, totals, strict=True))])
    rows.insert(2, ["… share of the steps waiting for other processes", *(run.waiting_text() for run in runs)])
    rows.append(["wall time of all sessions", *(f"{total:.1f} s" if total else NOT_MEASURED for total in totals)])
    rows.append(["measured until", *(run.as_of if seconds else MISSING for run, seconds in zip(runs, columns, strict=True))])
    note = (
        "The parts add up to the wall time; the line marked … is contained in the steps. Work that was lost in an interrupted "
        "session and repeated counts once; time between sessions does not count."
    )
    return _table(["", *(run.label for run in runs)], rows) + f'<p class="quiet">{escape(note)}</p>'


def classes_table(confusion: ConfusionReport) -> str:
    """Accuracy of every class, the worst first, and its most frequent wrong prediction; of many classes, the worst."""
    header, classes = ["class", "accuracy", "correct", "most often confused with (images each)"], confusion.by_class()
    rows = []
    for row in classes:
        names = row["confused_with"]
        more = f" and {len(names) - MAX_TIED} more" if len(names) > MAX_TIED else ""
        other = f"{', '.join(names[:MAX_TIED])}{more} ({row['images_confused']})" if names else MISSING
        rows.append([row["name"], f"{100 * row['accuracy']:.2f} %", f"{row['correct']} of {row['images']}", other])
    first = "" if confusion.fits_matrix else f"<p>The worst {MAX_LIST_ROWS} of {len(rows)} classes:</p>"
    shown = rows if confusion.fits_matrix else rows[:MAX_LIST_ROWS]
    return f'{first}<div class="stacked classes">{_table(header, shown)}</div>'


def differences_table(runs: list[History]) -> str:
    """The config fields that differ between the runs; a column per run."""
    configs = [flatten(dataclasses.asdict(run.config)) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    rows = [[name, *(str(config.get(name, MISSING)) for config in configs)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return "<p>The configurations are the same.</p>"
    return _table(["field", *(run.label for run in runs)], rows)


def more_numbers_table(runs: list[History]) -> str:
    """What the results table has no room for; a column per run."""
    rows = [[row.title, *map(row.cell, runs)] for row in MORE if any(row.value(run) is not None for run in runs)]
    return _table(["", *(run.label for run in runs)], rows)
