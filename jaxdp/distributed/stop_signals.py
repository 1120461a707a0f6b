"""Signals that stop a run: which ones, which of them are forced, and what they do before the run handles them."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jaxdp.errors import EXIT_STOPPED

# Open MPI's mpirun forwards SIGUSR1 (it kills its processes a second after SIGTERM); Slurm scripts often use it too.
# SIGHUP: the terminal was closed; SIGQUIT: Ctrl-\; SIGXCPU: a limit of CPU time.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
UNLESS_IGNORED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)  # `nohup` and `&` in a script set them to be ignored
# Not sent by hand: both the shell and the system send SIGHUP, and the system sends SIGXCPU every second.
REPEATED = (signal.SIGHUP, signal.SIGXCPU)
COPY_SECONDS = 2.0


class StopSignals:
    """Decides which stop signals are forced: the third, and the second unless it arrives within COPY_SECONDS of the first.

    REPEATED signals do not count. A terminal signals all processes of its foreground group. A launcher in that group, such as
    torchrun or `uv run`, forwards the signal up to 0.2 s later, so Ctrl-C arrives twice.
    """

    def __init__(self) -> None:
        self._received, self._first = 0, 0.0

    def is_forced(self, number: int, arrived: float) -> bool:
        """Count a signal. arrived: its time in seconds, always by the same clock."""
        if number in REPEATED:
            return False
        self._received += 1
        if self._received == 1:
            self._first = arrived
        return self._received > 2 or (self._received == 2 and arrived - self._first >= COPY_SECONDS)


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let a function handle STOP_SIGNALS. Only the main thread can do so; in another thread, nothing changes."""
    previous = dict[int, Any]()
    try:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number not in UNLESS_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, handler)
        yield
    finally:
        for each, before in previous.items():
            signal.signal(each, before)


def before_the_first_step(reason: str | None, resume_action: str = "the same command") -> str:
    """The line about a run that was asked to stop before it looked for a checkpoint to resume from."""
    resume = f"{resume_action} continues from the last checkpoint, if there is one"
    return f"stopped by {reason} before the first step of this session; {resume}"


@contextmanager
def exits_when_signaled() -> Iterator[None]:
    """Let stop signals exit with 75 while a command starts, until it sets its own handler: nothing can be lost yet."""
    with handled_by(_exit):
        yield


def _exit(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, f"jaxdp: {before_the_first_step(signal.Signals(number).name)}\n".encode())
    finally:
        os._exit(EXIT_STOPPED)  # without the handlers of imports in progress
