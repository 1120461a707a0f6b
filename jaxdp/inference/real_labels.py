"""ImageNet ReaL: all labels that fit an image of ImageNet's validation set (Beyer et al., arXiv 2006.07159)."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.errors import ConfigError
from jaxdp.files import check_local, expand_user, read_text

FLAG = "--real-labels"
IMAGES, CLASSES = 50_000, 1000  # of ImageNet's validation set


class RealLabels:
    """Counts the predictions that are among the labels of their images; images without labels do not count.

    An observer of `jaxdp.training.evaluation.evaluate`. path: real.json, a list of labels from 0 to 999 for each of the 50,000
    images, in the order of their numbers. source: the evaluated data set, whose files are named ILSVRC2012_val_00000001.JPEG
    and so on.
    Raises ConfigError for another file or other images.
    """

    def __init__(self, path: str | Path, source: Any) -> None:
        self.path, self.labels = str(path), _read(path)
        self.file_name: Callable[[int], str] | None = getattr(getattr(source, "source", None), "file_name", None)
        self.correct = self.counted = 0
        self._labels_of(0)  # fails before the evaluation if the images are of another data set

    def __call__(self, batch: dict[str, np.ndarray]) -> Callable[[np.ndarray], None]:
        labels = [
            self._labels_of(int(position)) if weight else frozenset()
            for position, weight in zip(batch["positions"], batch["weights"], strict=True)
        ]

        def observe(predicted: np.ndarray) -> None:
            counts = [int(one) in fitting for one, fitting in zip(predicted, labels, strict=True) if fitting]
            self.correct, self.counted = self.correct + sum(counts), self.counted + len(counts)

        return observe

    @property
    def result(self) -> dict[str, float]:
        """{"real_accuracy" in [0, 1], "real_examples"}. Raises ConfigError if no image has a label."""
        if not self.counted:
            raise ConfigError(
                FLAG, self.path, reason="no evaluated image has a label there", hint="give real.json of the authors"
            )
        return {"real_accuracy": self.correct / self.counted, "real_examples": self.counted}

    def _labels_of(self, position: int) -> frozenset[int]:
        name = self.file_name(position) if self.file_name else ""
        match = re.match(r"ILSVRC2012_val_(\d{8})", name)
        number = int(match[1]) if match else 0
        if not 1 <= number <= IMAGES:
            reason = f"the evaluated image {name or position!r} is not one of ImageNet's validation set"
            hint = "use --data.source imagenet2012, or a folder of files such as ILSVRC2012_val_00000001.JPEG"
            raise ConfigError(FLAG, self.path, reason=reason, hint=hint)
        return self.labels[number - 1]


def _read(path: str | Path) -> list[frozenset[int]]:
    """The labels of each image. Raises ConfigError for anything but lists of ImageNet's labels for its validation set."""
    check_local(str(path), FLAG)
    path = expand_user(path, FLAG)
    try:
        labels = json.loads(read_text(path))
    except OSError as error:
        raise ConfigError(FLAG, str(path), reason=error.strerror or str(error)) from None
    except (ValueError, RecursionError):
        labels = None
    if not isinstance(labels, list) or len(labels) != IMAGES or not all(map(_are_labels, labels)):
        reason = f"must be a JSON list of {IMAGES:,} lists of labels, from 0 to {CLASSES - 1}"
        raise ConfigError(FLAG, str(path), reason=reason, hint="give real.json of the authors")
    return [frozenset(fitting) for fitting in labels]


def _are_labels(entry: Any) -> bool:
    """Whether an entry is a list of ImageNet's labels; bool is a subclass of int."""
    return isinstance(entry, list) and all(type(label) is int and 0 <= label < CLASSES for label in entry)
