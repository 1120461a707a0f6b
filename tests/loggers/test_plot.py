import numpy as np
import pytest
from PIL import Image

from jaxdp.config import Config, Optimizer
from jaxdp.loggers.plot import plot_training, training_figure
from jaxdp.loggers.smoothing import moving_average

CONFIG = Config(optimizer=Optimizer(label_smoothing=0.1))
STEP = {"epoch": 1.5, "phase": 0, "global_batch": 64, "loss": 0.25, "learning_rate": 0.1, "images_per_second": 300.0}


@pytest.mark.slow
def test_plot_training_without_evaluations_draws_all_four_panels(tmp_path):
    records = [STEP | {"accuracy": 0.5, "epoch": float(e)} for e in range(3)]
    plot_training(records, tmp_path / "a.png", CONFIG)
    evaluated = {"epoch": 2.0, "eval_accuracy": 0.9, "eval_loss": float("nan")}
    plot_training([*records, evaluated], tmp_path / "b.png", CONFIG)
    a, b = (np.asarray(Image.open(tmp_path / name).convert("L")) for name in ("a.png", "b.png"))
    assert a.shape == b.shape == (780, 1200)
    for quarter in (a[:390, :600], a[:390, 600:], a[390:, :600], a[390:, 600:]):
        assert (quarter < 128).mean() > 0.002
    assert not np.array_equal(a, b)


def test_training_figure_smooths_training_curves_and_labels_both_losses():
    rng = np.random.default_rng(0)
    records = [STEP | {"epoch": n / 10, "loss": 1 + rng.random(), "accuracy": 0.5} for n in range(100)]
    held_out = {"epoch": 10.0, "eval_accuracy": 0.987, "eval_loss": 0.25}
    figure = training_figure([*records, held_out], CONFIG)
    loss, accuracy, *_ = figure.axes
    raw, smooth, _ = loss.lines
    np.testing.assert_array_equal(raw.get_ydata(), [record["loss"] for record in records])
    np.testing.assert_array_equal(smooth.get_ydata(), moving_average(raw.get_ydata()))
    assert (raw.get_linestyle(), raw.get_alpha() < 0.5) == ("None", True)
    texts = [text.get_text() for text in loss.get_legend().get_texts()]
    assert texts == ["training loss: labels smoothed by 0.1", "held-out loss: plain labels"]
    figure.draw_without_rendering()
    for axes, value in ((loss, "0.25"), (accuracy, "98.70 %")):
        (label,) = axes.texts
        assert label.get_text() == value
        box = label.get_window_extent()
        assert axes.bbox.x1 < box.x0 < box.x1 <= figure.bbox.x1  # beside the curves
