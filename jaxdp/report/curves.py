"""The curves of one run or of several in the same panels, and where their time went."""

import math
from itertools import cycle

from jaxdp.config import ConfigError
from jaxdp.report.history import PARTS, REST_WITH_COMPILATION, STEPS_WITH_EXPOSED, History, values

# Colours that the colour-blind tell apart (Okabe & Ito); a run is known by its dashes as well.
BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, BLACK)
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
MOST_RUNS = len(COLOURS) * len(DASHES)  # 7 and 4 have no common factor: so many pairs are all different
PART_STYLES = {
    "input": (YELLOW, "//"),
    "steps": (BLUE, ""),
    "exposed": (ORANGE, "++"),
    "evaluation": (GREEN, "\\\\"),
    "saving": (PURPLE, "xx"),
    "compilation": (SKY, ".."),
    "rest": ("#BBBBBB", ""),
}
LEGEND_LETTERS = 130  # that are as wide as a figure, in the font of its legend
NO_TIME = "not measured: no wall_seconds in the log"


def check_number(runs: list) -> None:
    if len(runs) > MOST_RUNS:
        raise ConfigError(
            f"workdir: {len(runs)} runs are not allowed; lines would look alike; give at most {MOST_RUNS}, or --no-html"
        )


def styles(runs: list[History]):
    """(run, {"color", "linestyle"}) of each."""
    return [
        (run, {"color": colour, "linestyle": dash})
        for run, colour, dash in zip(runs, cycle(COLOURS), cycle(DASHES), strict=False)
    ]


def curves(runs: list[History]):
    """Loss and accuracy against epochs (left) and time (right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    panels = figure.subplots(2, 2, sharey="row")
    unit, divisor = _time_unit(runs)
    for row, (training, held_out, scale) in zip(
        panels, (("loss", "eval_loss", 1.0), ("accuracy", "eval_accuracy", 100.0)), strict=True
    ):
        drawn = []
        for axes, x, x_scale in zip(row, ("epoch", "wall_seconds"), (1.0, 1 / divisor), strict=True):
            found = []
            for run, style in styles(runs):
                found += _line(axes, run.training, x, training, x_scale, scale, **style, linewidth=1, alpha=0.55)
                found += _line(axes, run.evaluations, x, held_out, x_scale, scale, **style, linewidth=2.2, markers="o")
            if not found:
                _say_empty(axes, runs, x)
            drawn += found
        _loss_axis(row, drawn) if training == "loss" else _accuracy_axis(row, drawn)
    panels[0, 0].set(title="Loss against epochs", ylabel="nats, logarithmic")
    untimed = [run.label for run in runs if run.records and not any("wall_seconds" in record for record in run.records)]
    if 0 < len(untimed) < len(runs):
        text = f"{NO_TIME}:\n" + "\n".join(map(_short, untimed))
        panels[0, 1].text(0.98, 0.97, text, transform=panels[0, 1].transAxes, ha="right", va="top", fontsize="small")
    panels[0, 1].set(title="Loss against time")
    panels[1, 0].set(title="Accuracy against epochs", ylabel="%", xlabel="epoch")
    panels[1, 1].set(title="Accuracy against time", xlabel=f"wall time of the run's sessions, {unit}")
    if panels[0, 0].get_yscale() == "linear":
        panels[0, 0].set_ylabel("nats")
    _tidy(panels.ravel())
    _legend(figure, runs, (("thin: training batches", 1, None), ("thick, dots: held-out images", 2.2, "o")))
    return figure


def settings(runs: list[History]):
    """Learning rate, momentum, batch size and speed against epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    shown = (
        ("learning_rate", "Learning rate", None, "default"),
        ("momentum", "Momentum", None, "steps-post"),
        ("global_batch", "Global batch", "images", "steps-post"),
        ("images_per_second", "Speed of the steps", "images/s", "default"),
    )
    for axes, (name, title, label, drawstyle) in zip(panels.ravel(), shown, strict=True):
        found = []
        for run, style in styles(runs):
            records = speeds(run.training) if name == "images_per_second" else run.training
            found += _line(axes, records, "epoch", name, drawstyle=drawstyle, **style, linewidth=1.6)
        axes.set(title=title, ylabel=label)
        if found:
            axes.set_ylim(bottom=0, top=1.05 if name == "momentum" else 1.08 * max(map(max, found)) or 1)
        else:
            _say_empty(axes, runs, name)
    for axes in panels[1]:
        axes.set_xlabel("epoch")
    _tidy(panels.ravel())
    _legend(figure, runs)
    return figure


def speeds(training: list[dict], most: int = 40) -> list[dict]:
    """{"epoch", "images_per_second"}: images by seconds over neighbouring log lines, in at most `most` windows.

    A single line may cover a step whose metrics were there before it was looked at, and tell of a speed that nothing has.
    """
    lines, before = [], 0
    for record in training:
        if record.get("images_per_second") and "samples" in record:
            images = record["samples"] - before
            lines.append((record["epoch"], images, images / record["images_per_second"]))
            before = record["samples"]
    size = max(1, -(-len(lines) // most))
    windows = [lines[first : first + size] for first in range(0, len(lines), size)]
    return [
        {"epoch": window[-1][0], "images_per_second": sum(n for _, n, _ in window) / sum(s for *_, s in window)}
        for window in windows
    ]


def time_parts(runs: list[History]):
    """Where the wall time of each run went, as shares of it. None where nothing is known of any."""
    from matplotlib.figure import Figure

    known = [(run, seconds) for run in runs if (seconds := run.seconds())]
    if not known:
        return None
    figure = Figure(figsize=(11, 1.7 + 0.55 * len(known)), layout="constrained")
    axes = figure.subplots()
    for place, (_, seconds) in enumerate(known):
        whole, left = sum(value or 0.0 for value in seconds.values()), 0.0
        for part, (colour, hatch) in PART_STYLES.items():
            share = 100 * max(0.0, seconds[part] or 0.0) / whole
            axes.barh(place, share, 0.62, left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
            if share >= 6:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
                axes.text(left + share / 2, place, f"{share:.0f} %", ha="center", va="center", fontsize="small", bbox=box)
            left += share
    from matplotlib.patches import Patch

    names = PARTS | ({"steps": STEPS_WITH_EXPOSED} if all(s["exposed"] is None for _, s in known) else {})
    if any(seconds["compilation"] is None for _, seconds in known):
        names |= {"rest": REST_WITH_COMPILATION if all(s["compilation"] is None for _, s in known) else names["rest"]}
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=names[part])
        for part, (colour, hatch) in PART_STYLES.items()
        if any(seconds[part] for _, seconds in known)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize="small")
    axes.set_yticks(range(len(known)), [run.label for run, _ in known])
    axes.set(xlim=(0, 100), xlabel="% of the wall time of the run's sessions", ylim=(len(known) - 0.5, -0.5))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _line(axes, records, x, y, x_scale=1.0, y_scale=1.0, markers=None, **style) -> list[list[float]]:
    """Draw a line; [its finite values], [] where there is none."""
    pairs = [(a, b) for a, b in zip(values(records, x, x_scale), values(records, y, y_scale), strict=True) if not math.isnan(a)]
    finite = [b for _, b in pairs if math.isfinite(b)]
    if not finite:
        return []
    marker = markers if len(pairs) < 60 else None
    if len(pairs) == 1:
        marker = "o"
    axes.plot(*zip(*pairs, strict=True), marker=marker, markersize=4, **style)
    return [finite]


def _loss_axis(row, drawn) -> None:
    """Logarithmic where all losses are above 0 and differ by much, with numbers that can be read."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if not drawn or min(map(min, drawn)) <= 0:
        return
    spread = max(map(max, drawn)) / min(map(min, drawn))
    if spread < 3:
        return
    for axes in row:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if spread < 1000 else (1.0,)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _accuracy_axis(row, drawn) -> None:
    """From 0 to 100 % unless all that is drawn lies in a part of it."""
    if drawn:
        low, high = min(map(min, drawn)), max(map(max, drawn))
        margin = 0.05 * max(high - low, 2.0)
        whole = high - low > 40
        row[0].set_ylim(0 if whole else max(0.0, low - margin), 101 if whole and high > 60 else min(101.0, high + margin))


def _say_empty(axes, runs, name: str) -> None:
    text = "not in these logs" if name != "wall_seconds" else NO_TIME
    text = text if any(run.records for run in runs) else "nothing was logged yet"
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="0.35")


def _time_unit(runs) -> tuple[str, float]:
    longest = max((s for run in runs for s in values(run.records, "wall_seconds") if not math.isnan(s)), default=0.0)
    if longest < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest < 3 * 3600 else ("hours", 3600.0)


def _tidy(panels) -> None:
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)


def _legend(figure, runs, widths=()) -> None:
    """One for all panels: the runs, and what thin and thick lines are."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **style, linewidth=2, label=_short(run.label)) for run, style in styles(runs)]
    handles = handles if len(runs) > 1 else []
    handles += [
        Line2D([], [], color="0.3", linewidth=width, marker=marker, markersize=4, label=text) for text, width, marker in widths
    ]
    if handles:
        longest = max(len(handle.get_label()) for handle in handles)
        columns = min(4, max(1, LEGEND_LETTERS // (longest + 8)))
        figure.legend(
            handles=handles, loc="outside upper center", ncols=columns, frameon=False, fontsize="small", handlelength=3.2
        )


def _short(label: str) -> str:
    return label if len(label) <= 40 else "…" + label[-39:]
