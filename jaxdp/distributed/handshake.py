"""Authentication and signing on the control port: both ends prove that they have the run's secret, then sign every line.

    rank 0   {"jaxdp": 1, "nonce", "secret": where rank 0 reads its secret from}
    client   {"rank", "processes", "nonce", "proof": HMAC(key, "client", both nonces, rank, processes)}
    rank 0   {"proof": HMAC(key, "server", the same)}
    client   its member record, signed
    rank 0   {"welcome": rank} or {"refused": reason}, signed

Every line after the proofs carries HMAC(key of this connection and direction, line number, text), so nobody on the network
can alter, replay, drop or insert a line. Nothing is encrypted.
"""

import asyncio
import hmac
import json
import re
import secrets
from collections.abc import Callable
from typing import Any

VERSION = 1
MAX_LINE_BYTES = 2**26
MAX_HANDSHAKE_LINE_BYTES = 2**14  # of a line before its sender has authenticated
HANDSHAKE_SECONDS = 10.0
TAG_DIGITS = 64  # hexadecimal digits of a signature
NOT_JAXDP = "it does not speak jaxdp's protocol"


class AuthenticationError(Exception):
    """The other end of a connection has not proved that it belongs to the run: one line with the reason."""


class ConnectionEnded(AuthenticationError):
    """The other end closed the connection."""


class LineBuffer:
    """Assembles lines from the pieces that a connection delivers."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._parts: list[bytes] = []
        self._size = 0

    def set_limit(self, limit: int) -> None:
        """Set the most bytes that a line may have."""
        self.limit = limit

    def feed(self, received: bytes) -> list[bytes]:
        """The lines completed by what was received. Raises ValueError for a line longer than the limit."""
        *ends, rest = received.split(b"\n")
        lines = []
        for end in ends:
            self._add(end)
            lines.append(b"".join(self._parts))
            self._parts, self._size = [], 0
        self._add(rest)
        return lines

    def _add(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > self.limit:
            raise ValueError(f"a line of more than {self.limit} bytes")


class SignedChannel:
    """Signs the lines that one end of a connection sends and verifies those that it receives."""

    def __init__(self, key: bytes, transcript: bytes, *, local: str, remote: str) -> None:
        self._send_key, self._receive_key = (
            hmac.digest(key, b"session\n" + side.encode() + b"\n" + transcript, "sha256") for side in (local, remote)
        )
        self._sent = self._received = 0

    def seal(self, message: dict[str, Any]) -> bytes:
        """A message as the next line to send."""
        return self.sign(encode(message))

    def sign(self, text: bytes) -> bytes:
        """An encoded message as the next line to send."""
        tag = _tag(self._send_key, self._sent, text)
        self._sent += 1
        return b"%b%b\n" % (tag, text)

    def open(self, line: bytes) -> dict[str, Any]:
        """The message of the next line received. Raises ValueError if the other end did not sign it as its next line."""
        tag, text = line[:TAG_DIGITS], line[TAG_DIGITS:]
        expected = _tag(self._receive_key, self._received, text)
        self._received += 1
        if not hmac.compare_digest(tag, expected):
            raise ValueError("a line that the other end did not sign")
        message = json.loads(text)
        if not isinstance(message, dict):
            raise ValueError("a line that is not an object")
        return message


def _tag(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + text, "sha256").hex().encode()


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def unsigned_line(message: dict[str, Any]) -> bytes:
    """A line of the handshake before the proofs."""
    return encode(message) + b"\n"


def _parse(text: bytes) -> dict[str, Any]:
    """An unsigned line from the other end. Raises AuthenticationError if it is not an object."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise AuthenticationError(NOT_JAXDP)
    return message


def _nonce_of(message: dict[str, Any]) -> str:
    nonce = message.get("nonce")
    if not (isinstance(nonce, str) and re.fullmatch("[0-9a-f]{32}", nonce)):
        raise AuthenticationError(NOT_JAXDP)
    return nonce


def _check_proof(key: bytes, side: str, transcript: bytes, *, message: dict[str, Any]) -> None:
    proof = message.get("proof")
    if not (isinstance(proof, str) and hmac.compare_digest(proof.encode("utf-8", "replace"), prove(key, side, transcript))):
        raise AuthenticationError("it does not have this run's secret")


def prove(key: bytes, side: str, transcript: bytes) -> bytes:
    """The proof of one side ("client" or "server") that it has the key, in hexadecimal digits."""
    return hmac.digest(key, side.encode() + b"\n" + transcript, "sha256").hex().encode()


def transcript_of(server_nonce: str, client_nonce: str, rank: int, *, processes: int) -> bytes:
    """The text that both ends of a connection sign and derive their keys from."""
    return f"jaxdp {VERSION}\n{server_nonce}\n{client_nonce}\n{rank}\n{processes}".encode()


async def authenticate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, key: bytes, source: str
) -> tuple[dict[str, Any], SignedChannel]:
    """On rank 0: the member record of a process that has authenticated, with its "rank" and "processes", and the channel to it.

    source: where rank 0 reads its secret from. reader: of the limit MAX_HANDSHAKE_LINE_BYTES. Raises AuthenticationError for
    any other process, EOFError for a connection that ends without a byte.
    """
    nonce = secrets.token_hex(16)
    writer.write(unsigned_line({"jaxdp": VERSION, "nonce": nonce, "secret": source}))
    answer = _parse(await _read_line(reader))
    rank, processes = answer.get("rank"), answer.get("processes")
    if type(rank) is not int or type(processes) is not int:
        raise AuthenticationError(NOT_JAXDP)
    transcript = transcript_of(nonce, _nonce_of(answer), rank, processes=processes)
    _check_proof(key, "client", transcript, message=answer)
    writer.write(unsigned_line({"proof": prove(key, "server", transcript).decode()}))
    channel = SignedChannel(key, transcript, local="server", remote="client")
    try:
        member = channel.open(await _read_line(reader))
    except ValueError as error:
        raise AuthenticationError(f"it sends {error}") from None
    return member | {"rank": rank, "processes": processes}, channel


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readuntil(b"\n"))[:-1]
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise AuthenticationError("it ended in the middle of a line") from None
        raise EOFError from None
    except asyncio.LimitOverrunError:
        raise AuthenticationError(f"it sends a line of more than {MAX_HANDSHAKE_LINE_BYTES} bytes") from None


class ClientHandshake:
    """The other ranks' side of the handshake. next_line: returns the next line from rank 0; send: sends bytes.

    server_source: where rank 0 says it reads its secret from (not authenticated); "" before it has answered.
    """

    def __init__(self, next_line: Callable[[], bytes], send: Callable[[bytes], Any]) -> None:
        self.next_line, self.send, self.server_source = next_line, send, ""

    def perform(self, read_key: Callable[[], bytes], *, rank: int, processes: int, member: dict[str, Any]) -> SignedChannel:
        """The channel to rank 0, once both ends have authenticated and rank 0 has the member record.

        read_key: called after rank 0 has answered, which it does once its secret is written. Raises AuthenticationError.
        """
        challenge = _parse(self.next_line())
        if challenge.get("jaxdp") != VERSION:
            raise AuthenticationError(NOT_JAXDP)
        self.server_source = str(challenge.get("secret", ""))
        nonce, key = secrets.token_hex(16), read_key()
        transcript = transcript_of(_nonce_of(challenge), nonce, rank, processes=processes)
        proof = prove(key, "client", transcript).decode()
        self.send(unsigned_line({"rank": rank, "processes": processes, "nonce": nonce, "proof": proof}))
        try:
            answer = self.next_line()
        except ConnectionEnded:
            raise AuthenticationError("it refuses this process's secret") from None
        _check_proof(key, "server", transcript, message=_parse(answer))
        channel = SignedChannel(key, transcript, local="client", remote="server")
        self.send(channel.seal(member))
        return channel
