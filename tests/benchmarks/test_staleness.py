"""The simulation of asynchronous workers, on a problem solved by hand."""

from pathlib import Path
from typing import NamedTuple

import pytest


@pytest.fixture
def staleness(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import staleness

    return staleness


class State(NamedTuple):
    params: float


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_train_with_stale_gradients_equals_the_recurrence(staleness, tau):
    """Minimize x^2 / 2, whose gradient is x: x[t + 1] = x[t] - 0.3 x[max(0, t - tau)]."""
    xs = [1.0]
    for t in range(12):
        xs.append(xs[t] - 0.3 * xs[max(0, t - tau)])
    ended = staleness.train_with_stale_gradients(
        State(1.0), lambda x, state, step: x, lambda state, g, step: State(state.params - 0.3 * g), range(12), tau
    )
    assert ended.params == pytest.approx(xs[-1])


def test_config_for_several_workers_scales_batch_and_rate(staleness):
    one, four = staleness.config_for(0.1), staleness.config_for(0.1, workers=4)
    assert (one.batch[0].global_batch, four.batch[0].global_batch) == (32, 128)
    assert four.schedule.learning_rate == pytest.approx(4 * one.schedule.learning_rate)
