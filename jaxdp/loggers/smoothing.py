"""Moving average of noisy curves."""

from collections.abc import Sequence

import numpy as np

SHARE = 0.05  # of the points, in a window
FEWEST = 12  # points of a curve that is smoothed
METHOD = f"moving average over {100 * SHARE:g} % of the log lines, at least 3"


def window(points: int) -> int:
    """Number of points in a window, odd: about `SHARE` of the points and at least 3; 1 for a curve of few points."""
    return 1 if points < FEWEST else max(3, 2 * round(SHARE * points / 2) + 1)


def moving_average(curve: Sequence[float]) -> np.ndarray:
    """The mean of the finite values in a centered window around each point, float64 [N].

    Windows shrink symmetrically at both ends, so that the first and the last value stay. Values that are not finite stay too.
    """
    raw = np.asarray(curve, np.float64)
    index, finite = np.arange(len(raw)), np.isfinite(raw)
    radius = np.minimum(window(len(raw)) // 2, np.minimum(index, index[::-1]))
    totals = np.concatenate([[0.0], np.cumsum(np.where(finite, raw, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    first, end = index - radius, index + radius + 1
    means = (totals[end] - totals[first]) / np.maximum(1, counts[end] - counts[first])
    return np.where(finite, means, raw)
