"""Stop signals: which ones, which of them are forced, and the handler that stops the run where it can be saved.

docs/tour.md lists the functions from the signal to exit code 75. Until the processes have joined, there is no group, and
`SignalHandler.raise_if_signaled` stops this process.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, TypeVar

from jaxdp.distributed import status, watchdog
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.distributed.status import Failure
from jaxdp.errors import EXIT_STOPPED, OneLine
from jaxdp.xla.jax_options import jaxdp_jax_config

# Open MPI's mpirun forwards SIGUSR1 (it kills its processes a second after SIGTERM); Slurm scripts often use it too.
# SIGHUP: the terminal was closed; SIGQUIT: Ctrl-\; SIGXCPU: a limit of CPU time.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
UNLESS_IGNORED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)  # `nohup` and `&` in a script set them to be ignored
# Not sent by hand: both the shell and the system send SIGHUP, and the system sends SIGXCPU every second.
REPEATED = (signal.SIGHUP, signal.SIGXCPU)
COPY_SECONDS = 2.0
TELL_SECONDS = 1.0  # for a process that exits at once to inform the rest
CHECK_SECONDS = 0.1  # between two checks for a stop while the main thread waits
Result = TypeVar("Result")


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


@contextlib.contextmanager
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
    """The line about a run that was asked to stop before it had searched for a checkpoint."""
    resume = f"{resume_action} continues from the last checkpoint, if there is one"
    return f"stopped by {reason} before the first step of this session; {resume}"


@contextlib.contextmanager
def exits_when_signaled() -> Iterator[None]:
    """Let stop signals exit with 75 while a command starts, until it sets its own handler: nothing can be lost yet."""
    with handled_by(_exit):
        yield


def _exit(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, f"jaxdp: {before_the_first_step(signal.Signals(number).name)}\n".encode())
    finally:
        os._exit(EXIT_STOPPED)  # without the handlers of imports in progress


def in_daemon_thread(function: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Call a function in a daemon thread: the program may exit before the call returns."""
    future = Future[Result]()

    def work() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="prepare_0", daemon=True).start()
    return future


class _ArrivalTime:
    """When the last signal arrived. Its handler runs later: only after the main thread's current C call, such as a long step.

    Python writes a signal's number to the wake-up descriptor at once. Here the descriptor is a file in memory, so the time of
    its last change is the arrival time of the signal.
    """

    def __init__(self) -> None:
        self._file = -1

    def open(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # Linux only; without it, signals arrive when their handlers run
            self._file = os.memfd_create("signals")
            os.set_blocking(self._file, False)
            if (other := signal.set_wakeup_fd(self._file, warn_on_full_buffer=False)) != -1:  # an event loop needs its own
                signal.set_wakeup_fd(other)
                self.close()

    def close(self) -> None:
        if self._file != -1:
            if (other := signal.set_wakeup_fd(-1)) != self._file:
                signal.set_wakeup_fd(other)
            os.close(self._file)
            self._file = -1

    def __call__(self) -> float:
        return os.fstat(self._file).st_mtime if self._file != -1 else time.time()


class SignalHandler:
    """Context manager for the main thread: records the first of `STOP_SIGNALS`; a forced one ends the process at once.

    stop_reason: the signal's name, or the reason that the processes agreed on; None before. on_forced_signal: called on a
    forced signal (see `StopSignals`); by default, it ends the process with exit code 1.
    """

    def __init__(self, on_forced_signal: Callable[[], None] | None = None) -> None:
        self.stop_reason: str | None = None
        self.group: ProcessGroup = ProcessGroup()
        self.on_forced_signal = on_forced_signal or self._exit_at_once
        self._signals, self._arrival_time = StopSignals(), _ArrivalTime()
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> "SignalHandler":
        if threading.current_thread() is threading.main_thread():
            self._arrival_time.open()
            self._entered.callback(self._arrival_time.close)
            self._entered.enter_context(handled_by(self._on_signal))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._entered.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signals.is_forced(number, self._arrival_time()):
            failure = watchdog.current().record.failure
            if failure is not None and failure.code == EXIT_STOPPED:
                os._exit(EXIT_STOPPED)  # the other processes know; when one exits, its launcher signals the rest
            self.on_forced_signal()
        self.request_stop(signal.Signals(number).name)

    def _exit_at_once(self) -> None:
        """Exit with code 1, after trying for at most TELL_SECONDS to inform the other processes."""
        message = "jaxdp: stopped immediately by a second signal; the same command continues from the last checkpoint, if any\n"
        try:
            os.write(sys.stderr.fileno(), message.encode())
            if self.group.num_processes > 1:
                # In a signal handler, the main thread may hold locks of the group or of `threading`.
                informed = threading.Lock()
                informed.acquire()
                _thread.start_new_thread(self._tell_others, (informed,))
                informed.acquire(timeout=TELL_SECONDS)
        finally:
            os._exit(1)

    def _tell_others(self, informed: threading.Lock) -> None:
        self.group.fail(Failure("a second signal ended it at once"))
        informed.release()

    def request_stop(self, reason: str) -> None:
        """Ask the run to stop after its next step, as a signal does; a reason that is already set stays."""
        self.stop_reason = self.stop_reason or reason

    def raise_if_signaled(self) -> None:
        """Raise StopTraining if this process was asked to stop, whatever the other processes do."""
        if self.stop_reason:
            raise StopTraining(self.stop_reason)

    def raise_if_stop_agreed(self) -> None:
        """Raise StopTraining if the processes have agreed to stop. All learn it from the same completed step."""
        if reason := self.group.check_stop(self.stop_reason):
            self.request_stop(reason)
            raise StopTraining(self.stop_reason)

    @status.current().waiting(status.THREAD)
    def wait_for(self, future: Future[Result]) -> Result:
        """The result of a future. Raises StopTraining if the processes stop meanwhile; the future is not cancelled."""
        while not future.done():
            with contextlib.suppress(TimeoutError):  # also the future's own TimeoutError, which is raised below
                return future.result(CHECK_SECONDS)
            self.raise_if_stop_agreed()
        return future.result()

    def run_in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in another thread, and return its result. A stop does not wait for the call."""
        return self.wait_for(in_daemon_thread(jaxdp_jax_config()(function), *arguments))


class StopTraining(Exception):
    """Unwinds to the point that saves or reports."""

    exit_code = EXIT_STOPPED


class Stopped(OneLine, Exception):
    """The run was asked to stop and can be resumed. The message is one line with the last step and how to resume."""

    exit_code = EXIT_STOPPED


def stopped_before_training(reason: str | None, resume_action: str = "the same command") -> Stopped:
    """The exception for a run that was asked to stop before it had searched for a checkpoint."""
    return Stopped(before_the_first_step(reason, resume_action))


class ForcedStop(OneLine, KeyboardInterrupt):
    """A second signal arrived before the run had stopped."""
