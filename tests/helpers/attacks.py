"""What a process without the run's secret may send to rank 0's port."""

import json
import socket
from contextlib import suppress

LOCATION = {"activity": "start", "step": None, "background_save": ""}


def _member(rank, processes=2):
    """An unauthenticated member record."""
    record = {"rank": rank, "processes": processes, "host": "h", "identity": "e", "gpus": [], "jax_port": 1}
    return json.dumps(record).encode() + b"\n"


def _false_proof(rank, processes=2):
    record = {"rank": rank, "processes": processes, "nonce": "0" * 32, "proof": "0" * 64}
    return json.dumps(record).encode() + b"\n"


FORGED = [
    {"fail": "gone", "code": 0, "location": LOCATION},
    {"broadcast": "rank 0's settled 1", "value": [None, []]},
    {"request": "stop", "reason": "\x1b[2J"},
    {"failure": {"rank": 0, "host": "h", "location": LOCATION, "reason": "\x1b]0;x\x07", "code": 0, "missing": []}},
    {"heartbeat": {"activity": "\x1b[31m", "step": 1}, "steps": [[1, float("nan"), 2]], "ping": 0},
    {"goodbye": 0},
    {"all_gather": "all processes to exit 1", "value": None, "main_thread": False},
    {"refused": "no"},
]
ATTACKS = {
    "a duplicate rank": _member(1),
    "a missing rank": _member(0),
    "an impossible rank": _member(7),
    "a negative rank": _member(-1),
    "another number of processes": _member(1, 3),
    "a rank that is text": _member("x"),
    "a rank that is true": _false_proof(True),
    "a proof of another secret": _false_proof(1),
    "a huge rank": _false_proof(10**4000),
    "a proof that is a number": json.dumps({"rank": 1, "processes": 2, "nonce": "0" * 32, "proof": 5}).encode() + b"\n",
    "a proof with a surrogate": b'{"rank": 1, "processes": 2, "nonce": "' + b"0" * 32 + b'", "proof": "\\ud800"}\n',
    "an invalid nonce": json.dumps({"rank": 1, "processes": 2, "nonce": "x", "proof": "0"}).encode() + b"\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + b"\x00" * 160 + b"\n",
    "a list": b"[]\n",
    "an empty object": b"{}\n",
    "an empty line": b"\n",
    "invalid UTF-8": b"\xff\xfe\x00\n",
    "nesting": b"[" * 10_000 + b"\n",
    "a line without end": b"x" * 2**20,
    "half a line": b'{"rank": 1, ',
    **{f"a forged {next(iter(message))} after {what}": start + json.dumps(message).encode() + b"\n" for message in FORGED
       for what, start in (("nothing", b""), ("a member record", _member(1)), ("a false proof", _false_proof(1)))},
}  # fmt: skip


def attack(port: int, text: bytes) -> None:
    """Send `text` to rank 0, and wait until rank 0 closes the connection; it must answer with its challenge at most."""
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.settimeout(5)
        try:
            connection.sendall(text)
            with suppress(OSError):  # rank 0 may have closed the connection already
                connection.shutdown(socket.SHUT_WR)
            received = b""
            while more := connection.recv(4096):
                received += more
        except ConnectionError:
            return
    assert set(json.loads(received)) == {"jaxdp", "nonce", "secret"}
