"""Tests of jaxdp.trackers.log_tail."""

import json

from jaxdp.trackers import log_tail
from jaxdp.trackers.log_tail import LogTail


def line(samples, **fields):
    return json.dumps({"samples": samples} | fields) + "\n"


def read_all(tail):
    records = []
    while new := tail.read():
        records += new
    return [record["samples"] for record in records]


def test_a_line_is_read_when_it_is_complete(tmp_path):
    log = tmp_path / "log"
    log.write_text(line(8) + line(16)[:5])
    with LogTail(log) as tail:
        assert read_all(tail) == [8]
        with open(log, "a") as file:
            file.write(line(16)[5:] + line(24))
        assert read_all(tail) == [16, 24]
        assert tail.read() == []
        tail.rewind()
        assert read_all(tail) == [8, 16, 24]


def test_damaged_lines_are_left_out(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"\0\0{\n[1]\n" + line(8).encode() + b'{"samples": "x"}\n\xff\xfe\n' + line(16, loss=None).encode())
    with LogTail(log) as tail:
        assert read_all(tail) == [8, 16]


def test_a_log_longer_than_a_part_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(log_tail, "READ_BYTES", 64)
    log = tmp_path / "log"
    log.write_text("".join(line(n, note="é" * n) for n in range(1, 200)))
    with LogTail(log) as tail:
        assert len(tail.read()) < 4
        assert read_all(tail)[-1] == 199
        tail.rewind()
        assert read_all(tail) == list(range(1, 200))


def test_a_log_replaced_by_a_later_session_is_read_to_its_old_end(tmp_path):
    log, new = tmp_path / "log", tmp_path / "new"
    log.write_text(line(8) + line(16))
    with LogTail(log) as tail:
        new.write_text(line(8))
        new.replace(log)
        assert read_all(tail) == [8, 16]
