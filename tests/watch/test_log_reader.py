"""Reading of a growing log."""

import json
import os

import pytest
from helpers.watch import append, training_record

from jaxdp.records import parse_record
from jaxdp.watch import log_reader
from jaxdp.watch.log_reader import LogReader


@pytest.fixture
def reader(tmp_path):
    return LogReader(tmp_path / "metrics.jsonl")


def steps(reader):
    reader.refresh()
    return [record["step"] for record in reader.records]


def test_refresh_reads_only_what_was_appended(reader, tmp_path, monkeypatch):
    append(tmp_path, *map(training_record, range(1, 2000)))
    assert steps(reader) == [*range(1, 2000)]
    lines = []
    monkeypatch.setattr(log_reader, "parse_record", lambda line: lines.append(line) or parse_record(line))
    append(tmp_path, training_record(2000))
    assert steps(reader)[-1] == 2000
    assert len(lines) == 1
    assert steps(reader)[-1] == 2000
    assert len(lines) == 1


def test_torn_last_line_is_read_when_it_is_complete(reader, tmp_path):
    append(tmp_path, training_record(1))
    line = json.dumps(training_record(2)) + "\n"
    log = tmp_path / "metrics.jsonl"
    for part in (line[:30], line[30:60]):
        with open(log, "a") as file:
            file.write(part)
        assert steps(reader) == [1]
    with open(log, "a") as file:
        file.write(line[60:])
    assert steps(reader) == [1, 2]


def test_log_of_a_resumed_run_is_read_again(reader, tmp_path):
    append(tmp_path, *map(training_record, (1, 2, 3)))
    assert steps(reader) == [1, 2, 3]
    kept = tmp_path / "kept"
    kept.mkdir()
    append(kept, training_record(1), training_record(20), training_record(30), training_record(40))
    (kept / "metrics.jsonl").replace(tmp_path / "metrics.jsonl")
    assert steps(reader) == [1, 20, 30, 40]
    log = tmp_path / "metrics.jsonl"
    os.truncate(log, len(log.read_text().splitlines(keepends=True)[0]))
    assert steps(reader) == [1]
    log.unlink()
    assert steps(reader) == []


def test_log_written_over_in_place_is_read_again(reader, tmp_path):
    append(tmp_path, training_record(1), training_record(2))
    assert steps(reader) == [1, 2]
    text = "".join(json.dumps(training_record(step)) + "\n" for step in (3, 4, 5))
    with open(tmp_path / "metrics.jsonl", "r+") as file:
        file.write(text)
    assert steps(reader) == [3, 4, 5]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b"[1]",
        b"9" * 5000,
        b"[" * 100_000,
        b'{"samples": "1", "epoch": 1.0}',
        b'{"samples": 1}',
        b'{"samples": 1, "epoch": "1"}',
        b'{"samples": 1, "epoch": 1.0, "loss": {"a": 1}}',
        b'{"samples": 1, "epoch": 1.0, "loss": NaN}',
        b'{"samples": 1, "epoch": 1e999}',
        b'{"samples": 1, "epoch": 1.0} \xff',
        b"\x00\x00",
    ],
    ids=range(13),
)
def test_damaged_lines_are_left_out(reader, tmp_path, line):
    append(tmp_path, training_record(1))
    with open(tmp_path / "metrics.jsonl", "ab") as log:
        log.write(line + b"\n")
    append(tmp_path, training_record(2, loss=None))
    assert steps(reader) == [1, 2]


def test_directory_in_place_of_the_log_raises(reader, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match="directory"):
        reader.refresh()
