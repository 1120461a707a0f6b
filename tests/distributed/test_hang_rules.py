import pytest
from helpers.hangs import (
    COMPILING,
    IN_CALLBACK,
    LIMITS,
    WAITING_FOR_DEVICES,
    WAITING_FOR_RANKS,
    WORKING,
    beat,
    stack,
)

from jaxdp.distributed.hang_rules import SLOW_FACTOR, UNKNOWN_FACTOR, find_hang, ranks_at_fault
from jaxdp.distributed.status import OUTSIDE, Heartbeat


def test_find_hang_after_stuck_seconds_finds_the_rank_behind():
    assert find_hang({0: beat(12, 29.9), 1: beat(10, 29.9)}, LIMITS) is None
    hang = find_hang({0: beat(12, 30.0), 1: beat(10, 31.0), 2: beat(12, 30.0)}, LIMITS)
    assert (hang.ranks, hang.waiting, hang.seconds) == ((1,), (0, 2), 31.0)


def test_find_hang_compares_barriers_before_activities():
    """The activities are counted from zero after a barrier."""
    ahead = Heartbeat("step", position=(0, 4, 0), idle_seconds=40.0, typical_seconds=0.5)
    assert find_hang({0: ahead, 1: beat(900, 40.0)}, LIMITS).ranks == (1,)


def test_find_hang_with_steps_ten_times_slower_than_usual_finds_none():
    slow = {rank: beat(10 + rank, 10 * 8.0, typical_seconds=8.0) for rank in range(2)}
    assert find_hang(slow, LIMITS) is None
    stuck = {rank: beat(10 + rank, SLOW_FACTOR * 8.0, typical_seconds=8.0) for rank in range(2)}
    assert find_hang(stuck, LIMITS).ranks == (0,)


def test_find_hang_uses_the_typical_duration_of_the_slowest_rank():
    heartbeats = {0: beat(10, 100.0, typical_seconds=0.1), 1: beat(11, 100.0, typical_seconds=8.0)}
    assert find_hang(heartbeats, LIMITS) is None


@pytest.mark.parametrize("activity", ["compile", "load", "step", "audit", "evaluate", "save"])
def test_find_hang_without_a_known_duration_allows_more_time_but_less_than_a_minute(activity):
    assert UNKNOWN_FACTOR * LIMITS.stuck_seconds < 60
    assert (
        find_hang(dict.fromkeys(range(2), beat(1, UNKNOWN_FACTOR * 30 - 0.1, activity, typical_seconds=None)), LIMITS) is None
    )
    assert find_hang(dict.fromkeys(range(2), beat(1, UNKNOWN_FACTOR * 30, activity, typical_seconds=None)), LIMITS).all_ranks


def test_find_hang_in_the_first_step_of_a_single_process_allows_two_minutes():
    assert find_hang({0: beat(1, 119.9, typical_seconds=None)}, LIMITS) is None
    assert find_hang({0: beat(1, 120.0, typical_seconds=None)}, LIMITS)
    assert find_hang({0: beat(1, 60.0, typical_seconds=None, longest_seconds=1.0)}, LIMITS)


def test_find_hang_while_the_rank_behind_makes_progress_finds_none():
    assert find_hang({0: beat(12, 300.0), 1: beat(10, 2.0)}, LIMITS) is None


def test_find_hang_outside_of_runs_does_not_end_the_run():
    assert find_hang({0: Heartbeat(OUTSIDE, position=(0, 3, 9), idle_seconds=9999.0)}, LIMITS) is None
    outside = Heartbeat(OUTSIDE, position=(0, 3, 9), idle_seconds=40.0)
    hang = find_hang({0: outside, 1: Heartbeat("start", position=(0, 4, 0), idle_seconds=40.0)}, LIMITS)
    assert (hang.ranks, hang.may_end_run) == ((0,), False)


def test_find_hang_of_a_background_save_while_steps_continue_finds_the_save():
    saving = dict.fromkeys(range(2), beat(90, 0.1, background_save="a", save_seconds=60.0))
    hang = find_hang(saving, LIMITS)
    assert (hang.ranks, hang.in_save) == ((0, 1), True)
    waits = [*WORKING, stack("jaxdp/distributed/control_channel.py:1 in wait_until", "other ranks", "checkpoint_0")]
    writes = [*WORKING, stack("jaxdp/checkpoint/manifest.py:1 in write", name="checkpoint_0")]
    assert ranks_at_fault(hang, {0: waits, 1: writes}) == (1,)
    slow_disk = {0: beat(90, 0.1, background_save="a", save_seconds=40.0, longest_save_seconds=4.0)}
    assert find_hang(slow_disk, LIMITS) is None


def test_ranks_at_fault_of_ranks_at_the_same_position_are_those_that_do_not_wait():
    hang = find_hang({0: beat(10, 31.0), 1: beat(10, 31.0)}, LIMITS)
    assert (hang.ranks, hang.all_ranks) == ((0, 1), True)
    assert ranks_at_fault(hang, {0: WAITING_FOR_RANKS, 1: WORKING}) == (1,)
    assert ranks_at_fault(hang, {0: WAITING_FOR_DEVICES, 1: WAITING_FOR_DEVICES}) == ()
    assert ranks_at_fault(hang, {0: WAITING_FOR_DEVICES, 1: COMPILING}) == (1,)


def test_ranks_at_fault_when_the_rank_behind_waits_for_its_devices_includes_a_working_rank_ahead():
    hang = find_hang({0: beat(10, 31.0), 1: beat(12, 31.0), 2: beat(12, 31.0)}, LIMITS)
    assert ranks_at_fault(hang, {0: WAITING_FOR_DEVICES, 1: WAITING_FOR_DEVICES, 2: IN_CALLBACK}) == (2,)
    assert ranks_at_fault(hang, dict.fromkeys(range(3), WAITING_FOR_DEVICES)) == (0,)


def test_ranks_at_fault_keeps_ranks_without_a_stack_trace():
    hang = find_hang({0: beat(10, 31.0), 1: beat(10, 31.0)}, LIMITS)
    assert ranks_at_fault(hang, {0: WAITING_FOR_RANKS}) == (1,)
