"""A client's connection to rank 0's control port: opened and authenticated, with retries until the start timeout."""

import contextlib
import errno
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxdp.distributed.handshake import (
    HANDSHAKE_SECONDS,
    MAX_HANDSHAKE_LINE_BYTES,
    MAX_LINE_BYTES,
    AuthenticationError,
    ClientHandshake,
    ConnectionEnded,
    LineBuffer,
    SignedChannel,
)
from jaxdp.distributed.launchers import Cluster
from jaxdp.distributed.secret import Secret, SecretUnavailable
from jaxdp.errors import ConfigError, printable

CONNECT_SECONDS = 5.0
RETRY_SECONDS = 0.2
RECEIVE_SECONDS = 0.5
WARN_SECONDS = 10.0  # after which a process that cannot authenticate prints why; it keeps trying


@dataclass
class Connection:
    """An authenticated connection to rank 0. received: complete lines that have already arrived."""

    socket: socket.socket
    lines: LineBuffer
    channel: SignedChannel
    received: list[bytes] = field(default_factory=list)


def connect(
    cluster: Cluster,
    address: tuple[str, int],
    *,
    secret: Secret,
    read_key: Callable[[], bytes],
    host: str,
    member: dict[str, Any],
    timeout_seconds: float,
    while_waiting: Callable[[], None],
) -> Connection:
    """An authenticated connection to rank 0 at `address`, (host, port).

    read_key: returns the run's key, or raises SecretUnavailable while it does not exist. host: name of this host. member: the
    record of this process. while_waiting: called about every half second; may raise. Raises TimeoutError if nothing answers in
    time, and ConfigError if rank 0 refuses this rank or the other end has another secret.
    """
    server = printable(f"{address[0]}:{address[1]}")
    this_process = f"rank {cluster.rank} on {host}"
    started, warned, reason, hint, os_error = time.monotonic(), False, "", "", ""
    while (remaining := started + timeout_seconds - time.monotonic()) > 0:
        handshake = None
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(socket.create_connection(address, min(CONNECT_SECONDS, remaining)))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                incoming = _LineReader(connection, min(HANDSHAKE_SECONDS, remaining), while_waiting)
                handshake = ClientHandshake(incoming.next, connection.sendall)
                channel = handshake.perform(read_key, rank=cluster.rank, processes=cluster.num_processes, member=member)
                # Rank 0 may have admitted this process by now, and would refuse a second attempt: wait for the answer.
                incoming.set_deadline(started + timeout_seconds)
                answer = channel.open(incoming.next())
                if "refused" in answer:
                    raise ConfigError(
                        "rank", cluster.rank, reason=f"rank 0 refused {this_process}: {printable(answer['refused'], 1000)}"
                    )
                incoming.lines.set_limit(MAX_LINE_BYTES)
                stack.pop_all()
                return Connection(connection, incoming.lines, channel, incoming.ready)
            except ConfigError:
                raise
            except (SecretUnavailable, AuthenticationError, ValueError) as error:
                reason = f"{this_process} cannot authenticate with the process listening there: {error}"
                hint = secret.fix(handshake.server_source if handshake else "")
            except OSError as error:
                os_error = error.strerror or str(error)
        if reason and not warned and time.monotonic() - started > WARN_SECONDS:
            warned = True
            with contextlib.suppress(OSError, ValueError):
                print(f"jaxdp: still waiting for rank 0 at {server}: {reason}; {hint}", file=sys.stderr, flush=True)
        time.sleep(RETRY_SECONDS)
        while_waiting()
    if reason:
        raise ConfigError("coordinator address", server, reason=reason, hint=hint)
    raise TimeoutError(
        errno.ETIMEDOUT,
        f"{this_process}: rank 0 did not answer at {server} within {timeout_seconds:g} s ({os_error}); check that rank 0 has "
        "started and that the port is open between the hosts",
    )


class _LineReader:
    """Reads lines from a socket until a deadline, and calls `while_waiting` meanwhile."""

    def __init__(self, connection: socket.socket, timeout_seconds: float, while_waiting: Callable[[], None]) -> None:
        self.connection, self.while_waiting = connection, while_waiting
        self.lines, self.ready = LineBuffer(MAX_HANDSHAKE_LINE_BYTES), list[bytes]()
        self.deadline = time.monotonic() + timeout_seconds
        connection.settimeout(RECEIVE_SECONDS)

    def set_deadline(self, deadline: float) -> None:
        """Set the moment of the monotonic clock after which `next` gives up."""
        self.deadline = deadline

    def next(self) -> bytes:
        """The next line. Raises OSError if none arrives in time, AuthenticationError if the connection ends."""
        while not self.ready:
            self.while_waiting()
            if time.monotonic() > self.deadline:
                raise TimeoutError(errno.ETIMEDOUT, "the process listening there sends nothing")
            try:
                received = self.connection.recv(2**14)
            except TimeoutError:
                continue
            if not received:
                raise ConnectionEnded("it closed the connection")
            self.ready += self.lines.feed(received)
        return self.ready.pop(0)
