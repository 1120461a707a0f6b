"""Accuracy by class and confusion matrix of an evaluation: numbers and CSV files."""

import csv
import io
from dataclasses import dataclass

import numpy as np

MAX_MATRIX_CLASSES = 25  # that fit into a readable matrix
MAX_LIST_ROWS = 20


@dataclass(frozen=True)
class ConfusionReport:
    """Evaluation of one checkpoint by class.

    counts: int64 [classes, classes], images by label (row) and predicted class (column). caption: checkpoint and accuracy.
    """

    counts: np.ndarray
    class_names: list[str]
    caption: str

    @property
    def fits_matrix(self) -> bool:
        return len(self.counts) <= MAX_MATRIX_CLASSES

    def by_class(self) -> list[dict]:
        """{"name", "images", "correct", "accuracy", "confused_with", "images_confused"} of every class that has images, the
        worst first.

        confused_with: the most frequent wrong predictions; several if they are equally frequent, [] if all predictions are
        correct. images_confused: number of images of each.
        """
        rows = []
        for label, images in enumerate(self.counts.sum(1)):
            if images:
                mistakes = self.counts[label].copy()
                correct, mistakes[label] = int(mistakes[label]), 0
                most = int(mistakes.max())
                row = {"name": self.class_names[label], "images": int(images), "correct": correct}
                confused = [self.class_names[i] for i in np.flatnonzero(mistakes == most)] if most else []
                row |= {"accuracy": correct / int(images), "confused_with": confused, "images_confused": most}
                rows.append(row)
        return sorted(rows, key=lambda row: row["accuracy"])

    def mistakes(self) -> list[tuple[str, str, int]]:
        """(label, predicted class, images) of the `MAX_LIST_ROWS` most frequent mistakes; equal ones in class order."""
        counts = self.counts.copy()
        np.fill_diagonal(counts, 0)
        order = np.argsort(-counts, axis=None, kind="stable")[:MAX_LIST_ROWS]
        pairs = [np.unravel_index(index, counts.shape) for index in order]
        return [(self.class_names[i], self.class_names[j], int(counts[i, j])) for i, j in pairs if counts[i, j]]


def classes_csv(confusion: ConfusionReport) -> bytes:
    """A row for every class that has images, the worst first."""
    rows = [
        [
            *(row["name"], row["images"], row["correct"], f"{row['accuracy']:.6g}"),
            *(", ".join(row["confused_with"]), row["images_confused"] or ""),
        ]
        for row in confusion.by_class()
    ]
    return _csv([["class", "images", "correct", "accuracy", "most_confused_with", "images_confused"], *rows])


def confusions_csv(confusion: ConfusionReport) -> bytes:
    """A row for every pair of label and predicted class that occurs, correct predictions included."""
    names, counts = confusion.class_names, confusion.counts
    rows = [[names[i], names[j], int(counts[i, j])] for i, j in np.argwhere(counts)]
    return _csv([["label", "predicted", "images"], *rows])


def _csv(rows: list[list]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
