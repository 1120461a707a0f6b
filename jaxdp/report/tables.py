"""Tables of a report, as HTML."""

import dataclasses
from html import escape

from jaxdp.report.confusion import MAX_LIST_ROWS, Confusion
from jaxdp.report.run_history import PARTS, History
from jaxdp.report.summary import as_text, summarize
from jaxdp.validation import flatten

NOT_MEASURED = "not measured"
EXPOSED_NOT_MEASURED = "not measured: jaxdp report --communication"
MISSING = "—"


def summary_lines(runs: list[History]) -> list[str]:
    """Accuracy and status of every run, one sentence or two each."""
    remarks = {"finished": "", "running": " The run is still training.", "stopped": " The run is not finished."}
    return [
        as_text(summarize(run.config, run.records) | {"name": run.label}).replace("\n", "; ") + "." + remarks[run.status]
        for run in runs
    ]


def _table(header: list[str], rows: list[list[str]]) -> str:
    """An HTML table; the first cell of every row is its heading."""
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = ""
    for name, *cells in rows:
        body += f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def time_table(runs: list[History]) -> str:
    """Seconds and shares of every part of the wall time; a column per run."""
    columns = [run.seconds() for run in runs]
    totals = [sum(value or 0.0 for value in seconds.values()) for seconds in columns]
    rows = []
    for part, label in PARTS.items():
        cells = []
        for seconds, total in zip(columns, totals, strict=True):
            value = seconds.get(part)
            missing = EXPOSED_NOT_MEASURED if part == "exposed" else NOT_MEASURED
            cells.append(missing if value is None else f"{value:.1f} s ({100 * value / total:.1f} %)")
        rows.append([label, *cells])
        if part == "exposed":
            rows.append(["… share of the steps waiting for other processes", *(run.waiting_text() for run in runs)])
    if any(seconds.get("exposed") is None for seconds in columns):
        rows[1][0] += f" (and exposed communication if {NOT_MEASURED})"
    rows.append(["wall time of all sessions", *(f"{total:.1f} s" if total else NOT_MEASURED for total in totals)])
    rows.append(["measured until", *(run.as_of if seconds else MISSING for run, seconds in zip(runs, columns, strict=True))])
    note = (
        "The parts add up to the wall time; the line marked … is contained in the steps. Exposed communication is the "
        "difference between a step with reductions and one without, measured after the run on synthetic images and applied to "
        "the run's own steps. Work that was lost in an interrupted session and repeated counts once; time between sessions "
        "does not count."
    )
    return _table(["", *(run.label for run in runs)], rows) + f'<p class="quiet">{escape(note)}</p>'


def classes_table(confusion: Confusion) -> str:
    """Accuracy of every class, the worst first, and its most frequent wrong prediction; long tables are folded."""
    header, classes = ["class", "accuracy", "correct", "most often confused with (images)"], confusion.by_class()
    rows = []
    for row in classes:
        other = f"{row['confused_with'][0]} ({row['confused_with'][1]})" if row["confused_with"] else MISSING
        rows.append([row["name"], f"{100 * row['accuracy']:.2f} %", f"{row['correct']} of {row['images']}", other])
    if confusion.fits_matrix:
        return _table(header, rows)
    worst, rest = _table(header, rows[:MAX_LIST_ROWS]), _table(header, rows[MAX_LIST_ROWS:])
    rest = f"<details><summary>All other classes</summary>{rest}</details>"
    return f"<p>The worst {MAX_LIST_ROWS} of {len(rows)} classes:</p>{worst}{rest}"


def differences_table(runs: list[History]) -> str:
    """The config fields in which the runs differ; a column per run."""
    configs = [flatten(dataclasses.asdict(run.config)) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    rows = [[name, *(str(config.get(name, MISSING)) for config in configs)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return "<p>The configurations are the same.</p>"
    return _table(["field", *(run.label for run in runs)], rows)


def numbers_table(runs: list[History]) -> str:
    """All numbers of every run; a column per run."""
    columns = [_numbers(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, MISSING) for column in columns)] for name in names]
    return _table(["", *(run.label for run in runs)], rows)


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.2f} %"


def _numbers(run: History) -> dict[str, str]:
    summary, config = summarize(run.config, run.records), run.config
    last = run.records[-1] if run.records else {}
    evaluation = run.evaluations[-1] if run.evaluations else {}
    best_epoch = "" if summary["best_epoch"] is None else f" (epoch {summary['best_epoch']:.2f})"
    numbers = {
        "directory": str(run.path),
        "status": run.status,
        "data": config.data.source,
        "model": f"{config.model.title}, width {config.model.width}, {config.model.dtype}",
        "epochs": f"{last.get('epoch', 0.0):.2f} of {config.epochs:g}",
        "steps": str(last.get("step", 0)),
        "accuracy, last": _percent(summary["accuracy"]),
        "accuracy, best": _percent(summary["best_accuracy"]) + best_epoch,
        "top-5 accuracy, last": _percent(evaluation.get("eval_top5")),
        "held-out loss, last": MISSING if evaluation.get("eval_loss") is None else f"{evaluation['eval_loss']:.4f}",
        "held-out images": str(evaluation.get("eval_examples", MISSING)),
    }
    if config.logging.profile:
        numbers["traced steps (FIRST,COUNT), slower"] = config.logging.profile
    if summary["source"] == "imagenet2012":
        epochs, reference = summary["epochs_to_target"], summary["reference_epochs"]
        numbers["epochs to 75.9 %"] = "not reached" if epochs is None else f"{epochs:.2f}"
        numbers["MLPerf reference, epochs"] = MISSING if reference is None else f"{reference:g}"
    if run.result:
        until = "" if run.status == "finished" else f", until {run.as_of}"
        numbers["wall time"] = f"{run.result['wall_seconds']:.1f} s{until}"
        numbers["sessions"] = str(run.result["sessions"])
    if run.status == "finished":
        result = run.result
        numbers["time to first step"] = f"{result['seconds_to_first_step']:.1f} s"
        numbers["training images/s"] = f"{result['images_per_second']:.1f}"
        numbers["devices"] = f"{result['devices']} {result['device_kind']}, mesh {result['mesh'][0]}x{result['mesh'][1]}"
        numbers["all-reduce"] = result["strategy"] or MISSING
        numbers["skipped steps"] = str(result["skipped_steps"])
        numbers["jaxdp, JAX"] = f"{result['versions']['jaxdp']}, {result['versions']['jax']}"
    return numbers
