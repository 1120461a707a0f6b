"""Which classes a run gets right, and what it takes them for: numbers and a picture from the counts of an evaluation."""

import csv
import io
from dataclasses import dataclass

import numpy as np

from jaxdp.report.curves import BLUE

MOST_IN_A_MATRIX = 25  # classes whose matrix can be read
MOST_IN_A_LIST = 20


@dataclass(frozen=True)
class Classes:
    """counts: int64 [classes, classes], images by label (rows) and predicted class; names: of the classes."""

    counts: np.ndarray
    names: list[str]
    checkpoint: str

    def rows(self) -> list[dict]:
        """{"name", "images", "right", "accuracy", "taken_for"} of each class that has images, the worst first.

        taken_for: (name, images) of what it was most often taken for, None where all were right.
        """
        found = []
        for label, images in enumerate(self.counts.sum(1)):
            if images:
                wrong = self.counts[label].copy()
                right, wrong[label] = int(wrong[label]), 0
                taken = (self.names[wrong.argmax()], int(wrong.max())) if wrong.max() else None
                row = {"name": self.names[label], "images": int(images), "right": right}
                found.append(row | {"accuracy": right / int(images), "taken_for": taken})
        return sorted(found, key=lambda row: row["accuracy"])

    def confusions(self) -> list[tuple[str, str, int]]:
        """(label, predicted class, images) of the most frequent mistakes, at most MOST_IN_A_LIST."""
        wrong = self.counts.copy()
        np.fill_diagonal(wrong, 0)
        order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_IN_A_LIST]
        places = [np.unravel_index(place, wrong.shape) for place in order]
        return [(self.names[i], self.names[j], int(wrong[i, j])) for i, j in places if wrong[i, j]]

    @property
    def fit_a_matrix(self) -> bool:
        return len(self.counts) <= MOST_IN_A_MATRIX


def classes_csv(found: Classes) -> bytes:
    """A row for each class that has images, the worst first."""
    rows = [[r["name"], r["images"], r["right"], f"{r['accuracy']:.6g}", *(r["taken_for"] or ("", ""))] for r in found.rows()]
    return _csv([["class", "images", "right", "accuracy", "most_often_taken_for", "images_taken_so"], *rows])


def confusions_csv(found: Classes) -> bytes:
    """The confusion matrix: a row for each pair of a label and a predicted class that occurred, hits too."""
    pairs = np.argwhere(found.counts)
    rows = [[found.names[i], found.names[j], int(found.counts[i, j])] for i, j in pairs]
    return _csv([["label", "predicted", "images"], *rows])


def _csv(rows: list[list]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def by_class(classes: Classes):
    """Accuracy by class beside the confusion matrix; for many classes the worst ones beside the most frequent mistakes."""
    from matplotlib.figure import Figure

    rows = classes.rows()
    shown = rows if classes.fit_a_matrix else rows[:MOST_IN_A_LIST]
    height = 1.8 + 0.26 * max(len(shown), 6)
    figure = Figure(figsize=(11, max(height, 4.5)), layout="constrained")
    accuracy, mistakes = figure.subplots(1, 2, width_ratios=(1, 1.3))
    which = "all classes" if len(shown) == len(rows) else f"the worst {len(shown)} of {len(rows)} classes"
    _bars(accuracy, [_short(row["name"]) for row in shown], [100 * row["accuracy"] for row in shown], "{:.1f}", 100)
    accuracy.set(title=f"Accuracy, {which}", xlabel="% of the class's held-out images", xlim=(0, 114))
    accuracy.set_xticks(range(0, 101, 20))
    if classes.fit_a_matrix:
        _matrix(mistakes, classes)
        return figure
    pairs = classes.confusions()
    _bars(mistakes, [f"{_short(a)} → {_short(b)}" for a, b, _ in pairs], [n for *_, n in pairs], "{:.0f}", None)
    mistakes.set(title="Most frequent mistakes", xlabel="images: label → predicted class")
    mistakes.xaxis.get_major_locator().set_params(integer=True)
    if not pairs:
        mistakes.text(0.5, 0.5, "there are none", transform=mistakes.transAxes, ha="center", va="center")
    return figure


def _bars(axes, names: list[str], lengths: list[float], text: str, full) -> None:
    places = np.arange(len(names))
    axes.barh(places, lengths, color=BLUE)
    for place, length in zip(places, lengths, strict=True):
        axes.annotate(text.format(length), (length, place), (3, 0), textcoords="offset points", va="center", fontsize="small")
    axes.set_yticks(places, names, fontsize="small")
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.12 if full is None else 0)
    axes.spines[["top", "right"]].set_visible(False)


def _matrix(axes, classes: Classes) -> None:
    """Shades are shares of the label's images, numbers are images."""
    share = classes.counts / np.maximum(1, classes.counts.sum(1, keepdims=True))
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    for (i, j), count in np.ndenumerate(classes.counts):
        if count:
            size, colour = "small" if len(share) <= 12 else "xx-small", "white" if share[i, j] > 0.5 else "black"
            axes.text(j, i, str(count), ha="center", va="center", fontsize=size, color=colour)
    names = [_short(name) for name in classes.names]
    places = range(len(names))
    upright = max(map(len, names)) > 3
    axes.set_xticks(places, names, fontsize="small", rotation=90 if upright else 0)
    axes.set_yticks(places, names, fontsize="small")
    axes.set(title="Confusion matrix, in images", xlabel="predicted class", ylabel="label")


def _short(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "…"
