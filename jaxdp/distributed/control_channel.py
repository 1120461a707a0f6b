"""The client's end of the control channel: a thread that receives messages, and a thread-safe `send`."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from jaxdp.distributed import messages
from jaxdp.distributed.connection import Connection
from jaxdp.distributed.failure import exit_reason, silence_reason

TICK_SECONDS = 1.0
WAIT_SECONDS = 0.5
Message = dict[str, Any]


def wait_until(
    changed: threading.Condition, ready: Callable[[], object], while_waiting: Callable[[], None] = lambda: None
) -> None:
    """Wait for a condition to hold. while_waiting: called after every change and every half second before that; may raise."""
    with changed:
        while not ready():
            changed.wait(WAIT_SECONDS)
            if not ready():
                while_waiting()


def in_main_thread() -> bool:
    """Whether this is the main thread, which does nothing else while it waits and handles signals."""
    return threading.current_thread() is threading.main_thread()


class ControlChannel:
    """Sends messages to rank 0 and receives its messages in a thread.

    silence_seconds: time without a message from rank 0 after which it counts as lost.
    """

    def __init__(self, connection: Connection, silence_seconds: float) -> None:
        self.connection, self.silence_seconds = connection, silence_seconds
        self._outgoing: socket.socket | None = None
        self._sending = threading.Lock()

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        """Start receiving. on_message: called with every message; on_lost: with the reason when rank 0 is lost."""
        self.connection.socket.settimeout(TICK_SECONDS)
        self._outgoing = self.connection.socket.dup()  # with a separate timeout
        self._outgoing.settimeout(self.silence_seconds)
        threading.Thread(target=self._receive, args=(on_message, on_lost), name="control-receive", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message. Errors are ignored: the receiving thread notices a broken connection."""
        with self._sending, contextlib.suppress(OSError):
            if self._outgoing is not None:
                self._outgoing.sendall(self.connection.channel.seal(message))

    def close(self) -> None:
        self.connection.socket.close()
        if self._outgoing is not None:
            self._outgoing.close()

    def _receive(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        silent_seconds, lines = 0.0, self.connection.received
        while True:
            try:
                for line in lines:
                    on_message(messages.validate(self.connection.channel.open(line), messages.FROM_RANK_0))
                received = self.connection.socket.recv(2**18)
                lines = self.connection.lines.feed(received)
            except TimeoutError:
                # Counted in ticks: a process that was suspended and resumed does not blame rank 0.
                lines, silent_seconds = [], silent_seconds + TICK_SECONDS
                if silent_seconds > self.silence_seconds:
                    on_lost(silence_reason(self.silence_seconds))
                continue
            except OSError:
                received = b""
            except (ValueError, RecursionError, messages.InvalidMessage) as error:
                on_lost(f"sent an invalid message ({error})")
                return
            if not received:
                on_lost(exit_reason(silent_seconds, self.silence_seconds))
                return
            silent_seconds = 0.0
