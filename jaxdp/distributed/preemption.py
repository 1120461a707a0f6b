"""Stop signals: a handler records them, and the run stops where it can be saved.

1. `SignalHandler` records the signal. The trainer calls `poll` before each step.
2. `poll` asks the process group to stop; all processes agree on a sync point (see `jaxdp.distributed.sync_points`).
3. At that point `poll` raises `StopRequested` on every process. The trainer saves a checkpoint and raises `Stopped`.
4. `jaxdp train` exits with code 75 (`jaxdp.errors.EXIT_STOPPED`).
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import FrameType, TracebackType
from typing import Any, TypeVar

from jaxdp.distributed.process_group import Agreement, ProcessGroup, SingleProcess
from jaxdp.errors import EXIT_STOPPED, OneLine

POLL_SECONDS = 0.1
# Open MPI's mpirun forwards SIGUSR1 (it kills its processes a second after SIGTERM); Slurm scripts often use it too.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
Result = TypeVar("Result")


class StopRequested(Exception):
    """Raised by `SignalHandler.poll` when the run must stop here; the trainer then saves and raises `Stopped`."""


class Stopped(OneLine, Exception):
    """The run was asked to stop and can be resumed. The message is one line with the last step and how to resume."""

    exit_code = EXIT_STOPPED


class ForcedStop(OneLine, KeyboardInterrupt):
    """A second signal arrived while the run was being saved after the first."""


class SignalHandler:
    """Context manager for the main thread: records the first of `STOP_SIGNALS`; a second one ends the process at once.

    stop_reason: the signal's name, or where the processes agreed to stop, the reason they agreed on; None before.
    on_second_signal: what the second signal does; by default it ends the process with exit code 1.
    """

    def __init__(self, on_second_signal: Callable[[], None] | None = None) -> None:
        self.stop_reason: str | None = None
        self.group: ProcessGroup = SingleProcess()
        self._on_second_signal = on_second_signal or _exit_at_once
        self._received = False
        self._previous_handlers: dict[int, Any] = {}
        self._save_agreed = False

    def __enter__(self) -> "SignalHandler":
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def attach(self, group: ProcessGroup) -> None:
        """Set the processes that must stop at the same point."""
        self.group = group

    def set_on_second_signal(self, action: Callable[[], None]) -> None:
        self._on_second_signal = action

    def request_stop(self, reason: str) -> None:
        """Ask the run to stop at its next poll; a reason that is already set stays."""
        self.stop_reason = self.stop_reason or reason

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            self._on_second_signal()
        self._received = True
        self.request_stop(signal.Signals(number).name)

    def poll(self) -> None:
        """Raise StopRequested if the run stops here. All processes call this in the same order."""
        self._act_on(self.group.sync_point(self.stop_reason))

    def poll_local(self) -> None:
        """Raise StopRequested if this process was asked to stop, whatever the other processes do."""
        if self.stop_reason:
            raise StopRequested(self.stop_reason)

    def poll_while_waiting(self) -> None:
        """Raise StopRequested if the run stops here, while this process waits for others between two calls of `poll`."""
        self._act_on(self.group.poll_agreement(self.stop_reason))

    def wait_for(self, future: Future[Result]) -> Result:
        """The result of a future. Raises StopRequested as soon as the run stops here; the future is not cancelled."""
        while not wait([future], POLL_SECONDS).done:
            self.poll_while_waiting()
        return future.result()

    def run_in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in another thread and return its result, so that the main thread can handle signals."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        try:
            return self.wait_for(executor.submit(function, *arguments))
        finally:
            executor.shutdown(wait=False)

    def take_save_agreement(self) -> bool:
        """Whether the processes have agreed to save a checkpoint since the last call."""
        agreed, self._save_agreed = self._save_agreed, False
        return agreed

    def _act_on(self, agreement: Agreement | None) -> None:
        if agreement is None:
            return
        if agreement.action == "stop":
            self.request_stop(agreement.reason)
            raise StopRequested
        self._save_agreed = True


def _exit_at_once() -> None:
    message = b"jaxdp: stopped immediately by a second signal; the same command continues from the last checkpoint, if any\n"
    os.write(sys.stderr.fileno(), message)
    os._exit(1)
