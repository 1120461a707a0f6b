"""Tests of jaxdp.trackers.sender, with a tracker in a file."""

import json

import pytest
from helpers.fake_tracker import FakeClient, received

from jaxdp.trackers import sender
from jaxdp.trackers.run_files import Rejected, TrackerState, Unavailable
from jaxdp.trackers.sender import Sender, Task
from jaxdp.validation import to_json


def records(first, last):
    steps = [{"samples": 8 * n, "step": n, "loss": 1 / n} for n in range(first, last + 1)]
    return [part for step in steps for part in (step, {"samples": step["samples"], "step": step["step"], "eval_accuracy": 0.5})]


def write(workdir, lines):
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))


@pytest.fixture
def session(tiny, tmp_path, monkeypatch):
    """session(target, client): sends the log in the directory and returns the lines that are shown."""
    monkeypatch.setattr(sender, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(sender, "SHORTEST_RETRY", 0.01)
    (tmp_path / "config.json").write_text(to_json(tiny))

    def run(target="works", client=FakeClient):
        state, lines = TrackerState(tmp_path, "fake", target), []
        task = Task("fake", "", target, str(tmp_path), str(tmp_path))
        sends = Sender(client(tmp_path, state, lines.append), task, state=state, show=lines.append)
        sends.end("finished")
        sends.run()
        return lines

    return run


def test_a_tracker_that_fails_in_the_middle_of_a_request_gets_every_record_once(session, tmp_path):
    write(tmp_path, records(1, 20))
    lines = session("fails in the middle")
    assert received(tmp_path / "tracker.jsonl") == records(1, 20)
    assert lines[:2] == ["a file", "no connection (broken pipe); training continues"]
    assert lines.count(lines[1]) == len(lines) // 2  # once for each of the interruptions


def test_a_refused_configuration_is_reported_and_the_records_are_sent(session, tmp_path):
    write(tmp_path, records(1, 2))
    assert "the configuration was not sent: too long" in session("refuses the configuration")
    assert received(tmp_path / "tracker.jsonl") == records(1, 2)


def test_errors_after_the_run_was_opened_are_tried_again(session, tmp_path):
    errors = [Rejected("token expired", ""), RuntimeError("bug of a client"), OSError("disk"), Unavailable("down")]

    class Failing(FakeClient):
        def send(self, records):
            if errors:
                raise errors.pop()
            super().send(records)

    write(tmp_path, records(1, 2))
    session(client=Failing)
    assert received(tmp_path / "tracker.jsonl") == records(1, 2)
    assert not errors
