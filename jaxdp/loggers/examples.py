"""Collects a few held-out images with their predicted classes, for writers that show images."""

from collections.abc import Callable
from typing import Any

import numpy as np


class ExampleCollector:
    """An `observer` of `jaxdp.training.evaluation.evaluate` that keeps up to `limit` images, evenly spread over all `total`."""

    def __init__(self, total: int, limit: int = 16) -> None:
        self.selected = np.unique(np.linspace(0, total - 1, min(limit, total)).round().astype(np.int64))
        self.collected: dict[int, tuple[np.ndarray, int, int]] = {}  # position -> (image, label, predicted class)

    def __call__(self, batch: dict[str, Any]) -> Callable[[np.ndarray], None] | None:
        rows = np.flatnonzero(np.isin(batch["positions"], self.selected) & (batch["weights"] > 0))
        positions, images, labels = (batch[name][rows].copy() for name in ("positions", "images", "labels"))

        def add_predictions(predicted: np.ndarray) -> None:
            for index, row in enumerate(rows):
                self.collected[int(positions[index])] = images[index], labels[index], predicted[row]

        return add_predictions if len(rows) else None

    def arrays(self) -> list[np.ndarray]:
        """[images uint8 [E, H, W, 3], labels int32 [E], predicted classes int32 [E]], ordered by position; [] if empty."""
        return [np.array(column) for column in zip(*(self.collected[p] for p in sorted(self.collected)), strict=True)]
