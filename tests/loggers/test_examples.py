"""Tests of the collection and the picture of examples."""

import numpy as np
from PIL import ImageDraw

from jaxdp.loggers.example_grid import example_grid
from jaxdp.training.evaluation import ExampleCollector


def test_example_collector_leaves_out_padding_and_bad_images():
    collector = ExampleCollector(100, limit=5)
    assert collector.selected.tolist() == [0, 25, 50, 74, 99]
    weights = np.array([1, 1, 0, 0], np.int32)  # 50 is left out; the last row is padding
    positions = np.array([25, 26, 50, 0], np.uint32)
    batch = {"positions": positions, "weights": weights, "labels": np.arange(4), "images": np.zeros((4, 2, 2, 3), np.uint8)}
    collector(batch)(np.array([7, 8, 9, 9]))
    _, labels, predicted = collector.arrays()
    assert (labels.tolist(), predicted.tolist()) == ([0], [7])


def test_pictures_have_the_names_of_classes_and_of_wrong_predictions(monkeypatch):
    written = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, place, text, **_: written.append(text))
    images, labels, predicted = np.zeros((3, 4, 4, 3), np.uint8), np.array([0, 0, 2]), np.array([0, 1, 2])
    example_grid(images, labels, predicted, class_names=("cat", "dog"))
    assert written == ["cat", "cat", "predicted dog", "2"]
