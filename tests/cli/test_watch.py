"""`jaxdp watch` as a command."""

import os
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from helpers.processes import popen
from helpers.report import write_run

from jaxdp.cli import main, watch


@contextmanager
def watching(*arguments):
    """(process, URL) of the command in a process of its own."""
    command = [sys.executable, "-m", "jaxdp", "watch", *map(str, arguments)]
    process = popen(command, {"PYTHONUNBUFFERED": "1"})
    try:
        line = next(line for line in process.stdout if line.startswith("watching at "))
        yield process, re.fullmatch(r"watching at (http://\S+) \(Ctrl-C ends\)\n", line)[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watch_serves_a_page_until_a_signal_ends_it(tmp_path, number):
    """Without JAX; also while a silent viewer has a connection."""
    with watching(write_run(tmp_path / "run"), tmp_path / "later", "--port", "0") as (process, url):
        assert b"waiting for a run in this directory" in urllib.request.urlopen(url, timeout=120).read()
        request = urllib.request.Request(url, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(request, timeout=120)
        refused.value.close()
        if sys.platform == "linux":
            assert "jaxlib" not in Path(f"/proc/{process.pid}/maps").read_text()
        with socket.create_connection(urlsplit(url).netloc.split(":")):
            process.send_signal(number)
            out, error = process.communicate(timeout=120)
        assert (process.returncode, out, error) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"WORKDIR: missing; give the directory of at least one run"),
        (["RUN", "RUN/../RUN"], r"WORKDIR: a run is given twice; give every run once"),
        (["RUN", "--port", "70000"], r"--port=70000: must be from 0 to 65535; 0 chooses a free port"),
        (["RUN", "--host", "no host"], r"--host='no host': not a host name or address; use an address of this machine, .*"),
        (["gs://bucket/run"], r"WORKDIR='gs://bucket/run': URLs are not supported; use a local path"),
    ],
)
def test_watch_with_unusable_arguments_exits_with_2_and_one_line(tmp_path, failing, monkeypatch, words, message):
    write_run(tmp_path / "RUN")
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(message, failing("watch", *words))


def test_second_signal_interrupts_a_server_that_ends():
    """Such as one that waits for an answer about a directory that hangs."""
    stop = watch._Stop()
    with stop.at_signals():
        stop.raises = False
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_watch_opens_a_browser_only_when_asked(tmp_path, capsys, monkeypatch):
    from jaxdp.report import server

    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)

    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(server.Server, "handle_request", interrupt)
    monkeypatch.setattr(os, "nice", lambda increment: increment)
    before = signal.getsignal(signal.SIGTERM)
    for flags in ([], ["--open"]):
        main.main(["watch", str(tmp_path / "a\x1bb"), "--port", "0", *flags])
    assert signal.getsignal(signal.SIGTERM) == before
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(r"a\x1bb holds no run yet; the page will show it")
    assert opened == [lines[3].split()[2]]
