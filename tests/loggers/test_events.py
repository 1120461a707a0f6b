"""Events of a run beside its metrics."""

import contextlib
import errno
import json
import os
import signal
import socket
from contextlib import closing

import pytest
from helpers.runs import Recorder, train_shown, train_until

from jaxdp import Stopped
from jaxdp.loggers.console import Screen
from jaxdp.loggers.events import EventLog
from jaxdp.run_records import read_events


class StoppingScreen(Screen):
    """Sends SIGTERM after step 5."""

    def step(self, record):
        super().step(record)
        if record["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def write(workdir, *messages):
    with closing(EventLog(workdir)) as log:
        for message in messages:
            log.write("message", message)


def test_run_that_resumes_records_its_sessions_messages_and_end(tiny, tmp_path):
    train_until(tiny, tmp_path, step=9)
    first = read_events(tmp_path / "events.jsonl")
    assert [event["event"] for event in first][-2:] == ["start", "failed"]
    assert first[-2]["samples"] == 0
    screen = Recorder()
    train_shown(tiny, tmp_path, screen=screen)
    second = read_events(tmp_path / "events.jsonl")[len(first) :]
    (start,) = (event for event in second if event["event"] == "start")
    assert start["samples"] > 0
    assert start["wall_seconds"] > 0
    shown = [event["text"] for event in second if event["event"] == "message"]
    assert any(text.startswith("resuming from") for text in shown)
    assert shown == [line for line in screen.lines if line in shown]
    assert second[-1]["event"] == "finished"
    assert second[-1]["wall_seconds"] <= json.loads((tmp_path / "result.json").read_text())["wall_seconds"] + 1.0


@pytest.mark.parametrize(("error", "end"), [(None, "finished"), (Stopped("a\nb"), "stopped"), (KeyboardInterrupt(), "failed")])
def test_session_records_how_it_ended(tmp_path, error, end):
    log = EventLog(tmp_path)
    if error is None:
        with log.session(Stopped):
            pass
    else:
        with pytest.raises(type(error)), log.session(Stopped):
            raise error
    last = read_events(tmp_path / "events.jsonl")[-1]
    text = {"stopped": "a", "failed": "KeyboardInterrupt"}.get(end, "")
    assert last == {"event": end, "host": socket.gethostname(), "text": text}
    log.write("message", "after the end")
    assert len(read_events(tmp_path / "events.jsonl")) == 1


def test_torn_line_costs_no_other_event(tmp_path):
    write(tmp_path, "first")
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "mess')
    write(tmp_path, "second")
    assert [event["text"] for event in read_events(tmp_path / "events.jsonl")] == ["first", "second"]


def test_full_disk_and_unwritable_directory_lose_events_without_an_error(tmp_path, monkeypatch):
    log = EventLog(tmp_path)
    log.write("message", "before")

    class Full:
        closed = False

        def write(self, data):
            if len(data) > 40:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return len(data) // 2

    file, log._file = log._file, Full()
    log.write("message", "lost" * 20)
    log._file = file
    log.write("message", "after")
    log.close()
    assert [event["text"] for event in read_events(tmp_path / "events.jsonl")] == ["before", "after"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/events.jsonl").mkdir()
    write(tmp_path / "other", "lost")
    write(None, "nowhere")


def test_run_without_a_reader_of_its_output_trains_on_and_records_that_and_its_stop(tiny, tmp_path, capfd):
    stream = open("/dev/full", "w")
    with pytest.raises(Stopped) as stop:
        train_shown(tiny, tmp_path, screen=StoppingScreen(stream))
    with contextlib.suppress(OSError):
        stream.close()
    *_, last = events = read_events(tmp_path / "events.jsonl")
    assert (last["event"], last["text"]) == ("stopped", str(stop.value))
    assert last["samples"] >= 5 * 8
    line = "/dev/full cannot be written (No space left on device); the run continues without it"
    assert [event["text"] for event in events].count(line) == 1
    assert capfd.readouterr().err.count(line) == 1
