"""Metrics of several labels for each image, from logits and labels of all held-out images, as scikit-learn defines them."""

import numpy as np


def average_precisions(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The average precision of each class, [C] float64; 0 for a class without a positive image. logits, labels: [N, C].

    The sum over the distinct scores, the highest first, of the precision times the gain of the recall.
    """
    return np.array([_average_precision(scores, positive) for scores, positive in zip(logits.T, labels.T > 0, strict=True)])


def _average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    order = np.argsort(-scores, kind="stable")
    last_of_score = np.append(np.diff(scores[order]) != 0, True)
    found = np.cumsum(positive[order])[last_of_score]  # true positives at each threshold
    predicted = np.flatnonzero(last_of_score) + 1
    gain = np.diff(found, prepend=0)
    return float((found / predicted * gain).sum() / max(1, positive.sum()))


def mean_average_precision(logits: np.ndarray, labels: np.ndarray) -> float:
    """The mean of `average_precisions` over the classes."""
    return float(average_precisions(logits, labels).mean())


def _counts(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(true positives, predicted plus actual positives) of each class, [C] each. A probability of 0.5 is a logit of 0."""
    predicted, positive = logits >= 0, labels > 0
    return (predicted & positive).sum(0), predicted.sum(0) + positive.sum(0)


def f1_micro(logits: np.ndarray, labels: np.ndarray) -> float:
    """2 TP / (predicted + actual positives) of all labels together; 0 without any."""
    hits, total = _counts(logits, labels)
    return float(2 * hits.sum() / max(1, total.sum()))


def f1_macro(logits: np.ndarray, labels: np.ndarray) -> float:
    """The mean over the classes of their F1 score, which is 0 for a class without predicted and actual positives."""
    hits, total = _counts(logits, labels)
    return float((2 * hits / np.maximum(1, total)).mean())
