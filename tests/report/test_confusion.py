"""Accuracy by class, mistakes and their figure."""

import numpy as np

from jaxdp.report import plots, tables
from jaxdp.report.confusion import MAX_LIST_ROWS, ConfusionReport, classes_csv


def test_confusion_of_a_thousand_classes_lists_the_worst_and_the_most_frequent_mistakes():
    counts = np.diag(np.full(1000, 50))
    counts[7] = np.roll(counts[7], 1)  # all 50 images of class 7 are predicted as class 8
    counts[500, [500, 3]] = 30, 20
    confusion = ConfusionReport(counts, [f"c{number}" for number in range(1000)], "a checkpoint")
    rows = confusion.by_class()
    assert rows[0] == {"name": "c7", "images": 50, "correct": 0, "accuracy": 0.0, "confused_with": ["c8"]} | {
        "images_confused": 50
    }
    assert rows[1] == {"name": "c500", "images": 50, "correct": 30, "accuracy": 0.6, "confused_with": ["c3"]} | {
        "images_confused": 20
    }
    assert rows[2]["confused_with"] == []
    assert confusion.mistakes() == [("c7", "c8", 50), ("c500", "c3", 20)]
    mistakes = plots._mistakes("classes-1", confusion)
    assert (mistakes["names"], mistakes["traces"][0]["x"]) == (["c7 → c8", "c500 → c3"], [50, 20])
    assert tables.classes_table(confusion).count(" of 50</td>") == MAX_LIST_ROWS


def test_equally_frequent_wrong_predictions_are_all_named():
    counts = np.array([[7, 0, 1, 1], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]])
    confusion = ConfusionReport(counts, ["cat", "dog", "cow", "hen"], "a checkpoint")
    assert ">cow, hen (1)</td>" in tables.classes_table(confusion)
    assert b'cat,9,7,0.777778,"cow, hen",1\n' in classes_csv(confusion)
    many = ConfusionReport(np.ones((6, 6), int), list("abcdef"), "a checkpoint")
    assert ">b, c, d and 2 more (1)</td>" in tables.classes_table(many)
