"""Figures of a report: curves and settings of several runs, their wall time by part, and accuracy by class.

Imports matplotlib, which takes a second: only `page.write` imports this module.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from jaxdp.config_words import HELD_OUT_LABELS, training_labels
from jaxdp.errors import ConfigError
from jaxdp.loggers.plot import LOSS_LABEL, use_log_scale
from jaxdp.loggers.smoothing import moving_average, window
from jaxdp.report.confusion import MAX_LIST_ROWS, Confusion
from jaxdp.report.run_history import PARTS, STEPS_WITH_EXPOSED, History, values

# Colors of Okabe & Ito, distinguishable by the color-blind; runs also differ in their dashes.
BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, BLACK)
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
MAX_RUNS = len(COLORS) * len(DASHES)  # 7 and 4 are coprime: `cycle` of both gives every pair once
PART_STYLES = {
    "input": (YELLOW, "//"),
    "steps": (BLUE, ""),
    "exposed": (ORANGE, "++"),
    "evaluation": (GREEN, "\\\\"),
    "saving": (PURPLE, "xx"),
    "compilation": (SKY, ".."),
    "rest": ("#BBBBBB", ""),
}
DPI = 120
WIDE_SPREAD = 10.0  # ratio of the largest to the smallest value that one linear axis cannot show
LEGEND_CHARACTERS = 130  # per line, in the font of a legend


def check_number(workdirs: Sequence) -> None:
    """Raise ConfigError for more runs than there are line styles."""
    if len(workdirs) > MAX_RUNS:
        reason = f"{len(workdirs)} runs cannot be distinguished in one plot"
        raise ConfigError("WORKDIR", reason=reason, hint=f"give at most {MAX_RUNS}, or --no-html")


def line_styles(runs: Sequence) -> list[tuple]:
    """(run, {"color", "linestyle"}) of every run."""
    return [
        (run, {"color": color, "linestyle": dash}) for run, color, dash in zip(runs, cycle(COLORS), cycle(DASHES), strict=False)
    ]


class Plot(Figure):
    """A figure with the values of its curves. values: line -> (label, unit of y, unit of x), shown on hover."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dpi=DPI, layout="constrained", **options)
        self.values: dict[Line2D, tuple[str, str, str]] = {}


def curves_figure(runs: list[History]) -> Plot:
    """Loss and accuracy against epochs (left) and against time (right)."""
    figure = Plot(figsize=(11, 7.5))
    panels = figure.subplots(2, 2, sharey="row")
    unit, seconds_per_unit = _time_unit(runs)
    columns = (("epoch", 1.0, "epochs"), ("wall_seconds", 1 / seconds_per_unit, unit))
    metrics = (("loss", 1.0, "", LOSS_LABEL), ("accuracy", 100.0, "%", "%"))
    for row, (metric, scale, y_unit, y_label) in zip(panels, metrics, strict=True):
        drawn: list[float] = []
        for axes, (x, x_scale, x_unit) in zip(row, columns, strict=True):
            before = len(drawn)
            for run, style in line_styles(runs):
                xs, ys = values(run.training, x, x_scale), values(run.training, metric, scale)
                if window(len(ys)) > 1:
                    axes.plot(xs, ys, color=style["color"], linestyle="none", marker=".", markersize=3, alpha=0.3)
                thin, thick = style | {"linewidth": 1, "alpha": 0.8}, style | {"linewidth": 2.2, "marker": "o"}
                units = (y_unit, x_unit)
                label = (f"{run.label}: training {metric}", *units)
                drawn += _draw_line(axes, xs, moving_average(ys).tolist(), style=thin, label=label)
                xs, ys = values(run.evaluations, x, x_scale), values(run.evaluations, f"eval_{metric}", scale)
                drawn += _draw_line(axes, xs, ys, style=thick, label=(f"{run.label}: held-out {metric}", *units))
            if len(drawn) == before:
                _mark_empty(axes, runs)
        if metric == "accuracy":
            _scale_accuracy(row, drawn)
        elif use_log_scale(row, drawn):
            y_label += " (log scale)"
        row[0].set_ylabel(y_label)
    panels[0, 0].set(title="Loss against epochs")
    panels[0, 1].set(title="Loss against time")
    panels[1, 0].set(title="Accuracy against epochs", xlabel="epoch")
    panels[1, 1].set(title="Accuracy against time", xlabel=f"wall time of the run's sessions, {unit}")
    _style_axes(panels.ravel())
    labels = {training_labels(run.config) for run in runs}
    training = f"thin: training (moving average), {labels.pop() if len(labels) == 1 else 'labels differ by run'}"
    held_out = f"thick, dots: held-out images, {HELD_OUT_LABELS}"
    _add_legend(figure, runs, ((training, 1, None), (held_out, 2.2, "o")))
    return figure


def settings_figure(runs: list[History]) -> Plot:
    """Learning rate, momentum, batch size and speed against epochs.

    Learning rates of very different runs are drawn as fractions of each run's highest, other quantities on a log scale.
    """
    figure = Plot(figsize=(11, 6.5))
    panels = figure.subplots(2, 2, sharex=True)
    shown = (
        ("learning_rate", "Learning rate", None, "default"),
        ("momentum", "Momentum", None, "steps-post"),
        ("global_batch", "Global batch", "images", "steps-post"),
        ("images_per_second", "Training speed", "images/s", "default"),
    )
    rates = [max(_finite(values(run.training, "learning_rate")), default=0.0) for run in runs]
    by_peak = max(rates) >= WIDE_SPREAD * min((rate for rate in rates if rate > 0), default=math.inf)
    for axes, (name, title, unit, drawstyle) in zip(panels.ravel(), shown, strict=True):
        drawn: list[float] = []
        for (run, style), peak in zip(line_styles(runs), rates, strict=True):
            records = smooth_speeds(run.training) if name == "images_per_second" else run.training
            normalized = by_peak and name == "learning_rate" and peak > 0
            ys = values(records, name, 1 / peak if normalized else 1.0)
            quantity = f"learning rate as a fraction of {peak:.3g}" if normalized else title.lower()
            label = (f"{run.label}: {quantity}", unit or "", "epochs")
            line = style | {"drawstyle": drawstyle, "linewidth": 1.6}
            drawn += _draw_line(axes, values(records, "epoch"), ys, style=line, label=label)
        axes.set(title=title, ylabel=unit)
        if not drawn:
            _mark_empty(axes, runs)
        elif unit and use_log_scale([axes], drawn, spread=WIDE_SPREAD):
            axes.set_ylabel(f"{unit} (log scale)")
        else:
            axes.set_ylim(bottom=0, top=1.05 if name == "momentum" else 1.08 * max(drawn) or 1)
    if by_peak:
        panels[0, 0].set(ylabel="fraction of the run's highest")
    for axes in panels[1]:
        axes.set_xlabel("epoch")
    _style_axes(panels.ravel())
    _add_legend(figure, runs, notes=[f"highest logged rate {rate:.3g}" for rate in rates] if by_peak else ())
    return figure


def _finite(numbers: Iterable[float]) -> list[float]:
    return [number for number in numbers if math.isfinite(number)]


def smooth_speeds(training: list[dict], most: int = 40) -> list[dict]:
    """{"epoch", "images_per_second"}: images by seconds over neighboring log lines, in at most `most` windows.

    A single line can be misleading: it covers few steps, whose metrics may have been ready before they were fetched.
    """
    lines, samples = [], 0
    for record in training:
        if record.get("images_per_second") and "samples" in record:
            images = record["samples"] - samples
            lines.append((record["epoch"], images, images / record["images_per_second"]))
            samples = record["samples"]
    size = max(1, -(-len(lines) // most))
    windows = [lines[start : start + size] for start in range(0, len(lines), size)]
    return [
        {
            "epoch": window[-1][0],
            "images_per_second": sum(images for _, images, _ in window) / sum(seconds for *_, seconds in window),
        }
        for window in windows
    ]


def time_figure(runs: list[History]) -> Figure | None:
    """Shares of the parts in the wall time of every run; None if no run has a result."""
    measured = [(run, seconds) for run in runs if (seconds := run.seconds())]
    if not measured:
        return None
    figure = Figure(figsize=(11, 1.7 + 0.55 * len(measured)), layout="constrained")
    axes = figure.subplots()
    for y, (_, seconds) in enumerate(measured):
        total, left = sum(value or 0.0 for value in seconds.values()), 0.0
        for part, (color, hatch) in PART_STYLES.items():
            share = 100 * max(0.0, seconds[part] or 0.0) / total
            axes.barh(y, share, 0.62, left, color=color, hatch=hatch, edgecolor="white", linewidth=0.5)
            if share >= 6:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
                axes.text(left + share / 2, y, f"{share:.0f} %", ha="center", va="center", fontsize="small", bbox=box)
            left += share
    labels = PARTS | ({"steps": STEPS_WITH_EXPOSED} if all(seconds["exposed"] is None for _, seconds in measured) else {})
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=labels[part])
        for part, (color, hatch) in PART_STYLES.items()
        if any(seconds[part] for _, seconds in measured)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize="small")
    axes.set_yticks(range(len(measured)), [_short_label(run.label) for run, _ in measured])
    axes.set(xlim=(0, 100), xlabel="% of the wall time of the run's sessions", ylim=(len(measured) - 0.5, -0.5))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def confusion_figure(confusion: Confusion) -> Figure:
    """Accuracy by class beside the confusion matrix; with many classes, the worst ones beside the most frequent mistakes."""
    rows = confusion.by_class()
    shown = rows if confusion.fits_matrix else rows[:MAX_LIST_ROWS]
    height = 1.8 + 0.26 * max(len(shown), 6)
    figure = Figure(figsize=(11, max(height, 4.5)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    scope = "all classes" if len(shown) == len(rows) else f"the worst {len(shown)} of {len(rows)} classes"
    accuracies = [100 * row["accuracy"] for row in shown]
    _draw_bars(left, [_short_class(row["name"]) for row in shown], values=accuracies, number_format="{:.1f}", margin=0)
    left.set(title=f"Accuracy, {scope}", xlabel="% of the class's held-out images", xlim=(0, 114))
    left.set_xticks(range(0, 101, 20))
    if confusion.fits_matrix:
        _draw_matrix(right, confusion)
        return figure
    mistakes = confusion.mistakes()
    pairs = [f"{_short_class(label)} → {_short_class(predicted)}" for label, predicted, _ in mistakes]
    _draw_bars(right, pairs, values=[images for *_, images in mistakes], number_format="{:.0f}", margin=0.12)
    right.set(title="Most frequent mistakes (equal ones in class order)", xlabel="images: label → predicted class")
    right.xaxis.get_major_locator().set_params(integer=True)
    if not mistakes:
        right.text(0.5, 0.5, "none", transform=right.transAxes, ha="center", va="center")
    return figure


def _draw_line(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], *, style: dict, label: tuple[str, str, str]
) -> list[float]:
    """Draw values against others; return the finite ones. style: of `Axes.plot`; few points get markers. label: see `Plot`."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if not math.isnan(x)]
    finite = _finite(y for _, y in points)
    if not finite:
        return []
    marker = "o" if len(points) == 1 else style.get("marker") if len(points) < 60 else None
    (line,) = axes.plot(*zip(*points, strict=True), markersize=4, **style | {"marker": marker})
    cast(Plot, axes.figure).values[line] = label
    return finite


def _scale_accuracy(row: Sequence[Axes], drawn: list[float]) -> None:
    """From 0 to 100 %, or only the range of the values if it is narrow."""
    if drawn:
        low, high = min(drawn), max(drawn)
        margin = 0.05 * max(high - low, 2.0)
        wide = high - low > 40
        row[0].set_ylim(0 if wide else max(0.0, low - margin), 101 if wide and high > 60 else min(101.0, high + margin))


def _mark_empty(axes: Axes, runs: list[History]) -> None:
    text = "not in these logs" if any(run.records for run in runs) else "nothing logged yet"
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="0.35")


def _time_unit(runs: list[History]) -> tuple[str, float]:
    """(name, seconds) of the unit of a time axis."""
    seconds: Iterator[float] = (value for run in runs for value in values(run.records, "wall_seconds"))
    longest = max((value for value in seconds if not math.isnan(value)), default=0.0)
    if longest < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest < 3 * 3600 else ("hours", 3600.0)


def _style_axes(panels: Iterable[Axes]) -> None:
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)


def _add_legend(
    figure: Figure, runs: list[History], widths: Sequence[tuple[str, float, str | None]] = (), *, notes: Sequence[str] = ()
) -> None:
    """One legend for all panels: the runs if there are several, with their notes, and the meaning of line widths."""
    handles = []
    if len(runs) > 1:
        texts = [f" ({note})" for note in notes] or [""] * len(runs)
        for (run, style), note in zip(line_styles(runs), texts, strict=True):
            handles.append(Line2D([], [], **style, linewidth=2, label=_short_label(run.label) + note))
    handles += [
        Line2D([], [], color="0.3", linewidth=width, marker=marker, markersize=4, label=text) for text, width, marker in widths
    ]
    if handles:
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = min(4, max(1, LEGEND_CHARACTERS // (longest + 8)))
        figure.legend(
            handles=handles, loc="outside upper center", ncols=columns, frameon=False, fontsize="small", handlelength=3.2
        )


def _draw_bars(axes: Axes, names: list[str], *, values: list[float], number_format: str, margin: float) -> None:
    positions = np.arange(len(names))
    axes.barh(positions, values, color=BLUE)
    for y, value in zip(positions, values, strict=True):
        text = number_format.format(value)
        axes.annotate(text, (value, y), (3, 0), textcoords="offset points", va="center", fontsize="small")
    axes.set_yticks(positions, names, fontsize="small")
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=margin)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_matrix(axes: Axes, confusion: Confusion) -> None:
    """Color: share of the label's images; text: number of images."""
    share = confusion.counts / np.maximum(1, confusion.counts.sum(1, keepdims=True))
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    for (i, j), count in np.ndenumerate(confusion.counts):
        if count:
            size, color = "small" if len(share) <= 12 else "xx-small", "white" if share[i, j] > 0.5 else "black"
            axes.text(j, i, str(count), ha="center", va="center", fontsize=size, color=color)
    names = [_short_class(name) for name in confusion.class_names]
    rotation = 90 if max(map(len, names)) > 3 else 0
    axes.set_xticks(range(len(names)), names, fontsize="small", rotation=rotation)
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set(title="Confusion matrix, in images", xlabel="predicted class", ylabel="label")


def _short_label(label: str) -> str:
    """The end of a long label, which may be a path."""
    return label if len(label) <= 40 else "…" + label[-39:]


def _short_class(name: str) -> str:
    """The start of a long class name."""
    return name if len(name) <= 18 else name[:17] + "…"
