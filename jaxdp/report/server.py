"""The HTTP server of `jaxdp watch`: the page and its script with Plotly. Requests name no files."""

import contextlib
import errno
import gzip
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from plotly.offline import get_plotlyjs

from jaxdp.errors import ConfigError
from jaxdp.report.follow import RunsPage
from jaxdp.report.page import SCRIPT

FIRST_PORT, MAX_TRIED_PORTS = 8600, 100
MAX_CONNECTIONS = 128  # at a time; one more closes the oldest, so that slow clients do not shut out others
TIMEOUT_SECONDS = 20.0  # for a request, and to take each part of an answer
PART = 2**14  # bytes
HTML, SCRIPT_TYPE, TEXT = (f"text/{kind}; charset=utf-8" for kind in ("html", "javascript", "plain"))
# Names of this machine in the header Host, with any port, which may be forwarded. Another name is DNS rebinding: a foreign page
# whose name was made to lead here.
OWN_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)


HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # Plotly adds styles
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Access:
    """Who may see the page: on the loopback interface everybody on this machine, elsewhere those who have the token.

    token: None on the loopback interface. cookie: the name of the cookie that keeps it.
    """

    def __init__(self, address: str, port: int) -> None:
        is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        self.token = None if is_loopback else secrets.token_urlsafe(24)
        self.cookie = f"jaxdp_watch_{port}"

    def refusal(self, host: str | None, query: str, cookies: str | None) -> str | None:
        """Why a request is refused; None if it may be answered. host, cookies: its headers."""
        if self.token is None:
            if host is not None and OWN_HOST.fullmatch(host):
                return None
            return "this page is only for this machine; open it as localhost, or start jaxdp watch with --host"
        if self.has_token(query) or self._is_token(self._cookie_value(cookies)):
            return None
        return "the token is missing or wrong; open the address that jaxdp watch printed"

    def has_token(self, query: str) -> bool:
        """Whether the query of a URL has the token."""
        return any(map(self._is_token, parse_qs(query).get("token", [])))

    def _is_token(self, text: str) -> bool:
        return self.token is not None and hmac.compare_digest(text.encode(errors="replace"), self.token.encode())

    def _cookie_value(self, cookies: str | None) -> str:
        try:
            found = SimpleCookie(cookies or "").get(self.cookie)
        except CookieError:
            return ""
        return found.value if found else ""


class Server(ThreadingHTTPServer):
    """Listens on an address from its construction on. board: what is shown."""

    daemon_threads = False  # a process that exits while one of them runs C++ code may abort; `server_close` waits for them
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], board: RunsPage) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.board = board
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(address, Handler)
        self.access = Access(address[0], self.server_port)

    def server_bind(self) -> None:
        """Bind without the look-up of the machine's name, which `HTTPServer` needs for CGI and which may take seconds."""
        super(ThreadingHTTPServer, self).server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread."""
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Called when a connection has been answered."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stop listening, and end the connections: a slow viewer does not delay the end."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Viewers that go away are no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    server: Server
    timeout = TIMEOUT_SECONDS

    def do_GET(self) -> None:
        access = self.server.access
        try:
            url = urlsplit(self.path)
            refusal = access.refusal(self.headers.get("Host"), url.query, self.headers.get("Cookie"))
        except ValueError:
            return self.send_error(HTTPStatus.BAD_REQUEST)
        if refusal is not None:
            return self.send_error(HTTPStatus.FORBIDDEN, explain=refusal)
        if url.path == "/":
            cookie = f"{access.cookie}={access.token}; HttpOnly; SameSite=Strict; Path=/"
            more = {"Set-Cookie": cookie} if access.has_token(url.query) else {}
            return self._answer(self.server.board.page().encode("utf-8", "replace"), HTML, more)
        if url.path == "/page.js":
            return self._answer((get_plotlyjs() + "\n" + SCRIPT).encode(), SCRIPT_TYPE, {"Cache-Control": "private, no-cache"})
        self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _answer(
        self, data: bytes, kind: str, headers: dict[str, str] | None = None, *, status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        own = {"Content-Type": kind, "Cache-Control": "no-store"}
        if kind != TEXT:
            own["ETag"] = f'"{hashlib.blake2b(data, digest_size=8).hexdigest()}"'
            if self.headers.get("If-None-Match") == own["ETag"]:
                status, data = HTTPStatus.NOT_MODIFIED, b""
            elif "gzip" in self.headers.get("Accept-Encoding", ""):
                data, own = gzip.compress(data, compresslevel=1), own | {"Content-Encoding": "gzip"}
        own["Content-Length"] = str(len(data))
        self.send_response(status)
        for name, value in (HEADERS | own | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            for start in range(0, len(data), PART):  # the time-out holds for a part: slow viewers are served too
                self.wfile.write(data[start : start + PART])

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """One line of text, in place of a page."""
        status = HTTPStatus(code)
        self.close_connection = True
        self._answer(f"jaxdp watch: {explain or message or status.phrase.lower()}\n".encode(), TEXT, status=status)

    def version_string(self) -> str:
        return "jaxdp"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def listen(workdirs: Sequence[str | Path], host: str | None = None, port: int | None = None) -> tuple[Server, str]:
    """(server, URL) for runs. host: None for 127.0.0.1. port: None for the first free one from 8600 on; 0 for any free one.

    Raises ConfigError if it cannot listen there.
    """
    if port is not None and not 0 <= port < 2**16:
        raise ConfigError("--port", port, reason="must be from 0 to 65535", hint="0 chooses a free port")
    address, board = _resolve(host), RunsPage(workdirs)
    ports = range(FIRST_PORT, FIRST_PORT + MAX_TRIED_PORTS) if port is None else [port]
    for tried in ports:
        try:
            server = Server((address, tried), board)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and tried != ports[-1]:
                continue
            if error.errno == errno.EADDRNOTAVAIL:
                hint = "0.0.0.0 means all of them"
                raise ConfigError("--host", host, reason="not an address of this machine", hint=hint) from None
            reason = "in use by another process" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
            raise ConfigError("--port", tried, reason=reason, hint="use another, or 0 for any free port") from None
        return server, _url(server, address, host)
    raise AssertionError


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
    query = "" if server.access.token is None else f"?token={server.access.token}"
    return f"http://{f'[{name}]' if ':' in name else name}:{server.server_port}/{query}"
