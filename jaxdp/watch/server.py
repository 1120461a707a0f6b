"""The HTTP server of `jaxdp watch`: the page, its changed blocks and its figures. Requests name no files."""

import contextlib
import errno
import gzip
import io
import json
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from jaxdp.errors import ConfigError
from jaxdp.report.hover import SCRIPT
from jaxdp.report.page import STYLE
from jaxdp.watch import __name__ as PACKAGE
from jaxdp.watch.access import Access, is_loopback
from jaxdp.watch.board import Board
from jaxdp.watch.page import whole_page

FIRST_PORT, MAX_TRIED_PORTS = 8600, 100
MAX_VIEWERS = 64  # whose requests are answered at a time
MAX_PENDING = 64  # connections that have not sent a request yet
HEAD_SECONDS, MAX_HEAD = 5.0, 2**16  # time to send a request, and its bytes
TIMEOUT_SECONDS = 20.0  # to take each part of an answer
PART = 2**14  # bytes
HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(ThreadingHTTPServer):
    """Listens on an address from its construction on. board: what is shown."""

    daemon_threads = True  # a slow viewer does not delay the end
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], board: Board) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.board = board
        self.viewers = threading.Semaphore(MAX_VIEWERS)
        self._pending: dict[socket.socket, str] = {}  # with their addresses, the oldest first
        self._lock = threading.Lock()
        super().__init__(address, Handler)
        self.access = Access.for_address(address[0], self.server_port)
        own = {name: (files(PACKAGE) / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")}
        self.static = {"style.css": STYLE + own["page.css"], "script.js": f"{SCRIPT}\n{own['page.js']}"}

    def server_bind(self) -> None:
        """Bind without the look-up of the machine's name, which `HTTPServer` needs for CGI and which may take seconds."""
        super(ThreadingHTTPServer, self).server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. At the limit, the oldest pending connection of the address with the most is closed."""
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                busiest, _ = Counter(self._pending.values()).most_common(1)[0]
                oldest = next(pending for pending, address in self._pending.items() if address == busiest)
                del self._pending[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._pending[request] = client_address[0]
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.end_pending(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.end_pending(request)

    def end_pending(self, request: socket.socket) -> None:
        """A connection has sent its request, or has ended."""
        with self._lock:
            self._pending.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Viewers that go away are no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    server: Server
    timeout = TIMEOUT_SECONDS

    def setup(self) -> None:
        """Read the whole head of the request. Raises TimeoutError if it does not arrive within HEAD_SECONDS."""
        super().setup()
        end, head, data = time.monotonic() + HEAD_SECONDS, b"", b""
        while not re.search(rb"\n\r?\n", head[-len(data) - 2 :]) and len(head) < MAX_HEAD:
            self.connection.settimeout(max(1e-3, end - time.monotonic()))
            if time.monotonic() > end or not (data := self.connection.recv(PART)):
                raise TimeoutError
            head += data
        self.connection.settimeout(self.timeout)
        self.rfile.close()
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.server.end_pending(self.connection)

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
            refusal = self.server.access.refusal(self.headers.get("Host"), url.query, self.headers.get("Cookie"))
        except ValueError:
            return self.send_error(HTTPStatus.BAD_REQUEST)
        if refusal is not None:
            return self.send_error(HTTPStatus.FORBIDDEN, explain=refusal)
        if not self.server.viewers.acquire(blocking=False):
            return self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain="too many viewers at a time")
        try:
            self._show(url)
        finally:
            self.server.viewers.release()

    def _show(self, url: SplitResult) -> None:
        """Answer a request that is allowed."""
        name, static, board = url.path.removeprefix("/"), self.server.static, self.server.board
        if name == "":
            cookie = {"Set-Cookie": self.server.access.set_cookie()} if self.server.access.has_token(url.query) else {}
            view = board.view()
            return self._answer(whole_page(view.title, view.announcement, view.blocks), HTML, cookie)
        if name == "blocks":
            known = set(parse_qs(url.query).get("have", [""])[-1].split(","))
            return self._answer(_changed_blocks(board, known), "application/json")
        if name in static:
            kind = "text/css" if name.endswith(".css") else "text/javascript"
            return self._answer(static[name], f"{kind}; charset=utf-8")
        if name.startswith("figures/"):
            picture = board.picture(name.removeprefix("figures/").removesuffix(".png"))
            if picture is not None:
                return self._answer(picture, "image/png", {"Cache-Control": "private, max-age=3600, immutable"})
        self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _answer(
        self, body: str | bytes, kind: str, headers: dict[str, str] | None = None, *, status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        data = body.encode("utf-8", "replace") if isinstance(body, str) else body
        own = {"Content-Type": kind, "Cache-Control": "no-store"}
        if isinstance(body, str) and len(data) > PART and "gzip" in self.headers.get("Accept-Encoding", ""):
            data, own = gzip.compress(data, compresslevel=1), own | {"Content-Encoding": "gzip"}
        own["Content-Length"] = str(len(data))
        self.send_response(status)
        for name, value in (HEADERS | own | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            for start in range(0, len(data), PART):  # the time-out is that of a part: slow viewers are served too
                self.wfile.write(data[start : start + PART])

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """One line of text, in place of a page."""
        status = HTTPStatus(code)
        self.close_connection = True
        self._answer(f"jaxdp watch: {explain or message or status.phrase.lower()}\n", TEXT, status=status)

    def version_string(self) -> str:
        return "jaxdp"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _changed_blocks(board: Board, known: set[str]) -> str:
    """The blocks whose digests a viewer does not have, as JSON."""
    view = board.view()
    changed = {
        name: {"html": block.html, "digest": block.digest} for name, block in view.blocks.items() if block.digest not in known
    }
    return json.dumps({"title": view.title, "announcement": view.announcement, "blocks": changed})


def listen(workdirs: Sequence[str | Path], host: str | None = None, port: int | None = None) -> tuple[Server, str]:
    """(server, URL) for runs. host: None for 127.0.0.1. port: None for the first free one from 8600 on; 0 for any free one.

    Raises ConfigError if it cannot listen there.
    """
    if port is not None and not 0 <= port < 2**16:
        raise ConfigError("--port", port, reason="must be from 0 to 65535", hint="0 chooses a free port")
    address, board = _resolve(host), Board(workdirs)
    ports = range(FIRST_PORT, FIRST_PORT + MAX_TRIED_PORTS) if port is None else [port]
    for tried in ports:
        try:
            server = Server((address, tried), board)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and tried != ports[-1]:
                continue
            raise _not_listening(error, host, tried) from None
        return server, _url(server, address, host)
    raise AssertionError


def _not_listening(error: OSError, host: str | None, port: int) -> ConfigError:
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError("--host", host, reason="not an address of this machine", hint="0.0.0.0 means all of them")
    in_use = error.errno == errno.EADDRINUSE
    reason = "in use by another process" if in_use else f"cannot listen on this port ({os.strerror(error.errno or 0)})"
    return ConfigError("--port", port, reason=reason, hint="use another, or 0 for any free port")


def _resolve(host: str | None) -> str:
    """The IP address of a host name or address."""
    if host is None:
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE) if host.strip() else []
    except (OSError, UnicodeError):
        found = []
    if not found:
        reason = "not a host name or address"
        raise ConfigError("--host", host, reason=reason, hint="use an address of this machine, or 0.0.0.0 for all of them")
    return str(found[0][4][0])


def _url(server: Server, address: str, host: str | None) -> str:
    """The address for people, with the token. A server on all interfaces is named like the machine."""
    name = socket.gethostname() if address in ("0.0.0.0", "::") else address if host is None else host
    query = "" if is_loopback(address) else f"?token={server.access.token}"
    return f"http://{f'[{name}]' if ':' in name else name}:{server.server_port}/{query}"
