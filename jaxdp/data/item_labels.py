"""The label of an image as a task has it: its type in batches, and the check of what a source gives."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp.config import Config


@dataclass(frozen=True)
class ClassLabel:
    """One class, int32: from 0 to classes - 1. relabel: label of the source -> label in batches; None: the same."""

    classes: int
    relabel: np.ndarray | None = None
    ignored = np.int32(-1)  # of an image that cannot be used and does not count

    def empty(self, count: int) -> np.ndarray:
        """Room for labels, [count] int32."""
        return np.empty(count, np.int32)

    def read(self, label: Any) -> np.int32:
        """The label in a batch. Raises ValueError, whose text follows the label."""
        number = as_array(label)
        if number.size != 1 or number.dtype.kind not in "iub" or not 0 <= number.item() < self.classes:
            raise ValueError(f"is not an integer from 0 to {self.classes - 1}; fix it or the number of classes")
        return np.int32(number.item() if self.relabel is None else self.relabel[int(number.item())])


@dataclass(frozen=True)
class LabelVector:
    """Several labels, float32 [classes], each 0 or 1."""

    classes: int
    ignored = np.float32(np.nan)

    def empty(self, count: int) -> np.ndarray:
        """Room for labels, [count, classes] float32."""
        return np.empty((count, self.classes), np.float32)

    def read(self, label: Any) -> np.ndarray:
        """The labels in a batch. Raises ValueError, whose text follows the label."""
        values = as_array(label)
        if values.shape != (self.classes,) or values.dtype.kind not in "iubf" or not np.isin(values, (0, 1)).all():
            raise ValueError(f"is not an array of {self.classes} labels, each 0 or 1")
        return values.astype(np.float32)


def label_of(config: Config, relabel: np.ndarray | None = None) -> ClassLabel | LabelVector:
    """What the data of a config give for an image. relabel: see `ClassLabel`."""
    classes = config.model.class_count
    if config.task == "labels":
        return LabelVector(classes)
    return ClassLabel(classes) if relabel is None else ClassLabel(len(relabel), relabel)


def as_array(label: Any) -> np.ndarray:
    """A label as an array; one of no known type for a ragged list, or a tensor that is not in the memory of the host."""
    try:
        return np.asarray(label)
    except Exception:
        return np.array(None)


def counts(labels: np.ndarray) -> np.ndarray:
    """Which labels of a batch belong to images that count, bool [B]."""
    return labels >= 0 if labels.ndim == 1 else ~np.isnan(labels).any(-1)


def without_ignored(labels: np.ndarray) -> np.ndarray:
    """The labels of a batch with 0 for images that do not count."""
    return np.maximum(labels, 0) if labels.ndim == 1 else np.nan_to_num(labels)
