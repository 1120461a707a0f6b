"""Moving average of curves."""

import numpy as np
import pytest

from jaxdp.loggers.smoothing import moving_average


@pytest.mark.parametrize(("points", "half"), [(1, 0), (11, 0), (12, 1), (27, 1), (320, 8), (1000, 25)])
def test_moving_average_is_the_mean_of_a_window_of_a_twentieth_of_the_points(points, half):
    values = np.random.default_rng(points).normal(size=points) ** 3
    for n, mean in enumerate(moving_average(values)):
        radius = min(half, n, points - 1 - n)
        assert mean == pytest.approx(np.mean(values[n - radius : n + radius + 1]))


def test_moving_average_leaves_out_values_that_are_not_finite():
    values = [1.0] * 10 + [np.nan, np.inf] + [1.0] * 10
    np.testing.assert_array_equal(moving_average(values), values)
