"""Moving average of curves."""

import numpy as np
import pytest

from jaxdp.loggers.smoothing import FEWEST, SHARE, moving_average, window


def test_window_is_odd_and_about_the_share_of_the_points():
    assert {window(points) for points in range(FEWEST)} == {1}
    for points in (FEWEST, 27, 100, 1000, 123_456):
        assert window(points) % 2 == 1
        assert window(points) == pytest.approx(max(3, SHARE * points), abs=1)


@pytest.mark.parametrize("points", [1, 27, 300])
def test_moving_average_is_the_mean_of_each_window(points):
    values = np.random.default_rng(points).normal(size=points) ** 3
    half = window(points) // 2
    for n, mean in enumerate(moving_average(values)):
        radius = min(half, n, points - 1 - n)
        assert mean == pytest.approx(np.mean(values[n - radius : n + radius + 1]))


def test_moving_average_keeps_straight_lines_and_reduces_noise():
    line = np.linspace(3.0, -2.0, 101)
    np.testing.assert_allclose(moving_average(line), line)
    noise = np.random.default_rng(0).normal(size=1000)
    assert np.std(moving_average(noise)) == pytest.approx(1 / np.sqrt(window(1000)), rel=0.3)


def test_moving_average_leaves_out_values_that_are_not_finite():
    values = [1.0] * 10 + [np.nan, np.inf] + [1.0] * 10
    np.testing.assert_array_equal(moving_average(values), values)
