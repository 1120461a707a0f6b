import time

import pytest

from jaxdp.checkpoint.progress import Progress
from jaxdp.training.step_timer import StepTimer


@pytest.fixture
def clock(monkeypatch):
    """The seconds that `time.perf_counter` returns, in a list of one."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def raise_after(seconds, clock):
    clock[0] += seconds
    raise KeyError


def test_paused_when_the_block_raises_counts_its_time_and_restarts_the_step(clock):
    timer = StepTimer(Progress(), command_start=0.0)
    with pytest.raises(KeyError), timer.paused("evaluation"):
        raise_after(5.0, clock)
    clock[0] += 1.0
    assert (timer.end_step(), timer.progress.evaluation_seconds) == (1.0, 5.0)


def test_waiting_for_compiler_when_the_block_raises_counts_its_time(clock):
    timer = StepTimer(Progress(), command_start=0.0)
    with pytest.raises(KeyError), timer.waiting_for_compiler():
        raise_after(5.0, clock)
    assert timer.progress.compilation_seconds == 5.0
