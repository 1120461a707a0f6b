"""training.png: loss, accuracy, learning rate and batch size over epochs."""

import io
from pathlib import Path
from typing import Any

from jaxdp.files import write_atomically

BLUE, ORANGE = "#0072B2", "#D55E00"  # distinguishable for color-blind readers (Okabe & Ito)


def plot_training(records: list[dict[str, Any]], path: Path) -> None:
    """Plot a run's records (see `jaxdp.loggers.writers`) in four panels over epochs. Overwrites `path`."""
    from matplotlib.figure import Figure

    training = [record for record in records if "loss" in record]
    evaluation = [record for record in records if "eval_accuracy" in record]
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    loss, accuracy, rate, batch = figure.subplots(2, 2, sharex=True).ravel()

    def line(axes: Any, rows: list[dict[str, Any]], name: str, *, scale: float = 1.0, **style: Any) -> None:
        if rows:
            marker = "." if len(rows) < 60 else None
            axes.plot([row["epoch"] for row in rows], [scale * row[name] for row in rows], marker=marker, **style)

    line(loss, training, "loss", color=BLUE, label="training batches")
    line(loss, evaluation, "eval_loss", color=ORANGE, label="held out")
    line(accuracy, training, "accuracy", scale=100, color=BLUE, label="training batches")
    line(accuracy, evaluation, "eval_accuracy", scale=100, color=ORANGE, label="held out")
    line(rate, training, "learning_rate", color=BLUE)
    line(batch, training, "global_batch", color=BLUE, drawstyle="steps-post")
    loss.set(title="Loss", ylabel="nats", yscale="log")
    accuracy.set(title="Accuracy", ylabel="%")
    rate.set(title="Learning rate", xlabel="epoch")
    batch.set(title="Global batch", xlabel="epoch", ylabel="images")
    batch.set_ylim(bottom=0)
    if evaluation:
        last = evaluation[-1]
        accuracy.annotate(
            f"{100 * last['eval_accuracy']:.2f} %",
            (last["epoch"], 100 * last["eval_accuracy"]),
            textcoords="offset points",
            xytext=(-4, -16),
            ha="right",
            color=ORANGE,
        )
    for axes in (loss, accuracy):
        axes.legend(frameon=False)
    for axes in (loss, accuracy, rate, batch):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    png = io.BytesIO()
    figure.savefig(png, dpi=120, format="png")
    write_atomically(path, png.getvalue())
