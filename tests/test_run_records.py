"""Tests of jaxdp.run_records."""

import json
import os

import pytest

from jaxdp import run_records as module
from jaxdp.run_records import is_plausible, read_events, read_log, scan_log, to_json


def test_to_json_writes_numbers_that_are_not_finite_as_null():
    record = {"a": float("nan"), "b": float("inf"), "c": 1.5, "d": 3, "e": "x"}
    assert to_json(record) == '{"a": null, "b": null, "c": 1.5, "d": 3, "e": "x"}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"a": [float("nan")]})
    assert to_json(record, indent=2).splitlines()[1:3] == ['  "a": null,', '  "b": null,']


def test_log_without_its_damaged_lines_and_a_torn_last_one(tmp_path):
    whole = ['{"samples": 0}', '{"samples": 8, "note": "Ä\\u2028Ö"}', '{"samples": 16}']
    damaged = ['{"samples": 24', "[1]", "null", '{"samples": 8.0}', '{"samples": "8"}', '{"step": 1}', "", "[" * 10**5]
    log = tmp_path / "metrics.jsonl"
    lines = [*damaged[:4], *whole[:2], *damaged[4:], whole[2]]
    log.write_bytes("".join(f"{line}\n" for line in lines).encode() + b'\xff{"samples": 1}\n' + b'{"samples": 32}')
    records, count = scan_log(log)
    assert records == [json.loads(line) for line in whole]
    assert count == len(damaged) + 1  # a torn last line is from a run that was killed
    assert read_log(log) == records
    accepted, count = scan_log(log, lambda record: record["samples"] > 0)
    assert (accepted, count) == (records[1:], len(damaged) + 2)


@pytest.mark.parametrize(
    ("fields", "plausible"),
    [
        ({}, True),
        ({"loss": None, "eval_loss": -(2**63) + 1024, "step": 2**63 - 1, "of_a_callback": "text"}, True),
        ({"epoch": None}, False),
        *[({"loss": value}, False) for value in ("1", [1.0], float("nan"), float("inf"), 2**63, -(2**63), 2.0**63)],
    ],
)
def test_plausible_records_have_numbers_that_can_be_drawn(fields, plausible):
    assert is_plausible({"samples": 8, "epoch": 0.5} | fields) is plausible
    assert not is_plausible({"samples": 8} | fields)


def test_events_are_the_fields_of_the_right_type_in_whole_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    good = {"event": "start", "text": "a", "host": "h", "samples": 0, "sessions": 1, "wall_seconds": 0.5}
    odd = {"event": "message", "text": "b", "host": 1, "samples": "8", "sessions": None, "wall_seconds": 1e300, "more": 1}
    lines = [json.dumps(good), json.dumps(odd), '{"event": "stopped"}', '{"text": "c"}', '{"event": 1, "text": "c"}', "[", "3"]
    path.write_text("\n".join(lines) + "\n" + json.dumps(good))  # the last is torn
    assert read_events(path) == [good, {"event": "message", "text": "b"}]


def test_events_of_a_long_file_are_its_last_whole_ones(tmp_path):
    lines = [json.dumps({"event": "message", "text": f"{number:06}"}) + "\n" for number in range(10_000)]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    events = read_events(tmp_path / "events.jsonl")
    assert events == [json.loads(line) for line in lines[-(256 * 1024 // len(lines[0])) :]]


def test_log_of_at_most_the_limit_is_read(tmp_path, monkeypatch):
    (path := tmp_path / "metrics.jsonl").write_text('{"samples": 1}\n')
    monkeypatch.setattr(module, "LARGEST", 15)
    assert read_log(path) == [{"samples": 1}]
    monkeypatch.setattr(module, "LARGEST", 14)
    with pytest.raises(OSError, match="File too large"):
        read_log(path)


def test_sparse_log_that_claims_a_terabyte_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"samples": 1}\n')
    os.truncate(path, 2**40)
    with pytest.raises(OSError, match="File too large"):
        read_log(path)
