"""What a process reports of itself, and its file: what is written is read, and nothing else is taken for a status."""

import os
import threading
import time
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import pytest

from jaxdp.distributed import status
from jaxdp.distributed.status import MIN_DURATIONS, Directory, Failure, Heartbeat, ProcessStatus, Record, Verdict, read_record


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


def test_a_duration_is_kept_for_the_last_twenty_iterations_of_its_kind_and_five_are_typical(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    status = ProcessStatus()
    assert status.heartbeat() == Heartbeat("outside")
    longest_first = list(range(25, 0, -1))
    for number, seconds in enumerate(longest_first, start=1):
        for name, extra in (("step", 0), ("evaluate", 1)):
            status.begin_iteration(name)
            now[0] += seconds + extra
            status.begin_iteration(name)
            status.set_activity("save")
            now[0] += 100.0
        for activity, extra in (("load", 0), ("step", 0), ("audit", 0), ("evaluate", 1)):
            status.set_activity(activity)
            kept, beat = [each + extra for each in longest_first[:number][-20:]], status.heartbeat()
            assert (beat.longest_seconds, beat.typical_seconds) == (max(kept), median(kept) if number >= 5 else None)


def test_a_background_save_is_timed_by_the_ticks_from_its_start_to_its_end():
    status = ProcessStatus()
    status.tick(100.0)
    for seconds in (7.0, 3.0):
        status.set_background_save("step 5")
        status.tick(seconds)
        assert (status.heartbeat().background_save, status.heartbeat().save_seconds) == ("step 5", seconds)
        status.set_background_save("")
        status.set_background_save("")  # nothing to end
        status.tick(50.0)
        assert (status.heartbeat().save_seconds, status.heartbeat().longest_save_seconds) == (0.0, 7.0)


def test_position_does_not_change_with_activities_of_one_process():
    first, second = ProcessStatus(), ProcessStatus()
    for process in (first, second):
        process.training_thread = threading.get_ident()
        process.set_activity("step", 1)
        if process is first:
            with pytest.raises(KeyError, match="writing the log"), process.performing("writing the log"):
                raise KeyError(process.heartbeat().detail)
            assert process.heartbeat().detail == ""
        with process.at_barrier("all ranks"):
            assert process.heartbeat().detail == "waiting for all ranks"
        process.set_activity("save")
    assert first.position == second.position == (0, 1, 1)


@pytest.mark.parametrize(
    ("waits", "activity", "waits_for", "work"),
    [
        ({}, "load", "", "code"),
        ({"": status.THREAD, "checkpoint": status.OTHER_RANKS}, "load", status.THREAD, "code"),
        ({"": status.THREAD, "prepare": status.OTHER_RANKS, "compile": status.COMPILER}, "compile", status.OTHER_RANKS, ""),
        ({"": status.THREAD, "compile": status.COMPILER}, "step", status.COMPILER, "compiler"),  # of a gradient
        ({"": status.THREAD, "compile": status.COMPILER}, "load", status.THREAD, "code"),
        ({"": status.THREAD, "compile": status.COMPILER}, "evaluate", status.THREAD, "code"),
        ({"": status.SAVE}, "save", status.SAVE, "code"),
        ({"": status.SAVE, "checkpoint": status.OTHER_RANKS, "compile": status.COMPILER}, "save", status.OTHER_RANKS, ""),
        ({"": "", "checkpoint": status.OTHER_RANKS, "prepare": status.OTHER_RANKS}, "step", "", "code"),
        ({"": status.DEVICES, "prepare": "", "compile": status.COMPILER}, "step", status.DEVICES, ""),
        ({"": status.CALLBACK}, "step", status.CALLBACK, "code"),
    ],
)
def test_what_a_process_does_is_what_the_thread_that_it_waits_for_does(waits, activity, waits_for, work):
    process = ProcessStatus()
    process.set_activity(activity)
    process.waits = waits
    assert (process.heartbeat().waits, process.heartbeat().work) == (waits_for, work)
    assert process.heartbeat().save_waits == waits.get("checkpoint", status.SAVE)


def test_waits_of_each_thread_are_recorded_until_they_end_and_a_save_does_not_change_the_position():
    process, seen = ProcessStatus(), []
    process.training_thread = threading.get_ident()

    def saves():
        with process.at_barrier("written"):
            seen.append(dict(process.waits))
        seen.append(dict(process.waits))

    with process.waiting(status.THREAD):
        with pytest.raises(KeyError), process.at_barrier("all"):
            raise KeyError(seen.append(dict(process.waits)))
        assert process.waits == {"": status.THREAD}
    thread = threading.Thread(target=saves, name="checkpoint_0")
    thread.start()
    thread.join()
    saving = {"": "", "checkpoint": status.OTHER_RANKS}
    assert seen == [{"": status.OTHER_RANKS}, saving, saving | {"checkpoint": ""}]
    assert process.position == (0, 1, 0)


def test_the_result_of_a_future_is_waited_for(monkeypatch):
    monkeypatch.setattr(status, "_current", process := ProcessStatus())
    future = SimpleNamespace(result=lambda: process.heartbeat().waits)
    assert (status.result_of(future), process.heartbeat().waits) == (status.THREAD, "")


RECORD = Record(
    "host:1",
    2,
    "node2",
    machine="m",
    pid=7,
    count=3,
    beat=Heartbeat("load", 11, detail="waiting for images", position=(0, 1, 2), idle_seconds=0.5),
    stacks=("a", "b"),
    failure=Failure("no", 2, place="user.py:3 in f"),
    verdict=Verdict("late", 1, "node1"),
    report=(4, ("x",)),
)


def test_a_record_is_read_as_it_was_written(tmp_path):
    board = Directory(tmp_path / "processes")
    board.write("2.json", RECORD.to_json())
    assert read_record(board, 2) == RECORD
    board.write("2.json", replace(RECORD, stacks=()).to_json())  # shorter
    assert read_record(board, 2) == replace(RECORD, stacks=())
    assert RECORD.beat.location == "while loading, step 11, waiting for images"


@pytest.mark.parametrize(
    ("beat", "location"),
    [
        (Heartbeat("step"), "during a step"),
        (Heartbeat("step", 0), "in step 0"),
        (Heartbeat("save", 0, "writing"), "while saving, step 0, writing"),
        (Heartbeat("custom", background_save="step 5"), "during custom, saving step 5"),
    ],
)
def test_where_a_process_is(beat, location):
    assert beat.location == location


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (Verdict("no"), "no"),
        (Verdict("no", place="a.py:1"), "no; a.py:1"),
        (Verdict("no at a.py:1", place="a.py:1"), "no at a.py:1"),
        (Verdict("no", 0, "node0"), "rank 0 on node0 failed: no"),
        (Verdict("SIGTERM", 0, "node0", "in step 3", code=75), "rank 0 on node0 was stopped in step 3: SIGTERM"),
    ],
)
def test_a_verdict_is_one_line(verdict, text):
    assert str(verdict) == text


def test_the_failure_of_an_exception_has_its_exit_code_and_place_and_whether_a_collective_raised_it():
    class JaxRuntimeError(Exception):
        """As JAX names it."""

    class Stops(Exception):
        exit_code = 75

    def failure_of(error, cause=None):
        try:
            raise error from cause
        except type(error) as caught:
            return Failure.of(caught)

    for error, cause, code, is_collective in (
        (KeyError(1), None, 1, False),
        (Stops(), None, 75, False),
        (JaxRuntimeError("NCCL"), None, 1, True),
        (KeyError(1), JaxRuntimeError("NCCL"), 1, True),  # of a callback
        (KeyError(1), KeyError(2), 1, False),
    ):
        failure = failure_of(error, cause)
        assert (failure.code, failure.collective) == (code, is_collective)
        assert (failure.place == "") == (code == 75 or cause is not None)  # the cause was not raised


def test_a_record_is_as_long_without_progress_as_its_background_save_only_if_it_is_overdue():
    beat = Heartbeat("step", idle_seconds=3.0, save_seconds=9.0)
    assert [replace(RECORD, beat=beat, overdue=each).seconds for each in ("", "late", "stuck")] == [3.0, 9.0, 9.0]


def test_a_short_write_is_an_error_as_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, offset: len(content) // 2)
    with pytest.raises(OSError, match="No space left"):
        Directory(tmp_path).write("2.json", RECORD.to_json())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "host:1"}', "null", RECORD.to_json()[:-9], "\0" * 500, "9" * 10])
def test_a_file_that_is_being_written_or_damaged_counts_as_none(tmp_path, text):
    board = Directory(tmp_path)
    board.write("2.json", text)
    assert read_record(board, 2) is None


def test_a_record_of_another_rank_counts_as_none(tmp_path):
    board = Directory(tmp_path)
    assert read_record(board, 1) is None
    board.write("1.json", RECORD.to_json())
    assert read_record(board, 1) is None


def test_a_pipe_or_link_in_place_of_a_file_raises_and_blocks_nobody(tmp_path):
    board = Directory(tmp_path)
    os.mkfifo(tmp_path / "0.json")
    (tmp_path / "1.json").symlink_to("/etc/passwd")
    for name in ("0.json", "1.json"):
        with pytest.raises(OSError, match=name):
            board.write(name, "x")
    assert board.read("0.json") == ""
    with pytest.raises(OSError, match=r"1\.json"):
        board.read("1.json")


def test_the_reason_of_a_failure_is_its_first_line_of_limited_length():
    error = ValueError("\n" + "c" * 10_000 + "\nmore")
    assert Failure.of(error).reason == "c" * 4096
