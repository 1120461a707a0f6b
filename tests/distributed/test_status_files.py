"""Status files: what is written is read, and nothing else is taken for a status."""

import os
from dataclasses import replace

import pytest

from jaxdp.distributed.status import Directory, Failure, Heartbeat, Record, Verdict, read_record

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
    assert Failure.of(ValueError("\n")).reason == "ValueError"
