"""Tests of jaxdp.loggers.plot."""

import os

import numpy as np
from PIL import Image

from jaxdp.loggers.plot import plot_training

STEP = {"epoch": 1.5, "phase": 0, "global_batch": 64, "loss": 0.25, "learning_rate": 0.1, "images_per_second": 300.0}


def test_plot_training_without_evaluations_draws_all_four_panels(tmp_path):
    records = [STEP | {"accuracy": 0.5, "epoch": float(e)} for e in range(3)]
    plot_training(records, tmp_path / "a.png")
    evaluated = {"epoch": 2.0, "eval_accuracy": 0.9, "eval_loss": float("nan")}
    plot_training([*records, evaluated], tmp_path / "b.png")
    a, b = (np.asarray(Image.open(tmp_path / name).convert("L")) for name in ("a.png", "b.png"))
    assert a.shape == b.shape == (780, 1200)
    for quarter in (a[:390, :600], a[:390, 600:], a[390:, :600], a[390:, 600:]):
        assert (quarter < 128).mean() > 0.002
    assert not np.array_equal(a, b)


def test_plot_training_replaces_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "training.png")
    plot_training(
        [{"epoch": 0.5, "samples": 8, "loss": 2.0, "accuracy": 0.1, "learning_rate": 0.1, "global_batch": 8}],
        tmp_path / "training.png",
    )
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["training.png"]
