"""Signals that stop a run: which ones, which of them are forced, and what they do before the run handles them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from jaxdp.errors import EXIT_STOPPED

# Open MPI's mpirun forwards SIGUSR1 (it kills its processes a second after SIGTERM); Slurm scripts often use it too.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
COPY_SECONDS = 2.0


class StopSignals:
    """Decides which stop signals are forced: the third, and the second unless it arrives within COPY_SECONDS of the first.

    The terminal signals all processes of its foreground group, and a launcher among them, such as torchrun or `uv run`,
    forwards the signal up to 0.2 s later: Ctrl-C then arrives twice.
    """

    def __init__(self) -> None:
        self._received, self._first = 0, 0.0

    def is_forced(self, arrived: float) -> bool:
        """Count a signal. arrived: its time in seconds, always by the same clock."""
        self._received += 1
        if self._received == 1:
            self._first = arrived
        return self._received > 2 or (self._received == 2 and arrived - self._first >= COPY_SECONDS)


def before_the_first_step(reason: str | None, resume_action: str = "the same command") -> str:
    """The line about a run that was asked to stop before it looked for a checkpoint to resume from."""
    resume = f"{resume_action} continues from the last checkpoint, if there is one"
    return f"stopped by {reason} before the first step of this session; {resume}"


@contextmanager
def exits_when_signaled() -> Iterator[None]:
    """Let stop signals exit with 75 while a command starts, until it sets its own handler: nothing can be lost yet.

    Only the main thread of a process may handle signals; in another thread, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _exit) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, f"jaxdp: {before_the_first_step(signal.Signals(number).name)}\n".encode())
    finally:
        os._exit(EXIT_STOPPED)  # without the handlers of imports in progress
