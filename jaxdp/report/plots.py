"""The plots of the page as data; page.js draws them with Plotly."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, zip_longest
from typing import Any, NamedTuple

from jaxdp.errors import printable
from jaxdp.loggers.plot import BLACK, BLUE, COLORS, GRAY, GREEN, LOSS_LABEL, PURPLE, SKY, YELLOW, is_logarithmic
from jaxdp.loggers.smoothing import FEWEST
from jaxdp.metrics import LOSS, METRICS, bare, title_of
from jaxdp.report.confusion import MAX_MATRIX_CLASSES, ConfusionReport
from jaxdp.report.run_history import PARTS, History, is_number
from jaxdp.report.seeds import groups
from jaxdp.run_records import RECORD_FIELDS

DASHES = {"solid": "", "dash": "15 5", "dot": "3 4", "dashdot": "15 4 3 4"}  # Plotly's name -> SVG's lengths
TEXT = "currentColor"  # in place of black, which dark pages do not show
PART_COLORS = {"input": YELLOW, "steps": BLUE, "evaluation": GREEN, "saving": PURPLE, "compilation": SKY, "rest": GRAY}
X_AXES = {"epoch": "epochs", "samples": "training images", "wall_seconds": "wall time"}
SETTING_SPREAD = 10.0  # as `WIDE_SPREAD`, of the settings of different runs
MAX_LOGGED, LEAST_CLASSES = 100, 3  # values of callbacks that are drawn; that share a plot because their names begin alike
MAX_POINTS = 2000  # of a curve; longer ones have evenly spaced ones
SETTINGS = {  # field of the log -> title, unit
    "learning_rate": ("Learning rate", ""),
    "momentum": ("Momentum", ""),
    "global_batch": ("Global batch", "images"),
    "images_per_second": ("Training speed", "images/s"),
}


class Line(NamedTuple):
    """An entry of the legend, and a run's records, or means of several seeds with their standard deviations."""

    entry: dict[str, Any]
    records: list[dict]
    deviations: list[dict]


def legend(runs: Sequence[History]) -> list[Line]:
    """Means of seeds, then the runs, whose curves are hidden at first if their mean is drawn."""
    seeds = groups(runs)
    averaged = {run.label for group in seeds for run in group.runs}
    lines = [Line({"label": group.label, "shown": True}, *group.curves()) for group in seeds]
    lines += [Line({"label": run.label, "shown": run.label not in averaged}, run.records, []) for run in runs]
    for line, color, dash in zip(lines, cycle(COLORS), cycle(DASHES), strict=False):  # 7 and 4: 28 pairs, then again
        line.entry.update(color=TEXT if color == BLACK else color, dash=dash)
    return lines


def data(runs: Sequence[History], confusions: Sequence[ConfusionReport | str] = ()) -> dict[str, Any]:
    """The plots as standard JSON.

    {"lines": entries of the legend, "positions": x values that curves refer to by "at", "plots": by name, in the page's order,
    "axes": names of the x axes, "fewest": points of a curve that is smoothed}
    """
    lines, positions = legend(runs), dict[tuple, int]()
    curves = (_metrics(lines, runs, positions), _settings(lines, positions), _logged(lines, runs, positions))
    plots = dict(chain(*curves, _time(runs), _classes(lines, runs, confusions)))
    columns = [dict(zip(X_AXES, columns, strict=True)) for columns in positions]
    return {"lines": [line.entry for line in lines], "positions": columns, "plots": plots, "axes": X_AXES, "fewest": FEWEST}


def as_json(found: dict[str, Any]) -> str:
    """JSON that cannot end the script element around it."""
    return json.dumps(found, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _curves(
    lines: Sequence[Line], field: str, positions: dict[tuple, int], *, scale: float = 1.0, **style: Any
) -> Iterator[dict[str, Any]]:
    """A field of the log of every line that has it. style: further properties of the curves. positions: extended."""
    for number, line in enumerate(lines):
        pairs = zip_longest(line.records, line.deviations, fillvalue=dict[str, Any]())
        found = [pair for pair in pairs if is_number(pair[0].get(field, ""))]
        if any(_rounded(record[field]) is not None for record, _ in found):
            found = found[:: math.ceil(len(found) / MAX_POINTS)] + found[-1:] * (len(found) > MAX_POINTS)
            xs = tuple(tuple(_rounded(record.get(axis)) for record, _ in found) for axis in X_AXES)
            curve = {"line": number, "at": positions.setdefault(xs, len(positions))} | style
            curve["y"] = [_rounded(record[field], scale) for record, _ in found]
            if line.deviations:
                curve["deviation"] = [_rounded(deviation.get(field), scale) for _, deviation in found]
            yield curve


def _rounded(value: float | None, scale: float = 1.0) -> float | None:
    return float(f"{scale * value:.7g}") if value is not None and math.isfinite(value) else None


def _metrics(lines: Sequence[Line], runs: Sequence[History], positions: dict[tuple, int]) -> Iterator[tuple[str, dict]]:
    """Of held-out images, and if known of training batches."""
    for metric in dict.fromkeys((LOSS, *(run.config.first_metric for run in runs), *METRICS.registered)):
        scale, unit = (100.0, "%") if METRICS[metric].is_share else (1.0, LOSS_LABEL if metric == LOSS else "")
        curves = [
            *_curves(lines, bare(metric), positions, scale=scale, name="training", smooth=True),
            *_curves(lines, metric, positions, scale=scale, name="held-out", thick=True),
        ]
        if curves:
            log = metric == LOSS and is_logarithmic(y for curve in curves for y in curve["y"])
            title = "Loss" if metric == LOSS else title_of(metric).capitalize()
            name = bare(metric).replace("_", "-")
            yield name, {"group": "curves", "title": title, "unit": unit, "log": log, "curves": curves}


def _settings(lines: Sequence[Line], positions: dict[tuple, int]) -> Iterator[tuple[str, dict]]:
    for field, (title, unit) in SETTINGS.items():
        is_speed = field == "images_per_second"  # images by seconds; a line alone misleads if its metrics were ready before
        style = {"smooth": True, "harmonic": True} if is_speed else {"steps": True} if field != "learning_rate" else {}
        if curves := [*_curves(lines, field, positions, name="", **style)]:
            largest = (max((y for y in curve["y"] if y is not None), default=None) for curve in curves)
            log = is_logarithmic(largest, SETTING_SPREAD)
            plot = {"group": "settings", "title": title, "unit": unit, "log": log, "curves": curves, "zero": True}
            yield field.replace("_", "-"), plot


def logged_names(runs: Sequence[History]) -> list[str]:
    """The values that callbacks have logged by `run.log(name=value)`, and that are numbers."""
    names: dict[str, None] = {}
    for run in runs:
        for record in run.records:
            numbers = (name for name, value in record.items() if value is not None and is_number(value))
            names |= dict.fromkeys(name for name in numbers if name not in RECORD_FIELDS)
    return list(names)


def _logged(lines: Sequence[Line], runs: Sequence[History], positions: dict[tuple, int]) -> Iterator[tuple[str, dict]]:
    for number, (title, names) in enumerate(_titles(logged_names(runs)[:MAX_LOGGED]).items(), 1):
        parts = {name: printable(name.removeprefix(title)).lstrip("/_ ") for name in names}
        curves = [curve for name in names for curve in _curves(lines, name, positions, name=parts[name])]
        yield f"logged-{number}", {"group": "logged", "title": printable(title), "unit": "", "log": False, "curves": curves}


def _titles(names: Sequence[str]) -> dict[str, list[str]]:
    """Title of a plot -> its values: those of many classes, such as recall/cat or recall_cat, share one."""
    beginnings = {name: name.rpartition("/")[0] or re.split("[ _]", name)[0] for name in names}
    alike = [*beginnings.values()]
    found: dict[str, list[str]] = {}
    for name, beginning in beginnings.items():
        found.setdefault(beginning if alike.count(beginning) >= LEAST_CLASSES else name, []).append(name)
    return found


def _time(runs: Sequence[History]) -> Iterator[tuple[str, dict]]:
    """Shares of the parts in the wall time of every run that has a result."""
    measured = [(run.label, seconds) for run in runs if (seconds := run.seconds())]
    traces = []
    for part, color in PART_COLORS.items():
        shares = [_rounded(100 * max(0.0, seconds[part]) / sum(seconds.values())) or 0.0 for _, seconds in measured]
        if any(shares):
            texts = [f"{share:.0f} %" if share >= 10 else "" for share in shares]
            bar = _bars(shares, color) | {"name": PARTS[part].partition(":")[0], "hovertemplate": "%{x:.1f} %", "text": texts}
            traces.append(bar | {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0})
    if traces:
        names = [label for label, _ in measured]
        yield "time", _rows("time", "Shares of the wall time, in %", traces, names=names) | {"key": True, "stacked": True}


def _bars(values: list[Any], color: str) -> dict[str, Any]:
    return {"type": "bar", "orientation": "h", "x": values, "y": [*range(len(values))], "marker": {"color": color}}


def _rows(group: str, title: str, traces: list[dict], *, names: Iterable[str], unit: str = "") -> dict[str, Any]:
    """A plot with a row for each name; traces have the rows' numbers."""
    return {"group": group, "title": title, "unit": unit, "traces": traces, "names": [*map(_short, names)]}


def _classes(
    lines: Sequence[Line], runs: Sequence[History], confusions: Sequence[ConfusionReport | str]
) -> Iterator[tuple[str, dict]]:
    """Accuracy by class of all runs; confusion matrices, or with many classes the most frequent mistakes, of each run."""
    numbers = {line.entry["label"]: [number] for number, line in enumerate(lines)}
    for number, group in enumerate(groups(runs)):  # a mean shows the points of its runs
        for run in group.runs:
            numbers[run.label].append(number)
    evaluated = [(run.label, of) for run, of in zip(runs, confusions, strict=False) if isinstance(of, ConfusionReport)]
    accuracies = {label: {row["name"]: row["accuracy"] for row in of.by_class()} for label, of in evaluated}
    found: dict[str, list[float]] = {}
    for classes in accuracies.values():
        for name, accuracy in classes.items():
            found.setdefault(name, []).append(accuracy)
    worst = sorted(found, key=lambda name: sum(found[name]) / len(found[name]))[:MAX_MATRIX_CLASSES]
    if worst:
        scope = "all classes" if len(worst) == len(found) else f"the worst {len(worst)} of {len(found)} classes"
        traces = []
        for label, classes in accuracies.items():
            points = {row: _rounded(classes[name], 100) for row, name in enumerate(worst) if name in classes}
            trace = {"type": "scatter", "mode": "markers", "lines": numbers[label], "xhoverformat": ".4~g"}
            traces.append(trace | {"x": [*points.values()], "y": [*points]})
        unit = "% of a class's held-out images"
        yield "classes", _rows("classes", f"Accuracy, {scope}", traces, names=worst, unit=unit)
    for number, of in enumerate(confusions, 1):
        if isinstance(of, ConfusionReport):
            yield f"confusions-{number}", (_matrix if of.fits_matrix else _mistakes)(f"classes-{number}", of)


def _mistakes(group: str, confusion: ConfusionReport) -> dict[str, Any]:
    found = confusion.mistakes()
    names = [f"{label} → {predicted}" for label, predicted, _ in found]
    title = "Most frequent mistakes: label → predicted class (equal ones in class order)"
    return _rows(group, title, [_bars([images for *_, images in found], BLUE)], names=names, unit="images")


def _matrix(group: str, confusion: ConfusionReport) -> dict[str, Any]:
    """Color: share of the label's images; text: number of images."""
    shares = confusion.counts / confusion.counts.sum(1, keepdims=True).clip(1)
    trace = {"type": "heatmap", "z": shares.round(7).tolist(), "zmin": 0, "zmax": 1, "xgap": 1, "ygap": 1, "showscale": False}
    trace |= {"text": confusion.counts.tolist(), "texttemplate": "%{text}"}
    trace |= {"colorscale": [[0, "rgba(0,114,178,0.04)"], [1, "rgb(0,114,178)"]]}
    trace["hovertemplate"] = "label %{y}, predicted %{x}: %{text} images<extra></extra>"
    title = "Confusion matrix, in images: label by row, predicted class by column"
    return _rows(group, title, [trace], names=confusion.class_names)


def _short(name: str, most: int = 20) -> str:
    """The start and the end of a long name: many names of a data set begin alike."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-most // 2 :]}"
