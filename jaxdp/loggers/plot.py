"""training.png: loss, first metric, learning rate and batch size over epochs."""

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdp.config import Config
from jaxdp.config_words import HELD_OUT_LABELS, training_labels
from jaxdp.files import write_atomically
from jaxdp.loggers.smoothing import moving_average, window
from jaxdp.metrics import METRICS, bare, is_evaluation, title_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colors of Okabe & Ito, distinguishable for color-blind readers.
BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
COLORS, GRAY = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, BLACK), "#BBBBBB"
LOSS_LABEL = "loss"
WIDE_SPREAD = 3.0  # ratio of the largest to the smallest value that one linear axis cannot show


def plot_training(records: list[dict[str, Any]], path: Path, config: Config) -> None:
    """Plot a run's records (see `jaxdp.run_records`) in four panels over epochs. Overwrites `path`."""
    png = io.BytesIO()
    training_figure(records, config).savefig(png, format="png")
    write_atomically(path, png.getvalue())


def training_figure(records: list[dict[str, Any]], config: Config) -> "Figure":
    """The figure of `plot_training`."""
    from matplotlib.figure import Figure

    training = [record for record in records if "loss" in record]
    evaluation = [record for record in records if is_evaluation(record)]
    name, labels = config.first_metric, training_labels(config)
    entry, scale = METRICS[name], 100 if METRICS[name].is_share else 1
    figure = Figure(figsize=(10, 6.5), dpi=120, layout="constrained")
    loss, metric, rate, batch = figure.subplots(2, 2, sharex=True).ravel()
    _draw_metric(loss, training, "loss", color=BLUE, label=f"training loss: {labels}")
    _draw_metric(loss, evaluation, "eval_loss", color=ORANGE, label=f"held-out loss: {HELD_OUT_LABELS}")
    if entry.of == "images":
        _draw_metric(metric, training, bare(name), scale=scale, color=BLUE, label="training batches")
    _draw_metric(metric, evaluation, name, scale=scale, color=ORANGE, label="held-out images")
    epochs = [row["epoch"] for row in training]
    rate.plot(epochs, [row["learning_rate"] for row in training], color=BLUE)
    batch.plot(epochs, [row["global_batch"] for row in training], color=BLUE, drawstyle="steps-post")
    losses = [row.get(name) for name, rows in (("loss", training), ("eval_loss", evaluation)) for row in rows]
    drawn = [value for value in losses if value and math.isfinite(value)]
    if logarithmic := is_logarithmic(drawn):
        _set_log_scale(loss, max(drawn) / min(drawn))
    loss.set(title="Loss", ylabel=f"{LOSS_LABEL} (log scale)" if logarithmic else LOSS_LABEL)
    metric.set(title=title_of(name).capitalize(), ylabel="%" * entry.is_share)
    rate.set(title="Learning rate", xlabel="epoch")
    batch.set(title="Global batch", xlabel="epoch", ylabel="images")
    batch.set_ylim(bottom=0)
    if evaluation:
        _label_end(loss, evaluation[-1].get("eval_loss"), "{:.3g}")
        _label_end(metric, evaluation[-1].get(name), "{:.2f} %" if entry.is_share else "{:.4f}", scale=scale)
    for axes in (loss, metric):
        axes.legend(frameon=False, fontsize="small")
    for axes in (loss, metric, rate, batch):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if window(len(training)) > 1:
        text = f"training curves: moving average over {window(len(training))} log lines; dots: every log line"
        figure.supxlabel(text, fontsize="small")
    return figure


def is_logarithmic(values: Iterable[float | None], spread: float = WIDE_SPREAD) -> bool:
    """Whether an axis is logarithmic at first: all values are positive and span this factor or more."""
    found = [value for value in values if value is not None]
    return bool(found) and min(found) > 0 and max(found) / min(found) >= spread


def _set_log_scale(axes: Any, spread: float) -> None:
    """A log scale with readable ticks."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if spread < 1000 else (1.0,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_metric(axes: Any, rows: list[dict[str, Any]], name: str, *, scale: float = 1.0, color: str, label: str) -> None:
    """Draw held-out values as dots on a line, and training values as a moving average in front of pale dots."""
    if not rows:
        return
    epochs = [row["epoch"] for row in rows]
    values = [math.nan if row[name] is None else scale * row[name] for row in rows]
    if name.startswith("eval_"):
        axes.plot(epochs, values, color=color, label=label, marker="o" if len(rows) < 60 else None, markersize=4)
        return
    axes.plot(epochs, values, color=color, linestyle="none", marker=".", alpha=0.3)
    axes.plot(epochs, moving_average(values), color=color, label=label)


def _label_end(axes: Any, value: float | None, text: str, *, scale: float = 1.0) -> None:
    """Write the last value of a curve beside the axes, where it covers nothing."""
    if value is not None and math.isfinite(value):
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(
            text.format(scale * value),
            (1.0, scale * value),
            xytext=(4, 0),
            va="center",
            color=ORANGE,
            fontsize="small",
            **place,
        )
