"""training.png: loss, accuracy, learning rate and batch size over epochs."""

from pathlib import Path

BLUE, ORANGE = "#0072B2", "#D55E00"  # told apart by the colour-blind (Okabe & Ito)


def draw(records: list[dict], path: Path) -> None:
    """Four panels from a run's records (see `jaxdp.training.metrics`), over epochs. Overwrites `path`."""
    from matplotlib.figure import Figure

    training = [r for r in records if "loss" in r]
    evaluation = [r for r in records if "eval_accuracy" in r]
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    loss, accuracy, rate, batch = figure.subplots(2, 2, sharex=True).ravel()

    def line(axes, rows, name, scale=1.0, **style):
        if rows:
            marker = "." if len(rows) < 60 else None
            axes.plot([r["epoch"] for r in rows], [scale * r[name] for r in rows], marker=marker, **style)

    line(loss, training, "loss", color=BLUE, label="training batches")
    line(loss, evaluation, "eval_loss", color=ORANGE, label="held out")
    line(accuracy, training, "accuracy", 100, color=BLUE, label="training batches")
    line(accuracy, evaluation, "eval_accuracy", 100, color=ORANGE, label="held out")
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
    figure.savefig(path, dpi=120)
