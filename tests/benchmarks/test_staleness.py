"""The simulation of asynchronous workers, on a problem solved by hand."""

from pathlib import Path
from typing import NamedTuple

import pytest


class State(NamedTuple):
    params: float


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_train_with_stale_gradients_equals_the_recurrence(monkeypatch, tau):
    """Minimize x^2 / 2, whose gradient is x: x[t + 1] = x[t] - 0.3 x[max(0, t - tau)]."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from staleness import train_with_stale_gradients

    xs = [1.0]
    for t in range(12):
        xs.append(xs[t] - 0.3 * xs[max(0, t - tau)])
    ended = train_with_stale_gradients(
        State(1.0), lambda x, state, step: x, lambda state, g, step: State(state.params - 0.3 * g), range(12), tau
    )
    assert ended.params == pytest.approx(xs[-1])
