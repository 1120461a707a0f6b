"""Failure of a run of several processes: which process failed and why, and how the other processes exit."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxdp.distributed import messages
from jaxdp.distributed.status import HEARTBEAT_SECONDS, Location
from jaxdp.errors import EXIT_STOPPED, printable

EXIT_SECONDS = 5.0  # to clean up and print before the process is ended anyway
ABORT_SECONDS = 60.0
MISSED_BEATS = 3
SILENT_CAUSES = "suspended, cut off from the network, or in native code that holds the GIL"


def silence_reason(seconds: float) -> str:
    """The reason of a failure: a process has been silent for too long."""
    return f"sent no heartbeat for {seconds:g} s ({SILENT_CAUSES})"


def exit_reason(silent_seconds: float, silence_seconds: float) -> str:
    """The reason of a failure: a process closed its connection after `silent_seconds` without a message."""
    if silent_seconds >= silence_seconds - MISSED_BEATS * HEARTBEAT_SECONDS:  # JAX may have aborted it
        return f"sent no heartbeat for {silent_seconds:.0f} s and then exited ({SILENT_CAUSES})"
    return "exited without a message (killed or crashed)"


@dataclass(frozen=True)
class Failure:
    """Why a run ends. code: exit code of all processes. rank, host, location: of the process that failed, if it is one.

    missing: ranks that did not connect.
    """

    reason: str
    code: int
    rank: int | None = None
    host: str | None = None
    location: Location | None = None
    missing: list[int] = field(default_factory=list)

    @classmethod
    def from_message(cls, fields: dict[str, Any]) -> "Failure":
        location = fields["location"]
        return cls(**fields | {"location": None if location is None else Location(**location)})

    def to_message(self) -> dict[str, Any]:
        return {"failure": asdict(self)}

    def __str__(self) -> str:
        """One line: the process that failed, what it did, and why it failed."""
        reason = printable(self.reason, messages.REASON_CHARS)
        if self.rank is None:
            return reason
        host = f" on {printable(self.host, messages.TEXT_CHARS)}" if self.host else ""
        verb = "was stopped" if self.code == EXIT_STOPPED else "failed"
        return f"rank {self.rank}{host} {verb}{f' {self.location}' if self.location else ''}: {reason}"


class FailureHandler:
    """Exits this process when another one has failed, after printing which one failed and why.

    changed: notified when the failure is known. wait_for_others, clean_up: called before the exit, in this order.
    """

    def __init__(
        self, changed: threading.Condition, *, wait_for_others: Callable[[], None], clean_up: Callable[[], None]
    ) -> None:
        self.failure: Failure | None = None
        self.exiting = False  # this process exits on its own: the failure of another one no longer ends it
        self.reported = False  # this process has reported its own failure
        self.resume_hint = ""
        self.before_exit: Callable[[], None] = lambda: None
        self._changed, self._wait_for_others, self._clean_up = changed, wait_for_others, clean_up

    def set_before_exit(self, action: Callable[[], None]) -> None:
        self.before_exit = action

    def set_resume_hint(self, hint: str) -> None:
        self.resume_hint = hint

    def set_exiting(self, failed: bool = False) -> None:
        """Record that this process exits on its own. failed: because of a failure that it has reported."""
        with self._changed:
            self.exiting = True
            self.reported = self.reported or failed

    def on_failure(self, failure: Failure) -> None:
        """Record the first failure, and exit unless this process exits on its own."""
        with self._changed:
            if self.failure is None:
                self.failure = failure
                if not self.exiting:
                    threading.Thread(target=self.exit, daemon=True).start()
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for a failure. Returns whether there is one."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.failure, seconds))

    def exit(self) -> None:
        """Print the failure and exit: JAX operations in progress would never end."""
        assert self.failure is not None
        self._wait_for_others()
        code = messages.failure_code(self.failure.code)
        forced = threading.Timer(EXIT_SECONDS, os._exit, [code])  # printing blocks if nobody reads a full pipe
        forced.daemon = True
        forced.start()
        hint = f"; {self.resume_hint}" if self.resume_hint else ""
        with contextlib.suppress(Exception):  # flushing may fail on a full disk; the process exits all the same
            self.before_exit()
            self._clean_up()
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            print(f"jaxdp: {self.failure}{hint}", file=sys.stderr, flush=True)
        os._exit(code)


def wait_for_exit() -> None:
    """Block the calling thread while `FailureHandler.exit` ends the process."""
    time.sleep(ABORT_SECONDS)
