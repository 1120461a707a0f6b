import time

import pytest

from jaxdp.checkpoint.progress import Progress
from jaxdp.training.clock import Clock


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the clocks of `time` return, in a list of one."""
    now = [0.0]
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, lambda: now[0])
    return now


def raise_after(seconds, clock):
    clock[0] += seconds
    raise KeyError


def test_paused_when_the_block_raises_counts_its_time_and_restarts_the_step(clock):
    timer = Clock(Progress(), command_start=0.0)
    with pytest.raises(KeyError), timer.paused("evaluation"):
        raise_after(5.0, clock)
    clock[0] += 1.0
    timer.end_step(images=8)
    assert (timer.progress.training_seconds, timer.progress.evaluation_seconds) == (1.0, 5.0)


def test_throughput_is_that_since_it_was_restarted_without_excluded_time(clock):
    timer = Clock(Progress(), command_start=0.0)
    for seconds, input_seconds in ((1.0, 0.5), (3.0, 0.25)):
        clock[0] += seconds
        timer.add_input_seconds(input_seconds)
        found = timer.end_step(images=8)
    assert found == {"images_per_second": 4.0, "input_seconds": 0.75, "wall_seconds": 4.0}
    timer.restart_throughput()
    clock[0] += 2.0
    with timer.excluded():
        clock[0] += 5.0
    assert timer.end_step(images=8) == {"images_per_second": 4.0, "input_seconds": 0.0, "wall_seconds": 11.0}
    assert (timer.progress.training_seconds, timer.progress.input_seconds) == (6.0, 0.75)
