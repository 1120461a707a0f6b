"""The tables of the page, as HTML."""

import dataclasses
from html import escape

from jaxdp.report.classes import MOST_IN_A_LIST, Classes
from jaxdp.report.history import PARTS, History
from jaxdp.report.reached import as_text, reached_by
from jaxdp.validation import flatten

NOT_MEASURED = "not measured"
NOT_EXPOSED = "not measured: jaxdp report --communication"


def reached(runs: list[History]) -> list[str]:
    """What each run has reached, and where it stands."""
    lines = []
    for run in runs:
        told = reached_by(run.config, run.records) | {"name": run.label}
        where = {"finished": "", "running": " The run is going on.", "stopped": " The run is not finished."}[run.state]
        lines.append(as_text(told).replace("\n", "; ") + "." + where)
    return lines


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """heads: of the columns; rows: the first cell of each is its name."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = ""
    for name, *cells in rows:
        body += f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def times(runs: list[History]) -> str:
    """Seconds and shares of every part, each run a column."""
    every = [run.seconds() for run in runs]
    rows = []
    for part, words in PARTS.items():
        cells = []
        for seconds in every:
            value, whole = seconds.get(part), sum(one or 0.0 for one in seconds.values())
            missing = NOT_EXPOSED if part == "exposed" else NOT_MEASURED
            cells.append(missing if value is None else f"{value:.1f} s ({100 * value / whole:.1f} %)")
        rows.append([words, *cells])
        if part == "exposed":
            rows.append(["… of the steps waiting for other processes", *(run.waiting() for run in runs)])
    if any(seconds.get("exposed") is None for seconds in every):
        rows[1][0] += f" (with exposed communication where that was {NOT_MEASURED})"
    if any(seconds and seconds["compilation"] is None for seconds in every):
        rows[-1][0] += f" (with compilation where that was {NOT_MEASURED})"
    walls = [f"{sum(one or 0.0 for one in seconds.values()):.1f} s" if seconds else NOT_MEASURED for seconds in every]
    rows.append(["wall time of all sessions", *walls])
    rows.append(["known until", *(run.told_at if seconds else "—" for run, seconds in zip(runs, every, strict=True))])
    note = (
        "Every part but the one marked … is of its own, and they add up to the wall time. Exposed communication is the time by "
        "which a step with its reductions is longer than one without, measured after the run on made-up images, as a share of "
        "the run's own steps. Work that was lost when a session "
        "was cut off and done again is counted once, time between sessions not at all."
    )
    return _table(["", *(run.label for run in runs)], rows) + f'<p class="quiet">{escape(note)}</p>'


def classes_table(found: Classes) -> str:
    """Accuracy of every class, the worst first, and what it is taken for; of many classes most are folded away."""
    heads, rows, body = ["class", "accuracy", "right", "most often taken for (images)"], found.rows(), []
    for row in rows:
        taken = f"{row['taken_for'][0]} ({row['taken_for'][1]})" if row["taken_for"] else "—"
        body.append([row["name"], f"{100 * row['accuracy']:.2f} %", f"{row['right']} of {row['images']}", taken])
    if found.fit_a_matrix:
        return _table(heads, body)
    worst, others = _table(heads, body[:MOST_IN_A_LIST]), _table(heads, body[MOST_IN_A_LIST:])
    others = f"<details><summary>The others</summary>{others}</details>"
    return f"<p>The worst {MOST_IN_A_LIST} of {len(rows)} classes:</p>{worst}{others}"


def differences(runs: list[History]) -> str:
    """The fields in which the runs' configs are not all the same, each run a column."""
    every = [flatten(dataclasses.asdict(run.config)) for run in runs]
    names = dict.fromkeys(name for fields in every for name in fields)
    differing = [name for name in names if len({str(fields.get(name, "—")) for fields in every}) > 1]
    if not differing:
        return "<p>The configurations are the same.</p>"
    rows = [[name, *(str(fields.get(name, "—")) for fields in every)] for name in differing]
    return _table(["field", *(run.label for run in runs)], rows)


def _percent(value) -> str:
    return "—" if value is None else f"{100 * value:.2f} %"


def numbers(runs: list[History]) -> str:
    """What every run has given, each a column."""
    columns = [_of_run(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "—") for column in columns)] for name in names]
    return _table(["", *(run.label for run in runs)], rows)


def _of_run(run: History) -> dict[str, str]:
    told, config, result = reached_by(run.config, run.records), run.config, run.told if run.state == "finished" else {}
    last = run.records[-1] if run.records else {}
    evaluated = run.evaluations[-1] if run.evaluations else {}
    shown = {
        "directory": str(run.path),
        "state": run.state,
        "data": config.data.source,
        "model": f"{config.model.title}, width {config.model.width}, {config.model.dtype}",
        "epochs": f"{last.get('epoch', 0.0):.2f} of {config.epochs:g}",
        "steps": str(last.get("step", 0)),
        "accuracy, last": _percent(told["accuracy"]),
        "accuracy, best": _percent(told["best_accuracy"])
        + ("" if told["best_epoch"] is None else f" (epoch {told['best_epoch']:.2f})"),
        "top-5, last": _percent(evaluated.get("eval_top5")),
        "held-out loss, last": "—" if evaluated.get("eval_loss") is None else f"{evaluated['eval_loss']:.4f}",
        "held-out images": str(evaluated.get("eval_examples", "—")),
    }
    if config.logging.profile:
        shown["steps traced (FIRST,COUNT), which slows them"] = config.logging.profile
    if told["source"] == "imagenet2012":
        shown["epochs to 75.9 %"] = "not reached" if told["epochs_to_target"] is None else f"{told['epochs_to_target']:.2f}"
        shown["MLPerf's reference, epochs"] = "—" if told["reference_epochs"] is None else f"{told['reference_epochs']:g}"
    if run.told:
        shown["wall time"] = f"{run.told['wall_seconds']:.1f} s" + ("" if result else f", at {run.told_at}")
        shown["sessions"] = str(run.told.get("sessions", 1))
    if result:
        shown["to the first step"] = f"{result['seconds_to_first_step']:.1f} s"
        shown["images/s in training"] = f"{result['images_per_second']:.1f}"
        shown["devices"] = f"{result['devices']} {result['device_kind']}, mesh {result['mesh'][0]}x{result['mesh'][1]}"
        shown["all-reduce"] = result.get("strategy") or "—"
        shown["steps skipped"] = str(result.get("skipped_steps", 0))
        shown["jaxdp, JAX"] = f"{result['versions']['jaxdp']}, {result['versions']['jax']}"
    return shown
