"""The HTTP interface of `jaxdp watch`, on directories without training."""

import contextlib
import gzip
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.request
from html.parser import HTMLParser

import pytest
from helpers.report import write_result, write_run
from helpers.watch import append, serving, training_record

from jaxdp.errors import ConfigError
from jaxdp.loggers.events import EventLog
from jaxdp.setup import run_dir
from jaxdp.watch import board, server
from jaxdp.watch.server import listen

HOSTILE = '<img src=x onerror="alert(1)">&amp;\u202e$x$'


@pytest.fixture(autouse=True)
def prompt(monkeypatch):
    """Every request looks at the directories, and figures are drawn with the priority of the tests."""
    monkeypatch.setattr(board, "SCAN_SECONDS", 0.0)
    monkeypatch.setattr(board, "NICE", 0)


@pytest.fixture
def no_drawing(monkeypatch):
    """Figures without matplotlib: a picture and a layer for each, which say how often they were drawn."""
    drawn = []

    def draw(runs):
        drawn.append([len(run.records) for run in runs])
        text = f"{len(drawn)}"
        return {"curves.png": b"\x89PNG" + text.encode(), "settings.png": b"\x89PNG"}, {
            "curves.png": f"<svg><!--{text}--></svg>"
        }

    monkeypatch.setattr(board, "draw", draw)
    monkeypatch.setattr(board, "DRAW_SECONDS", 0.0)
    return drawn


def wait_for(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_page_is_complete_without_scripts_and_loads_nothing_from_elsewhere(tmp_path):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", seed=7)
    write_result(second)
    with serving(first, second, tmp_path / "later") as client:
        wait_for(lambda: "figures/" in client.get()[2])
        status, headers, text = client.get()
        assert status == 200
        headings = re.findall("<h2[^>]*>(.*?)</h2>", text)
        assert headings[:3] == ["Progress", "Messages", "Results"]
        assert headings[-1] == "All numbers"
        assert "hidden>" not in text.replace("<output hidden>", "")
        assert '<noscript><meta http-equiv="refresh" content="10"></noscript>' in text
        sources = re.findall(r"""(?:src|href)="([^"]*)""", text)
        assert len(sources) == 6
        for source in sources:
            assert re.fullmatch(r"data:,|style\.css|script\.js|figures/[0-9a-f]{16}\.png", source)
            if source != "data:,":
                status, found, body = client.get(f"/{source}")
                assert status == 200
                assert found["X-Content-Type-Options"] == "nosniff"
                assert len(body) > 1000
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", text)
    assert (headers["Cache-Control"], headers["Referrer-Policy"], headers["Server"]) == ("no-store", "no-referrer", "jaxdp")


class Outline(HTMLParser):
    """Checks the nesting of a page; keeps the levels of its headings, its landmarks, ids and references to ids."""

    VOID = frozenset(["meta", "link", "img", "path", "circle"])

    def __init__(self, text):
        super().__init__()
        self.open, self.levels, self.landmarks, self.ids, self.references = [], [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        self.references += [value for name, value in attrs if name == "aria-labelledby"]
        self.levels += [int(tag[1])] if tag in ("h1", "h2", "h3") else []
        self.landmarks += [tag] if tag in ("header", "main") else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_has_landmarks_headings_in_order_and_names_for_what_it_shows(no_drawing, tmp_path):
    with serving(write_run(tmp_path / "a"), write_run(tmp_path / "b")) as client:
        wait_for(lambda: "figures/" in client.get()[2])
        outline = Outline(client.get()[2])
    assert outline.landmarks == ["header", "main"]
    assert outline.levels[0] == 1
    assert all(after <= before + 1 for before, after in zip(outline.levels, outline.levels[1:], strict=False))
    assert len(set(outline.ids)) == len(outline.ids)
    assert set(outline.references) <= set(outline.ids)


def test_only_changed_blocks_are_sent(no_drawing, tmp_path):
    run = write_run(tmp_path / "run", accuracies=())
    with run_dir.lock_run_dir(run), serving(run) as client:
        wait_for(lambda: client.blocks()["blocks"].get("curves"))
        have = ",".join(block["digest"] for block in client.blocks()["blocks"].values())
        assert client.blocks(have)["blocks"] == {}
        append(run, *map(training_record, range(2, 20)))
        changed = client.blocks(have)["blocks"]
        assert {"progress", "results"} <= set(changed)
        assert "messages" not in changed
        assert "<dt>remaining</dt><dd>about 0:51</dd>" in changed["progress"]["html"]
        assert client.blocks(have)["title"] == "27 % · run · jaxdp watch"
        assert client.blocks(have)["announcement"] == "run: training 20 %"


def test_figures_are_drawn_again_when_runs_change_and_old_ones_stay_for_slow_viewers(no_drawing, tmp_path):
    run = write_run(tmp_path / "run")
    with serving(run) as client:
        name = wait_for(lambda: re.search(r"figures/\w+\.png", client.blocks()["blocks"].get("curves", {}).get("html", "")))[0]
        for _ in range(5):
            client.blocks()
        assert no_drawing == [[5]]
        append(run, training_record(50))
        wait_for(lambda: name not in client.blocks()["blocks"]["curves"]["html"])
        assert no_drawing == [[5], [6]]
        assert client.get(f"/{name}")[2] == b"\x89PNG1"


def test_busy_log_is_drawn_seldom_but_the_end_at_once(no_drawing, tmp_path, monkeypatch):
    monkeypatch.setattr(board, "DRAW_SECONDS", 3600.0)
    run = write_run(tmp_path / "run")
    with run_dir.lock_run_dir(run), serving(run) as client:
        wait_for(lambda: client.blocks()["blocks"].get("curves"))
        for step in range(50, 55):
            append(run, training_record(step))
            client.blocks()
        assert len(no_drawing) == 1
        write_result(run)
        wait_for(lambda: client.blocks() and len(no_drawing) == 2)


def test_messages_that_repeat_are_shown_once_and_the_newest_first(no_drawing, tmp_path):
    run = write_run(tmp_path / "run")
    log = EventLog(run)
    for letter in "abcdefghijklmnopqrstuvwxyz":
        log.write("message", letter)
    log.position = lambda: {"samples": 1, "wall_seconds": 3725.0}
    for share in range(30):
        log.write("message", f"devices waited {share} % of the time\non rank 1")
    log.write("message", "0" * 5000)
    log.close()
    with serving(run) as client:
        text = client.blocks()["blocks"]["messages"]["html"]
    assert text.count("0" * 1000) == 2
    text = text.replace(f'<li><span class="quiet">after 1:02:05:</span> {"0" * 2000}</li>', "")
    assert text.startswith('<ul><li><span class="quiet">after 1:02:05:</span> devices waited 29 % of the time\non rank 1 ')
    assert text.count("devices waited") == 1
    assert "(30 times)" in text
    assert re.findall("<li>(.)</li>", text) == [*"zyxwvutsrqponmlkji"]
    assert f"Earlier messages are in {run}/events.jsonl." in text


def test_drawing_has_a_low_priority(no_drawing, tmp_path, monkeypatch):
    if sys.platform != "linux":
        pytest.skip("other systems have no priorities of threads")
    seen = []
    monkeypatch.setattr(board, "NICE", 10)
    monkeypatch.setattr(board, "draw", lambda runs: seen.append(os.getpriority(os.PRIO_PROCESS, 0)) or ({}, {}))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with serving(write_run(tmp_path / "run")) as client:
        wait_for(lambda: client.blocks() and seen)
    assert seen == [10]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before < 10


def test_error_of_drawing_is_shown_and_progress_goes_on(no_drawing, tmp_path, monkeypatch):
    def fail(runs):
        raise ZeroDivisionError("<x>")

    monkeypatch.setattr(board, "draw", fail)
    with serving(write_run(tmp_path / "run")) as client:
        text = wait_for(lambda: client.blocks()["blocks"].get("curves", {}).get("html"))
        assert text == "<p>The curves could not be drawn (ZeroDivisionError: &lt;x&gt;).</p>"
        assert "not running" in client.blocks()["blocks"]["progress"]["html"]


def test_hostile_names_and_messages_are_text(tmp_path):
    run = write_run(tmp_path / HOSTILE.replace("/", ""))
    (run / "classes.json").write_text(json.dumps([HOSTILE] * 10))
    log = EventLog(run)
    log.write("message", HOSTILE + "\x1b[31m</script>\nsecond line")
    log.close()
    append(run, training_record(9, slowest_rank=1, waiting_share=0.5, **{HOSTILE: HOSTILE}))
    with serving(run, tmp_path / "<b>later") as client:
        wait_for(lambda: "figures/" in client.get()[2])
        text, state = client.get()[2], client.blocks()
    for found in (text, *(block["html"] for block in state["blocks"].values())):
        assert "<img src=x" not in found
        assert "<b>" not in found
        assert "\x1b" not in found
        assert "\u202e" not in found
        assert "</script>\n" not in found
    assert "&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;amp;\\u202e$x$" in text
    Outline(text)


@pytest.mark.parametrize("path", ["/../server.py", "/figures/../../x", "/%2e%2e/etc/passwd", "/figures/", "//etc/passwd", "/x"])
def test_other_paths_are_not_found(no_drawing, tmp_path, path):
    with serving(write_run(tmp_path / "run")) as client:
        status, headers, body = client.get(path)
        assert (status, body) == (404, "jaxdp watch: not found\n")
        assert "Content-Security-Policy" in headers


def test_page_on_localhost_is_for_requests_to_localhost(no_drawing, tmp_path):
    with serving(write_run(tmp_path / "run")) as client:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", client.url)
        for path in ("/", "/blocks?have=", "/script.js", "/figures/x.png"):
            status, _, body = client.get(path, host="evil.example")
            assert status == 403
            assert body.startswith("jaxdp watch: this page is only for this machine")
        status, headers, body = client.get(method="HEAD")
        assert (status, body) == (200, "")
        assert int(headers["Content-Length"]) > 1000
        assert "Set-Cookie" not in headers
        assert client.get(method="POST")[0] == 501
        assert client.get("//[")[0] in (400, 404)


def test_page_on_all_interfaces_needs_the_token_of_its_address(no_drawing, tmp_path):
    with serving(write_run(tmp_path / "run"), host="0.0.0.0") as client:
        token = client.server.access.token
        assert client.url == f"http://{socket.gethostname()}:{client.server.server_port}/?token={token}"
        for path in ("/", "/blocks?have=", "/style.css", "/?token=wrong"):
            assert client.get(path, host="machine")[0] == 403
        status, headers, text = client.get(f"/?token={token}", host="machine")
        assert status == 200
        assert token not in text
        cookie = headers["Set-Cookie"]
        assert re.fullmatch(rf"jaxdp_watch_\d+={token}; HttpOnly; SameSite=Strict; Path=/", cookie)
        for path in ("/", "/blocks?have=", "/style.css"):
            assert client.get(path, host="machine", Cookie=cookie.partition(";")[0])[0] == 200


def test_many_viewers_and_silent_connections_leave_the_page_reachable(no_drawing, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(server, "MAX_PENDING", 8)
    monkeypatch.setattr(server, "MAX_VIEWERS", 8)
    with serving(write_run(tmp_path / "run")) as client:
        silent = [socket.create_connection(("127.0.0.1", client.server.server_port)) for _ in range(20)]
        closed = wait_for(lambda: sum(_is_closed(connection) for connection in silent) >= 12)
        assert closed
        wait_for(lambda: _status(client) == 200)  # the silent ones have timed out
        answers = []
        viewers = [threading.Thread(target=lambda: answers.append(_status(client))) for _ in range(8)]
        for viewer in viewers:
            viewer.start()
        for viewer in viewers:
            viewer.join()
        assert answers.count(200) >= 1
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("host", [None, "0.0.0.0"])
def test_slow_requests_keep_nobody_out_and_end_at_the_deadline_of_the_whole_request(no_drawing, tmp_path, monkeypatch, host):
    """A byte now and then, which a time-out of each read would allow for hours."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 2.0)
    with serving(write_run(tmp_path / "run"), host=host) as client:
        token = client.server.access.token
        slow = [socket.create_connection(("127.0.0.1", client.server.server_port)) for _ in range(2 * server.MAX_PENDING)]
        ended = threading.Event()

        def send():
            while not ended.wait(0.1):
                for connection in slow:
                    with contextlib.suppress(OSError):
                        connection.send(b"G")

        sender = threading.Thread(target=send)
        sender.start()
        try:
            for _ in range(5):
                assert client.get(f"/?token={token}" if token else "/")[0] == 200
            wait_for(lambda: not client.server._pending)
        finally:
            ended.set()
            sender.join()
            for connection in slow:
                connection.close()


def test_requests_without_the_token_take_no_place_of_a_viewer(no_drawing, tmp_path):
    with serving(write_run(tmp_path / "run"), host="0.0.0.0") as client:
        for _ in range(server.MAX_VIEWERS):
            client.server.viewers.acquire()
        assert client.get(f"/?token={client.server.access.token}")[0] == 503
        assert client.get("/")[0] == 403
        client.server.viewers.release()
        assert client.get(f"/?token={client.server.access.token}")[0] == 200
        assert client.server.viewers.acquire(timeout=120)  # released after the response


def test_a_new_connection_closes_the_oldest_of_the_address_with_the_most(no_drawing, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "MAX_PENDING", 3)
    with serving(write_run(tmp_path / "run"), host="0.0.0.0") as client:
        connections = []
        for source in ("127.0.0.2", "127.0.0.1", "127.0.0.1", "127.0.0.1"):
            address = ("127.0.0.1", client.server.server_port)
            connections.append(socket.create_connection(address, source_address=(source, 0)))
            number = min(3, len(connections))
            wait_for(lambda number=number: len(client.server._pending) == number)
        wait_for(lambda: _is_closed(connections[1]))
        assert not any(_is_closed(connections[index]) for index in (0, 2, 3))
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    "parts", [[b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n"], [b"GET / HTTP/1.0\nHost: lo", b"calhost\n", b"\n"]]
)
def test_request_in_any_parts_is_answered(no_drawing, tmp_path, parts):
    with (
        serving(write_run(tmp_path / "run")) as client,
        socket.create_connection(("127.0.0.1", client.server.server_port)) as viewer,
    ):
        for part in parts:
            viewer.sendall(part)
            time.sleep(0.05)
        answer = b""
        while data := viewer.recv(2**16):
            answer += data
    assert answer.startswith(b"HTTP/1.0 200")


def test_slow_viewer_receives_the_whole_page(no_drawing, tmp_path, monkeypatch):
    """A megabyte, of which a part arrives at once and the rest takes longer than the time-out of a part."""
    monkeypatch.setattr(server.Handler, "timeout", 1.2)
    monkeypatch.setattr(server, "whole_page", lambda *_: "x" * 10**6)
    with serving(write_run(tmp_path / "run")) as client, socket.socket() as viewer:
        viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        viewer.connect(("127.0.0.1", client.server.server_port))
        viewer.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        received, started = b"", time.monotonic()
        while data := viewer.recv(2**16):
            received += data
            time.sleep(0.001 if time.monotonic() - started > 1.6 else 0.05)
    assert len(received.partition(b"\r\n\r\n")[2]) == 10**6


def test_long_answers_are_compressed_for_those_who_ask(no_drawing, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "whole_page", lambda *_: "é" * 10**5)
    with serving(write_run(tmp_path / "run")) as client:
        for accepted, encoding in (("br, gzip", "gzip"), ("identity", None)):
            _, headers, _ = client.get(method="HEAD", **{"Accept-Encoding": accepted})
            assert headers["Content-Encoding"] == encoding
            assert (int(headers["Content-Length"]) < 10_000) == (encoding == "gzip")
        request = urllib.request.Request(client.url, headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert gzip.decompress(answer.read()).decode() == "é" * 10**5


def _is_closed(connection):
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def _status(client):
    try:
        return client.get()[0]
    except OSError:
        return None


def test_viewer_that_goes_away_prints_nothing(no_drawing, tmp_path, capfd):
    with serving(write_run(tmp_path / "run")) as client:
        for _ in range(5):
            connection = socket.create_connection(("127.0.0.1", client.server.server_port))
            connection.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            connection.close()
        assert client.get()[0] == 200
    assert capfd.readouterr() == ("", "")


def test_port_that_is_taken_is_an_error_or_left_out(tmp_path, monkeypatch, free_port):
    run = write_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", free_port)):
        with pytest.raises(ConfigError) as error:
            listen([run], port=free_port)
        assert str(error.value) == f"--port={free_port}: in use by another process; use another, or 0 for any free port"
        monkeypatch.setattr(server, "FIRST_PORT", free_port)
        found, url = listen([run])
        found.server_close()
        assert url != f"http://127.0.0.1:{free_port}/"
        monkeypatch.setattr(server, "MAX_TRIED_PORTS", 1)
        with pytest.raises(ConfigError, match="in use by another process"):
            listen([run])


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        (None, -1, "--port=-1: must be from 0 to 65535; 0 chooses a free port"),
        (None, 65536, "--port=65536: must be from 0 to 65535; 0 chooses a free port"),
        ("", 0, "--host='': not a host name or address; use an address of this machine, or 0.0.0.0 for all of them"),
        ("a..b", 0, "--host='a..b': not a host name or address; use an address of this machine, or 0.0.0.0 for all of them"),
        ("192.0.2.1", 0, "--host='192.0.2.1': not an address of this machine; 0.0.0.0 means all of them"),
    ],
)
def test_unusable_addresses_are_errors_in_one_line(tmp_path, host, port, message):
    with pytest.raises(ConfigError) as error:
        listen([tmp_path], host, port)
    assert str(error.value) == message
