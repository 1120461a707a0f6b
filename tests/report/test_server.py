"""The HTTP interface of `jaxdp watch`, on directories without training."""

import contextlib
import json
import re
import socket
import threading
import time
from html.parser import HTMLParser

import pytest
from helpers.report import write_result, write_run
from helpers.watch import append, serving, training_record
from plotly.offline import get_plotlyjs

from jaxdp.errors import ConfigError
from jaxdp.loggers.events import EventLog
from jaxdp.report import follow, page, server
from jaxdp.report.server import Access, listen
from jaxdp.setup import run_dir

HOSTILE = '<img src=x onerror="alert(1)">&amp;\u202e$x$'


@pytest.fixture(autouse=True)
def prompt(monkeypatch):
    """Every request looks at the directories."""
    monkeypatch.setattr(follow, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(follow, "SHARE", float("inf"))


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
        status, headers, text = client.get()
        assert status == 200
        headings = re.findall("<h2[^>]*>(.*?)</h2>", text)
        assert (headings[0], headings[-1]) == ("Progress", "More numbers")
        outline = Outline(text)
        assert outline.landmarks == ["header", "main", "footer"]
        assert outline.levels[0] == 1
        assert all(after <= before + 1 for before, after in zip(outline.levels, outline.levels[1:], strict=False))
        assert len(set(outline.ids)) == len(outline.ids)
        assert set(outline.references) <= set(outline.ids)
        assert '<noscript><meta http-equiv="refresh" content="10"></noscript>' in text
        for source in re.findall(r"""(?:src|href)="([^"]*)""", text):
            assert re.fullmatch(r"data:,|page\.js", source)
        status, found, body = client.get("/page.js")
        assert (status, found["X-Content-Type-Options"]) == (200, "nosniff")
        assert (found["Content-Type"], body) == ("text/javascript; charset=utf-8", f"{get_plotlyjs()}\n{page.SCRIPT}")
        assert client.get("/page.js", **{"If-None-Match": found["ETag"]})[0] == 304
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")  # Plotly adds styles
    assert "script-src 'self';" in policy
    assert re.findall("<script.*?>", text) == ['<script type="application/json" id="data">', '<script src="page.js">']
    assert not re.search(r"\sstyle=|\son\w+=\"", text.partition("<script")[0])
    assert (headers["Cache-Control"], headers["Referrer-Policy"], headers["Server"]) == ("no-store", "no-referrer", "jaxdp")


def plots_of(client):
    """The plots on the page."""
    return json.loads(re.search('<script type="application/json" id="data">(.*?)</script>', client.get()[2])[1])["plots"]


class Outline(HTMLParser):
    """Checks the nesting of a page; keeps the levels of its headings, its landmarks, ids and references to ids."""

    VOID = frozenset(["meta", "link", "path", "input"])

    def __init__(self, text):
        super().__init__()
        self.open, self.levels, self.landmarks, self.ids, self.references = [], [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        self.references += [value for name, value in attrs if name == "aria-labelledby"]
        self.levels += [int(tag[1])] if tag in ("h1", "h2", "h3") else []
        self.landmarks += [tag] if tag in ("header", "main", "footer") else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_follows_the_run_and_is_sent_only_when_it_has_changed(tmp_path):
    run = write_run(tmp_path / "run", accuracies=())
    with run_dir.lock_run_dir(run), serving(run) as client:
        tag = client.get()[1]["ETag"]
        assert client.get(**{"If-None-Match": tag})[0] == 304
        append(run, *map(training_record, range(2, 20)))
        status, headers, text = client.get(**{"If-None-Match": tag})
        assert (status, headers["ETag"] != tag) == (200, True)
        assert "<dt>remaining</dt><dd>about 0:51</dd>" in text
        assert "<title>27 % · run</title>" in text
        assert ">run: training 20 %</p>" in text


def test_page_has_the_plots_of_the_log_as_it_is_now(tmp_path):
    run = write_run(tmp_path / "run")
    with serving(run) as client:
        before = plots_of(client)["loss"]["curves"]
        append(run, training_record(50))
        after = plots_of(client)["loss"]["curves"]
    assert (before[0]["y"], after[0]["y"]) == ([7.0], [7.0, 2.0 / 50])


def test_page_is_not_made_again_before_its_pause(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    with serving(run) as client:
        plots_of(client)
        monkeypatch.setattr(follow, "LEAST_SECONDS", 3600.0)
        client.get()
        append(run, training_record(50))
        assert plots_of(client)["loss"]["curves"][0]["y"] == [7.0]


def test_error_of_making_the_page_is_shown_until_it_passes(tmp_path, monkeypatch):
    def fail(runs):
        raise ZeroDivisionError("<x>")

    note = "The page could not be made (ZeroDivisionError: &lt;x&gt;).</footer>"
    with serving(write_run(tmp_path / "run")) as client:
        with monkeypatch.context() as patch:
            patch.setattr(page, "results_table", fail)
            status, _, text = client.get()
            assert (status, "cannot be shown" in text, text.count(note)) == (200, True, 1)
        assert ">Results</h2>" in client.get()[2]
        assert "could not be made" not in client.get()[2]
        monkeypatch.setattr(page, "results_table", fail)
        for _ in range(2):
            text = client.get()[2]
            assert (">Results</h2>" in text, text.count(note), text.count("<footer")) == (True, 1, 1)


def test_hostile_names_and_messages_are_text(tmp_path):
    run = write_run(tmp_path / HOSTILE.replace("/", ""))
    (run / "classes.json").write_text(json.dumps([HOSTILE] * 10))
    log = EventLog(run)
    log.write("message", HOSTILE + "\x1b[31m</script>\nsecond line")
    log.close()
    append(run, training_record(9, slowest_rank=1, waiting_share=0.5, **{HOSTILE: HOSTILE}))
    with serving(run, tmp_path / "<b>later") as client:
        text = client.get()[2]
    content = text.partition("<script")[0]
    assert not [found for found in ("<img src=x", "<b>", "\x1b", "\u202e", "</script>") if found in content]
    assert "&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;amp;\\u202e$x$" in text
    Outline(text)


def test_other_paths_are_not_found(tmp_path):
    with serving(write_run(tmp_path / "run")) as client:
        for path in ("/../server.py", "/page.js/../../x", "/%2e%2e/etc/passwd", "/page.jsx", "//etc/passwd", "/x"):
            status, headers, body = client.get(path)
            assert (status, body) == (404, "jaxdp watch: not found\n")
            assert "Content-Security-Policy" in headers


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8600", "127.0.0.1:9000", "[::1]"])
def test_own_names_are_answered_without_a_token(host):
    assert Access("127.0.0.1", 8600).refusal(host, "", None) is None


@pytest.mark.parametrize(
    "host", [None, "", "localhost.evil.example", "127.0.0.1.evil.example:8600", "localhost:8600@evil", "[::2]"]
)
def test_other_names_are_refused_on_the_loopback_interface(host):
    assert "only for this machine" in Access("::1", 8600).refusal(host, "", None)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "fe80::1%eth0"])
def test_token_is_required_on_other_interfaces(address):
    access = Access(address, 8600)
    assert len(access.token) >= 32
    assert access.token != Access(address, 8600).token
    cookie = f"other=1; jaxdp_watch_8600={access.token}; x=y"
    for query, cookies in ((f"token={access.token}", None), (f"a=b&token={access.token}", ""), ("", cookie)):
        assert access.refusal("any.example", query, cookies) is None
    other_port = cookie.replace("8600", "8601")
    for query, cookies in (
        *(("", None), ("token=", None), (f"token={access.token}x", None), ("token=é", None), ("token=%ff", None)),
        *(("", other_port), ("", "jaxdp_watch_8600="), ("", "nonsense;;==\x00"), (f"tokens={access.token}", None)),
    ):
        assert "token is missing or wrong" in access.refusal("localhost", query, cookies)


def test_page_on_localhost_is_for_requests_to_localhost(tmp_path):
    with serving(write_run(tmp_path / "run")) as client:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", client.url)
        for path in ("/", "/page.js"):
            status, _, body = client.get(path, host="evil.example")
            assert status == 403
            assert body.startswith("jaxdp watch: this page is only for this machine")
        status, headers, body = client.get(method="HEAD")
        assert (status, body) == (200, "")
        assert int(headers["Content-Length"]) > 1000
        assert "Set-Cookie" not in headers
        assert client.get(method="POST")[0] == 501
        assert client.get("//[")[0] in (400, 404)


def test_page_on_all_interfaces_needs_the_token_of_its_address(tmp_path):
    with serving(write_run(tmp_path / "run"), host="0.0.0.0") as client:
        token = client.server.access.token
        assert client.url == f"http://{socket.gethostname()}:{client.server.server_port}/?token={token}"
        for path in ("/", "/page.js", "/?token=wrong"):
            assert client.get(path, host="machine")[0] == 403
        status, headers, text = client.get(f"/?token={token}", host="machine")
        assert status == 200
        assert token not in text
        cookie = headers["Set-Cookie"]
        assert re.fullmatch(rf"jaxdp_watch_\d+={token}; HttpOnly; SameSite=Strict; Path=/", cookie)
        assert client.get("/", host="machine", Cookie=cookie.partition(";")[0])[0] == 200


def test_page_is_compressed_for_those_who_ask(tmp_path):
    with serving(write_run(tmp_path / "run")) as client:
        plain = client.get(method="HEAD")[1]
        packed = client.get(method="HEAD", **{"Accept-Encoding": "br, gzip"})[1]
    assert (plain["Content-Encoding"], packed["Content-Encoding"]) == (None, "gzip")
    assert int(packed["Content-Length"]) < int(plain["Content-Length"]) / 2


def test_viewer_that_goes_away_prints_nothing(tmp_path, capfd):
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
        assert (error.value.field, error.value.value) == ("--port", free_port)
        monkeypatch.setattr(server, "FIRST_PORT", free_port)
        found, url = listen([run])
        found.server_close()
        assert url != f"http://127.0.0.1:{free_port}/"
        monkeypatch.setattr(server, "MAX_TRIED_PORTS", 1)
        with pytest.raises(ConfigError, match="in use by another process"):
            listen([run])


def test_silent_connections_keep_nobody_out_and_hold_few_threads(tmp_path):
    write_run(tmp_path / "run")
    with serving(tmp_path / "run") as client, contextlib.ExitStack() as stack:
        before = threading.active_count()
        for _ in range(2 * server.MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", client.server.server_port)))
        assert client.get()[0] == 200
        wait_for(lambda: threading.active_count() - before <= server.MAX_CONNECTIONS)
