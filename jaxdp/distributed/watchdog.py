"""Watchdog of a run from its first line: reports this process when it makes no progress, and ends it.

In a run of several processes, rank 0 compares their heartbeats (`jaxdp.distributed.hang_monitor`) once all have joined. Until
then, and in a run of one process, each process watches itself.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxdp.distributed import stack_traces, status
from jaxdp.distributed.hang_monitor import HangMonitor
from jaxdp.distributed.hang_rules import HangLimits
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.distributed.verdict import Limits
from jaxdp.errors import EXIT_FAILURE

if TYPE_CHECKING:  # the command line starts the watchdog before it imports the config
    from jaxdp.config import Guard

LATE_SECONDS = 30.0  # and 15 usual steps without progress are reported; longer than a usual save or evaluation step
TICK_SECONDS = 1.0
EXIT_SECONDS = 5.0  # to print the reason of the end, should nobody read stderr
STDERR = 2


def limits_from(guard: "Guard") -> HangLimits:
    return HangLimits(LATE_SECONDS, guard.step_minutes and 60 * guard.step_minutes)


def process_limits(guard: "Guard") -> Limits:
    """The limits of a process of a run of several."""
    seconds = guard.step_minutes and 60 * guard.step_minutes
    return Limits(LATE_SECONDS, seconds, guard.silence_seconds, 60 * guard.start_minutes)


_timer_seconds = float("inf")


def print_stacks_in(seconds: float) -> None:
    """Print the stack traces of all threads after `seconds`, unless this is called again before then.

    faulthandler prints them from a thread that does not need the GIL, also while native code holds it. Nothing ends here,
    because the timer keeps running while a process is suspended.
    """
    global _timer_seconds
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # there is no stderr
        faulthandler.dump_traceback_later(seconds, file=STDERR)
        _timer_seconds = seconds


def cancel_timer() -> None:
    """Cancel `print_stacks_in`."""
    faulthandler.cancel_dump_traceback_later()


class Watchdog:
    """A thread that ticks the clock of this process's status, and reports the process when it makes no progress."""

    def __init__(self, process: status.ProcessStatus, limits: HangLimits) -> None:
        self.process, self.limits = process, limits
        self.group: ProcessGroup | None = None
        self.monitor = self._new_monitor()
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def attach(self, group: ProcessGroup) -> None:
        """Set the process group whose `before_exit` and `resume_hint` are used when this process is ended."""
        self.group = group

    def set_limits(self, limits: HangLimits) -> None:
        """Set the limits and restart monitoring."""
        self.limits = limits
        self._start_timer()
        self.monitor = self._new_monitor()

    def start(self) -> None:
        self._start_timer()
        self.thread.start()

    def _start_timer(self) -> None:
        """Print the stacks also if native code holds the GIL before the first tick."""
        if self.process.membership != status.JOINED:
            print_stacks_in(self.limits.stuck_seconds + TICK_SECONDS)

    def _new_monitor(self) -> HangMonitor:
        return HangMonitor(
            self.limits, {0: "this host"}, request_stacks=self._capture, report=stack_traces.print_lines, end_run=self._end
        )

    def stop(self) -> None:
        self._stopped.set()
        self.thread.join(TICK_SECONDS)

    def _capture(self, rank: int) -> None:
        self.monitor.add_stacks(rank, stack_traces.capture(self.process.training_thread))

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(tick := min(TICK_SECONDS, self.limits.stuck_seconds / 4)):
            now, pause = time.monotonic(), time.monotonic() - last
            last = now
            if pause > _timer_seconds:
                cause = "it was suspended, or native code held the GIL; stack traces printed above are from that time"
                stack_traces.print_lines([f"no thread of this process has run for {pause:.0f} s: {cause}"])
            if self.process.membership == status.JOINED:
                continue
            print_stacks_in(self.limits.stuck_seconds + tick)
            if not self.process.ticked_by_heartbeat:
                self.process.tick(tick)
            self.monitor.update({0: self.process.heartbeat()})

    def _end(self, rank: int | None, reason: str) -> None:
        if self.process.membership == status.JOINING:  # `guard.start_minutes` limits how long this takes
            return
        forced = threading.Timer(EXIT_SECONDS, os._exit, [EXIT_FAILURE])
        forced.daemon = True
        forced.start()
        with contextlib.suppress(Exception):
            if self.group:
                self.group.before_exit()
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            print("jaxdp: ending the run. Stack traces of all threads:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
            hint = f"; {self.group.resume_hint}" if self.group and self.group.resume_hint else ""
            print(f"jaxdp: failed {self.process.location()}: {reason}{hint}", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILURE)


_active: Watchdog | None = None


@contextmanager
def watch(limits: HangLimits | None = None) -> Iterator[Watchdog]:
    """Watch this process while the context lasts. A nested context sets new limits of the same watchdog."""
    global _active
    limits = limits or HangLimits()
    if _active is not None:
        _active.set_limits(limits)
        yield _active
        return
    process = status.current()
    process.watch_thread(threading.get_ident())
    _active = Watchdog(process, limits)
    process.set_activity("start")
    _active.start()
    try:
        yield _active
    finally:
        _active.stop()
        if process.membership != status.JOINED:
            cancel_timer()
        _active = None
        process.leave_run()
