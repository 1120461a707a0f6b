"""HTTP proxy that injects faults between a client and an object storage server on this machine.

    with FaultProxy(server_port) as proxy:
        proxy.add("latency", seconds=0.05)          # every request from now on
        proxy.add("status", status=503, rate=0.1)   # one in ten, chosen at random
        proxy.add("lost_response", times=1, methods=["PUT"], path="manifest")
        proxy.outage(seconds=60)                    # refuses connections; returns at once
        proxy.clear(); print(proxy.log())           # every request with its status, bytes and injected fault

A request body is read completely before it is passed on: a cut upload never reaches the server, as with S3 and GCS.
"""

import asyncio
import json
import random
import re
import threading
from dataclasses import asdict, dataclass, field

CHUNK = 1 << 16
FAULTS = {
    "latency": "waits `seconds` before it passes the request on",
    "status": "answers `status` (503, 429, 403, ...), without a body if it is `empty`, and passes nothing on",
    "cut_upload": "reads `bytes` bytes of the request body, then resets the connection",
    "held_upload": "passes the request on after `seconds` or `clear`, even if the client has closed by then",
    "lost_response": "passes the request on, then resets the connection instead of answering",
    "cut_download": "sends `bytes` bytes of the response body, then resets the connection",
    "flipped_byte": "changes byte `bytes` of the response body, counted from the end of the text `after`, or its last one",
}
S3_CODES = {401: "InvalidAccessKeyId", 403: "AccessDenied", 429: "SlowDown", 500: "InternalError", 503: "SlowDown"}


@dataclass
class Rule:
    """A fault for the requests that match: the next `times` of them (-1: all), each with probability `rate`."""

    fault: str
    methods: list[str] = field(default_factory=list)  # none: all
    path: str = ""  # a regular expression, searched in path and query
    times: int = -1
    rate: float = 1.0
    seconds: float = 0.0
    status: int = 503
    bytes: int = 1000
    after: str = ""
    empty: bool = False

    def __post_init__(self):
        assert self.fault in FAULTS, f"{self.fault!r} is none of {', '.join(FAULTS)}"

    def applies(self, method: str, path: str) -> bool:
        if self.times == 0 or (self.methods and method not in self.methods) or not re.search(self.path, path):
            return False
        if random.random() >= self.rate:
            return False
        self.times -= self.times > 0
        return True


@dataclass
class Request:
    """What the log says of a request: `status` is 0 if the client got no complete answer."""

    method: str
    path: str
    status: int = 0
    sent: int = 0  # bytes of the body that the client sent
    received: int = 0  # bytes of the body that it received
    fault: str = ""


class Reset(Exception):
    """The connection to the client is to be reset."""


class FaultProxy:
    """Proxy in a thread of this process; `answers` is the form of injected errors: "s3" (XML) or "gcs" (JSON)."""

    def __init__(self, upstream: int, port: int = 0, *, answers: str = "s3"):
        self.upstream, self.port, self.answers = upstream, port, answers
        self._rules: list[Rule] = []
        self._log: list[Request] = []
        self._unlogged: list[Request] = []
        self._in_flight: list[Request] = []
        self._outage_end: float | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *_):
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, fault: str, **options) -> None:
        """Inject a fault of FAULTS from now on; the options are the fields of Rule."""
        self._rules = [*self._rules, Rule(fault, **options)]

    def clear(self) -> None:
        """Remove all rules; an outage continues."""
        self._rules = []

    def outage(self, seconds: float) -> None:
        """Cut every connection, and refuse new ones until it ends."""
        self._call(self._begin_outage(seconds))

    def log(self) -> list[dict]:
        """The requests so far, in order of their ends."""
        return [asdict(request) for request in list(self._log)]

    def in_flight(self) -> list[dict]:
        """The requests whose bodies have been received, and that are not over yet."""
        return [asdict(request) for request in list(self._in_flight)]

    def forget(self) -> None:
        """Empty the log."""
        self._log = []

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=CHUNK)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # one that accepts a connection starts another
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)

    async def _begin_outage(self, seconds: float) -> None:
        self._outage_end = end = self._loop.time() + seconds
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._ending = self._loop.create_task(self._end_outage(end))

    async def _end_outage(self, end: float) -> None:
        await asyncio.sleep(end - self._loop.time())
        if self._outage_end == end:
            self._outage_end = None
        if not self._server.is_serving():
            await self._listen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self._outage_end is not None:  # accepted just before
                raise Reset
            while await self._exchange(reader, writer):
                pass
        except (Reset, OSError, EOFError, asyncio.CancelledError):  # cancelled by `_stop`
            writer.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _exchange(self, reader, writer) -> bool:
        """Serve one request; False if the connection ends with it."""
        start, headers = await read_head(reader)
        method, path, _ = start.split(" ")
        request = Request(method, path)
        self._unlogged.append(request)
        rules = {rule.fault: rule for rule in self._rules if rule.applies(method, path)}
        request.fault = " ".join(rules)
        try:
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await self._receive(reader, headers, request, rules)
            self._in_flight.append(request)
            status, answer, content = await self._answer(start, headers, body, rules)
            await self._respond(writer, (status, answer, content), request, rules)
        except (Reset, OSError, EOFError, asyncio.CancelledError):  # cancelled by `_stop`
            request.status = 0
            raise
        finally:
            self._record(request)
        return headers.get("connection", "").lower() != "close"

    async def _receive(self, reader, headers, request, rules) -> bytes:
        cut = rules.get("cut_upload")
        body = bytearray()
        async for chunk in read_body(reader, headers):
            body += chunk
            request.sent = len(body)
            if cut and len(body) >= cut.bytes:
                raise Reset
        if cut and body:
            raise Reset
        return bytes(body)

    async def _answer(self, start, headers, body, rules) -> tuple[str, dict, bytes]:
        if self._outage_end is not None:
            raise Reset
        if "latency" in rules:
            await asyncio.sleep(rules["latency"].seconds)
        if held := rules.get("held_upload"):
            end = self._loop.time() + held.seconds
            while held in self._rules and self._loop.time() < end:
                await asyncio.sleep(0.05)
        if "status" in rules:
            start, headers, content = self._error(rules["status"].status)
            return start, headers, b"" if rules["status"].empty else content
        answer = await pass_on(self.upstream, start, headers, body)
        if self._outage_end is not None or "lost_response" in rules:
            raise Reset
        if "flipped_byte" in rules and answer[2]:
            content, rule = bytearray(answer[2]), rules["flipped_byte"]
            start = content.index(rule.after.encode()) + len(rule.after)
            content[min(start + rule.bytes, len(content) - 1)] ^= 0x40  # a digit becomes a letter
            return *answer[:2], bytes(content)
        return answer

    def _error(self, status: int) -> tuple[str, dict, bytes]:
        if self.answers == "gcs":
            content = json.dumps({"error": {"code": status, "message": "injected error"}})
            return f"HTTP/1.1 {status} Injected", {"content-type": "application/json"}, content.encode()
        code = S3_CODES.get(status, "InternalError")
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected error</Message></Error>"
        return f"HTTP/1.1 {status} Injected", {"content-type": "application/xml"}, content.encode()

    async def _respond(self, writer, answer, request, rules) -> None:
        start, headers, content = answer
        if request.method == "HEAD":
            content = b""
        elif not bodiless(request.method, start):
            headers = headers | {"content-length": str(len(content))}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        cut = rules.get("cut_download") if content else None
        content = content[: cut.bytes] if cut else content
        pieces = [f"{start}\r\n{head}\r\n".encode("latin-1")]
        pieces += [content[position : position + CHUNK] for position in range(0, len(content), CHUNK)]
        for number, piece in enumerate(pieces):
            if number:
                request.received += len(piece)
            if number == len(pieces) - 1 and not cut:  # in the log before the client has the answer
                request.status = int(start.split(" ")[1])
                self._record(request)
            writer.write(piece)
            await writer.drain()
        if cut:
            await asyncio.sleep(0.05)  # a reset discards what the client has not read yet
            raise Reset

    def _record(self, request: Request) -> None:
        self._in_flight = [other for other in self._in_flight if other is not request]
        if any(other is request for other in self._unlogged):  # else it is in the log, or was before `forget`
            self._unlogged = [other for other in self._unlogged if other is not request]
            self._log.append(request)


def bodiless(method: str, start: str) -> bool:
    return method == "HEAD" or start.split(" ")[1] in ("204", "304")


async def read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    """The first line and the headers of a message, their names in lower case."""
    start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return start, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str], *, until_closed: bool = False):
    """Yield the body of a message piece by piece; EOFError if it is cut."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            async for piece in exactly(reader, size):
                yield piece
            await reader.readexactly(2)
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
    elif "content-length" in headers:
        async for piece in exactly(reader, int(headers["content-length"])):
            yield piece
    elif until_closed:
        while piece := await reader.read(CHUNK):
            yield piece


async def exactly(reader: asyncio.StreamReader, size: int):
    while size:
        piece = await reader.read(min(size, CHUNK))
        if not piece:
            raise EOFError
        size -= len(piece)
        yield piece


async def pass_on(port: int, start: str, headers: dict[str, str], body: bytes) -> tuple[str, dict, bytes]:
    """Send a request to the server over a connection of its own; the answer's first line, headers and body."""
    own = {"connection": "close"} | ({"content-length": str(len(body))} if body or "content-length" in headers else {})
    dropped = ("connection", "content-length", "transfer-encoding", "expect")
    sent = {name: value for name, value in headers.items() if name not in dropped} | own
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=CHUNK)
    try:
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        writer.write(f"{start}\r\n{head}\r\n".encode("latin-1") + body)
        first, answer = await read_head(reader)
        content = b""
        if not bodiless(start.split(" ")[0], first):
            content = b"".join([piece async for piece in read_body(reader, answer, until_closed=True)])
        answer = {name: value for name, value in answer.items() if name not in ("connection", "transfer-encoding")}
        return f"HTTP/1.1 {first.partition(' ')[2]}", answer, content
    finally:
        writer.close()
