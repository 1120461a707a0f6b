"""Figures of the page: one panel each, so that a page puts as many side by side as fit.

Imports matplotlib, which takes a second: only what draws imports this module.
"""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from typing import cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from jaxdp.config_words import HELD_OUT_LABELS
from jaxdp.errors import ConfigError, printable
from jaxdp.loggers.plot import BLUE, COLORS, GRAY, GREEN, LOSS_LABEL, PURPLE, SKY, YELLOW, setting_steps, use_log_scale
from jaxdp.loggers.smoothing import moving_average, window
from jaxdp.metrics import LOSS, METRICS, bare, title_of
from jaxdp.report.confusion import MAX_LIST_ROWS, ConfusionReport
from jaxdp.report.run_history import PARTS, History, values
from jaxdp.run_records import RECORD_FIELDS

DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))  # runs differ in color and dashes
MAX_RUNS = len(COLORS) * len(DASHES)  # 7 and 4 are coprime: `cycle` of both gives every pair once
PART_STYLES = {  # color and hatch
    "input": (YELLOW, "//"),
    "steps": (BLUE, ""),
    "evaluation": (GREEN, "\\\\"),
    "saving": (PURPLE, "xx"),
    "compilation": (SKY, ".."),
    "rest": (GRAY, ""),
}
WIDTH, HEIGHT, DPI = 5.2, 3.1, 160  # of a panel, in inches; readable on 400 px
WIDE_SPREAD = 10.0  # ratio of the largest to the smallest value that one linear axis cannot show
LEGEND_CHARACTERS, LEGEND_LINE = 70, 0.16  # characters per line, in the font of a legend; inches of a line
MAX_LOGGED = 24  # panels of values that callbacks have logged
MAX_DRAWN = 1e300
MAX_POINTS = 1500  # with values on hover in a figure; longer curves have evenly spaced ones


@dataclass(frozen=True)
class Picture:
    """A drawn figure. group: the section of the page. layer: its values on hover as SVG, see `layer`."""

    group: str
    alt: str
    png: bytes
    layer: str = ""


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


class PanelFigure(Figure):
    """A figure of one panel with the values of its curves. values: line -> (label, unit of y, unit of x), shown on hover."""

    def __init__(self, title: str, height: float = HEIGHT) -> None:
        super().__init__(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        self.values: dict[Line2D, tuple[str, str, str]] = {}
        self.panel = self.subplots()
        self.panel.set_title(title, fontsize="medium")
        self.panel.spines[["top", "right"]].set_visible(False)


def draw(runs: list[History], confusions: Sequence[ConfusionReport | str] = ()) -> dict[str, Picture]:
    """The pictures of a page, by file name without its ending, in the order of the page."""
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():  # no formulas: "$" may be in a name
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the tables show such names
        pictures = {}
        for name, group, figure in _figures(runs, confusions):
            png = io.BytesIO()
            figure.savefig(png, format="png")
            values = layer(figure) if figure.values else ""
            pictures[name] = Picture(group, figure.panel.get_title(), png.getvalue(), values)
        return pictures


def layer(figure: PanelFigure) -> str:
    """A transparent SVG layer over the picture of a figure that has been drawn, in its pixels: a title for each point of its
    curves. The script of the page shows the nearest one at once; without JavaScript, browsers show the titles."""
    width, height = figure.bbox.size
    limit = max(2, MAX_POINTS // max(1, len(figure.values)))
    curves = ""
    for line, (label, y_unit, x_unit) in figure.values.items():
        points = [(float(x), float(y)) for x, y in np.column_stack(line.get_data()) if math.isfinite(y)]
        chosen = np.linspace(0, len(points) - 1, min(limit, len(points))).round().astype(int)
        for x, y in (points[index] for index in chosen):
            left, bottom = figure.panel.transData.transform((x, y))
            if math.isfinite(left) and math.isfinite(bottom):
                text = escape(f"{label} {y:.4g} {y_unit}".rstrip() + f" after {x:.3g} {x_unit}")
                curves += f'<circle cx="{left:.0f}" cy="{height - bottom:.0f}" r="7"><title>{text}</title></circle>'
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" aria-hidden="true">{curves}</svg>'


def _figures(runs: list[History], confusions: Sequence[ConfusionReport | str]) -> Iterator[tuple[str, str, PanelFigure]]:
    """(name, group, figure) of each picture."""
    firsts = dict.fromkeys(run.config.first_metric for run in runs)
    for name in dict.fromkeys((LOSS, *firsts, *METRICS.registered)):
        for suffix, against in {"": "epoch", "-time": "wall_seconds"}.items():
            yield f"{bare(name).replace('_', '-')}{suffix}", "curves", metric_figure(runs, name, against)
    for name in SETTINGS:
        yield name.replace("_", "-"), "settings", value_figure(runs, name)
    for number, name in enumerate(logged_names(runs)[:MAX_LOGGED], 1):
        yield f"logged-{number}", "logged", value_figure(runs, name)
    if (figure := time_figure(runs)) is not None:
        yield "time", "time", figure
    for number, confusion in enumerate(confusions, 1):
        if isinstance(confusion, ConfusionReport):
            yield f"classes-{number}", f"classes-{number}", accuracies_figure(confusion)
            yield f"confusions-{number}", f"classes-{number}", confusion_figure(confusion)


def metric_figure(runs: list[History], metric: str, against: str) -> PanelFigure:
    """A metric of held-out images and, if known, of training batches, against "epoch" or "wall_seconds"."""
    scale, y_unit = (100.0, "%") if METRICS[metric].is_share else (1.0, "")
    title = "loss" if metric == LOSS else title_of(metric)
    unit, per_unit = ("epochs", 1.0) if against == "epoch" else _time_unit(runs)
    figure = PanelFigure(f"{title.capitalize()} against {'epochs' if against == 'epoch' else 'time'}")
    axes, drawn, has_training = figure.panel, list[float](), False
    for run, style in line_styles(runs):
        xs, ys = values(run.training, against, 1 / per_unit), values(run.training, bare(metric), scale)
        has_training |= len(ys) > 0
        if window(len(ys)) > 1:
            axes.plot(xs, ys, color=style["color"], linestyle="none", marker=".", markersize=3, alpha=0.3)
        thin, thick = style | {"linewidth": 1, "alpha": 0.8}, style | {"linewidth": 2.2, "marker": "o"}
        label = (f"{run.label}: training {title}", y_unit, unit)
        drawn += _draw_line(axes, xs, moving_average(ys).tolist(), style=thin, label=label)
        xs, ys = values(run.evaluations, against, 1 / per_unit), values(run.evaluations, metric, scale)
        drawn += _draw_line(axes, xs, ys, style=thick, label=(f"{run.label}: held-out {title}", y_unit, unit))
    y_label = LOSS_LABEL if metric == LOSS else y_unit
    if METRICS[metric].is_share:
        _scale_share(axes, drawn)
    elif metric == LOSS and use_log_scale([axes], drawn):
        y_label += " (log scale)"
    axes.set(ylabel=y_label, xlabel="epoch" if against == "epoch" else f"wall time of the run's sessions, {unit}")
    _finish(figure, runs, empty=not drawn)
    kinds = (("training (moving average)", 1, None), (f"held-out images, {HELD_OUT_LABELS}", 2.2, "o"))
    _add_legend(figure, runs, kinds if has_training else kinds[1:])
    return figure


SETTINGS = {  # field of the log -> title, unit
    "learning_rate": ("Learning rate", ""),
    "momentum": ("Momentum", ""),
    "global_batch": ("Global batch", "images"),
    "images_per_second": ("Training speed", "images/s"),
}


def value_figure(runs: list[History], name: str) -> PanelFigure:
    """A number of the log against epochs: a field of `SETTINGS`, or one that callbacks have logged.

    Settings of very different runs are drawn on a log scale.
    """
    title, unit = SETTINGS.get(name, (_short_label(printable(name)), ""))
    figure, curves = PanelFigure(title), list[list[float]]()
    axes, words = figure.panel, title.lower() if name in SETTINGS else printable(name)
    for run, style in line_styles(runs):
        records = [record for record in run.records if _is_drawable(record.get(name))]
        xs, ys, line = values(records, "epoch"), values(records, name), style | {"linewidth": 1.6}
        if name in ("momentum", "global_batch"):
            xs, ys = setting_steps(run.training, run.config.batch, name)
            line["drawstyle"] = "steps-post"
        if name == "images_per_second":  # images by seconds; a line alone misleads if its metrics were ready before
            ys = (1 / moving_average([1 / y if y else math.inf for y in ys])).tolist()
        if name not in SETTINGS:
            line["marker"] = "o"
        curves.append(_draw_line(axes, xs, ys, style=line, label=(f"{run.label}: {words}", unit, "epochs")))
    axes.set(ylabel=unit, xlabel="epoch")
    highest = [max(curve) for curve in curves if curve]
    if highest and name in SETTINGS:
        if use_log_scale([axes], highest, spread=WIDE_SPREAD):
            lowest = max(min(highest) / 100, 0.8 * min(y for curve in curves for y in curve if y > 0))
            axes.set(ylabel=f"{unit} (log scale)".strip(), ylim=(lowest, 2 * max(highest)))
        else:
            axes.set_ylim(bottom=0, top=1.05 if name == "momentum" else 1.08 * max(highest) or 1)
    _finish(figure, runs, empty=not highest)
    _add_legend(figure, runs)
    return figure


def logged_names(runs: list[History]) -> list[str]:
    """The values that callbacks have logged by `run.log(name=value)`, and that are numbers."""
    names: dict[str, None] = {}
    for run in runs:
        for record in run.records:
            numbers = (name for name, value in record.items() if _is_drawable(value))
            names |= dict.fromkeys(name for name in numbers if name not in RECORD_FIELDS)
    return list(names)


def _is_drawable(value: object) -> bool:
    """Whether a value is a number that matplotlib can draw, with room for the margins and differences it computes."""
    return isinstance(value, int | float) and abs(value) <= MAX_DRAWN


def time_figure(runs: list[History]) -> PanelFigure | None:
    """Shares of the parts in the wall time of every run; None if no run has a result."""
    measured = [(run, seconds) for run in runs if (seconds := run.seconds())]
    if not measured:
        return None
    figure = PanelFigure("Shares of the wall time", 2.2 + 0.4 * len(measured))
    axes = figure.panel
    for y, (_, seconds) in enumerate(measured):
        total, left = sum(seconds.values()), 0.0
        for part, (color, hatch) in PART_STYLES.items():
            share = 100 * max(0.0, seconds[part]) / total
            axes.barh(y, share, 0.62, left, color=color, hatch=hatch, edgecolor="white", linewidth=0.5)
            if share >= 10:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
                axes.text(left + share / 2, y, f"{share:.0f} %", ha="center", va="center", fontsize="small", bbox=box)
            left += share
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=PARTS[part].partition(":")[0])
        for part, (color, hatch) in PART_STYLES.items()
        if any(seconds[part] for _, seconds in measured)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    axes.set_yticks(range(len(measured)), [_short_label(run.label, 14) if len(runs) > 1 else "" for run, _ in measured])
    axes.tick_params(left=False)
    axes.set(xlim=(0, 100), xlabel="% of the wall time of the run's sessions", ylim=(len(measured) - 0.5, -0.5))
    return figure


def accuracies_figure(confusion: ConfusionReport) -> PanelFigure:
    """Accuracy by class; with many classes, of the worst ones."""
    rows = confusion.by_class()
    shown = rows if confusion.fits_matrix else rows[:MAX_LIST_ROWS]
    scope = "all classes" if len(shown) == len(rows) else f"the worst {len(shown)} of {len(rows)} classes"
    figure = PanelFigure(f"Accuracy, {scope}", _bars_height(len(shown)))
    accuracies = [100 * row["accuracy"] for row in shown]
    _draw_bars(figure.panel, [_short_class(row["name"]) for row in shown], values=accuracies, number_format="{:.1f}", margin=0)
    figure.panel.set(xlabel="% of the class's held-out images", xlim=(0, 114))
    figure.panel.set_xticks(range(0, 101, 20))
    return figure


def confusion_figure(confusion: ConfusionReport) -> PanelFigure:
    """The confusion matrix; with many classes, the most frequent mistakes."""
    if confusion.fits_matrix:
        figure = PanelFigure("Confusion matrix, in images", WIDTH)
        _draw_matrix(figure.panel, confusion)
        return figure
    mistakes = confusion.mistakes()
    figure = PanelFigure("Most frequent mistakes (equal ones in class order)", _bars_height(len(mistakes)))
    pairs = [f"{_short_class(label)} → {_short_class(predicted)}" for label, predicted, _ in mistakes]
    _draw_bars(figure.panel, pairs, values=[images for *_, images in mistakes], number_format="{:.0f}", margin=0.12)
    figure.panel.set(xlabel="images: label → predicted class")
    figure.panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not mistakes:
        figure.panel.text(0.5, 0.5, "none", transform=figure.panel.transAxes, ha="center", va="center")
    return figure


def _bars_height(count: int) -> float:
    return 1.0 + 0.26 * max(count, 6)


def _draw_line(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], *, style: dict, label: tuple[str, str, str]
) -> list[float]:
    """Draw values against others; return the finite ones. style: of `Axes.plot`; few points get markers.

    label: see `PanelFigure`.
    """
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if not math.isnan(x)]
    finite = [y for _, y in points if math.isfinite(y)]
    if not finite:
        return []
    marker = "o" if len(points) == 1 else style.get("marker") if len(points) < 60 else None
    (line,) = axes.plot(*zip(*points, strict=True), markersize=4, **style | {"marker": marker})
    cast(PanelFigure, axes.figure).values[line] = label
    return finite


def _scale_share(axes: Axes, drawn: list[float]) -> None:
    """From 0 to 100 %, or only the range of the values if it is narrow."""
    if drawn:
        low, high = min(drawn), max(drawn)
        margin = 0.05 * max(high - low, 2.0)
        wide = high - low > 40
        axes.set_ylim(0 if wide else max(0.0, low - margin), 101 if wide and high > 60 else min(101.0, high + margin))


def _finish(figure: PanelFigure, runs: list[History], *, empty: bool) -> None:
    """The grid, the origin, and a word in an empty panel."""
    axes = figure.panel
    if empty:
        text = "not in these logs" if any(run.records for run in runs) else "nothing logged yet"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="0.35")
    axes.grid(alpha=0.3)
    axes.set_xlim(left=0)


def _time_unit(runs: list[History]) -> tuple[str, float]:
    """(name, seconds) of the unit of a time axis."""
    seconds = (value for run in runs for value in values(run.records, "wall_seconds"))
    longest = max((value for value in seconds if not math.isnan(value)), default=0.0)
    if longest < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest < 3 * 3600 else ("hours", 3600.0)


def _add_legend(figure: PanelFigure, runs: list[History], widths: Sequence[tuple[str, float, str | None]] = ()) -> None:
    """The runs if there are several, and the meaning of line widths."""
    shown = line_styles(runs) if len(runs) > 1 else []
    handles = [Line2D([], [], **style, linewidth=2, label=_short_label(run.label)) for run, style in shown]
    handles += [
        Line2D([], [], color="0.3", linewidth=width, marker=marker, markersize=4, label=text) for text, width, marker in widths
    ]
    if handles:
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = min(4, max(1, LEGEND_CHARACTERS // (longest + 8)))
        figure.set_figheight(HEIGHT + LEGEND_LINE * math.ceil(len(handles) / columns))
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


def _draw_matrix(axes: Axes, confusion: ConfusionReport) -> None:
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
    axes.set(xlabel="predicted class", ylabel="label")


def _short_label(label: str, most: int = 40) -> str:
    """The end of a long label, which may be a path."""
    return label if len(label) <= most else "…" + label[1 - most :]


def _short_class(name: str) -> str:
    """The start and the end of a long class name: many names of a data set begin alike."""
    return name if len(name) <= 18 else f"{name[:8]}…{name[-9:]}"
