import threading
import time

import pytest

from jaxdp.distributed.status import MIN_DURATIONS, ProcessStatus


def test_heartbeat_of_a_suspended_process_reports_no_idle_time():
    """Time is counted in ticks, which stop while a process is suspended."""
    status = ProcessStatus()
    status.set_activity("step", 1)
    status.tick(1.0)
    assert status.heartbeat().idle_seconds == 1.0
    status.record_progress()
    assert status.heartbeat().idle_seconds == 0.0


def test_heartbeat_after_several_iterations_reports_their_typical_duration(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    status = ProcessStatus()
    for step in range(MIN_DURATIONS + 1):
        status.begin_iteration("step")
        status.set_activity("step", step)
        assert (status.heartbeat().typical_seconds is None) == (step < MIN_DURATIONS)
        status.set_activity("load", step + 1)
        now[0] += 2.0
    status.set_activity("save")
    now[0] += 100.0
    status.begin_iteration("step")  # the save in between is not part of a step
    status.set_activity("step", 9)
    now[0] += 2.0
    status.begin_iteration("step")
    assert (status.heartbeat().typical_seconds, status.heartbeat().longest_seconds) == (2.0, 2.0)


def test_position_does_not_change_with_activities_of_one_process():
    first, second = ProcessStatus(), ProcessStatus()
    for status in (first, second):
        status.training_thread = threading.get_ident()
        status.set_activity("step", 1)
        if status is first:
            with status.performing("writing the log"):
                assert status.heartbeat().detail == "writing the log"
        with status.at_barrier("the others"):
            assert status.heartbeat().detail == "waiting for the others"
        status.set_activity("save")
    assert first.position == second.position == (0, 1, 1)


def test_performing_when_the_block_raises_restores_the_detail():
    status = ProcessStatus()
    status.set_activity("step", 1, "waiting for the results")
    with pytest.raises(KeyError), status.performing("writing the log"):
        raise KeyError
    assert status.heartbeat().detail == "waiting for the results"


def test_position_does_not_change_with_barriers_of_a_background_save():
    status = ProcessStatus()

    def save():
        with status.at_barrier("written"):
            pass

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert status.position == (0, 0, 0)
