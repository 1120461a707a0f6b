"""What a process reports of itself, and its file: what is written is read, and nothing else is taken for a status."""

import os
import threading
import time
from dataclasses import replace

import pytest

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


def test_position_does_not_change_with_activities_of_one_process():
    first, second = ProcessStatus(), ProcessStatus()
    for status in (first, second):
        status.training_thread = threading.get_ident()
        status.set_activity("step", 1)
        if status is first:
            with pytest.raises(KeyError, match="writing the log"), status.performing("writing the log"):
                raise KeyError(status.heartbeat().detail)
            assert status.heartbeat().detail == ""
        with status.at_barrier("the others"):
            assert status.heartbeat().detail == "waiting for the others"
        status.set_activity("save")
    assert first.position == second.position == (0, 1, 1)


def test_position_does_not_change_with_barriers_of_a_background_save():
    status = ProcessStatus()

    def save():
        with status.at_barrier("written"):
            pass

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert status.position == (0, 0, 0)


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
