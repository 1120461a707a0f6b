"""Watches this process from its first line on, and ends it when the run has failed.

The daemon thread `watchdog` counts time and records what the process does. In a run of one process, it also judges the process
by the rules of `jaxdp.distributed.verdict`. In a run of several processes, `jaxdp.distributed.follower` follows the other
processes.
"""

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

from jaxdp.distributed import stack_traces, status, verdict
from jaxdp.distributed.launchers import host_identity
from jaxdp.distributed.status import Record, Verdict
from jaxdp.distributed.stragglers import StepTimes
from jaxdp.distributed.verdict import Judge, Limits, Records
from jaxdp.errors import EXIT_FAILURE, first_line, print_safe, printable
from jaxdp.file_locks import this_process

if TYPE_CHECKING:  # the command line starts to watch before it imports the config
    from jaxdp.config import Guard
    from jaxdp.distributed.follower import Follower

LATE_SECONDS = 30.0  # and at least 15 usual steps without progress are reported; longer than a usual save or evaluation step
TICK_SECONDS = 1.0
# After this share of the time until a process is reported, its stacks are taken once a tick; never in a run with progress.
LOOK_AFTER = 0.25
EXIT_SECONDS = 5.0  # for other processes to read a verdict, clean up and print, before a process ends anyway
EXIT_ACCESSES, MAX_EXIT_SECONDS = 6, 30.0  # of a slow directory: a process reads the verdict and writes that it leaves
STACKS_SIGNAL = signal.SIGUSR2
MAX_ERRORS = 5  # in a row, of one thread
STDERR, MOST_CHARS = 2, 8192


def limits_from(guard: "Guard") -> Limits:
    seconds = guard.step_minutes and 60 * guard.step_minutes
    return Limits(LATE_SECONDS, seconds, guard.silence_seconds, 60 * guard.start_minutes)


class Watchdog:
    """Supervises this process. Time is counted in ticks of a thread: a suspended process has no ticks.

    before_exit: called before the process is ended. resume_hint: how the run can be resumed, for the last line. record: what
    the process does, see `update`. follower: follows the other processes; None for a single process. is_exiting: the process is
    already ending.
    """

    def __init__(self, limits: Limits) -> None:
        self.status, self.limits = status.current(), limits
        self.before_exit: Callable[[], None] = lambda: None
        self.resume_hint = ""
        self.follower: Follower | None = None
        self.own_step_times = StepTimes()
        host, machine = host_identity()
        self.record = Record("", 0, host, machine=f"{machine} {this_process().get('container')}", pid=os.getpid())
        self.is_watching = self.is_exiting = False
        self.stopped = threading.Event()
        self._changing, self._ending = threading.Lock(), threading.Lock()
        self._records, self._judge = Records(), Judge(limits, lambda record: False)
        self.thread = threading.Thread(target=self.repeat, args=(self._watch, self._sleep), name="watchdog", daemon=True)

    def start(self) -> None:
        if not self.thread.is_alive():
            self.thread.start()

    def set_limits(self, limits: Limits) -> None:
        self.limits = self._judge.limits = limits

    def stop(self) -> None:
        self.is_exiting = True
        self.stopped.set()

    def update(self, **changes: Any) -> None:
        """Change fields of the record. Any thread may do so."""
        with self._changing:
            self.record = replace(self.record, **changes)

    def repeat(self, action: Callable[[], None], wait: Callable[[], Any]) -> None:
        """Call `action` repeatedly. An error in it is printed and supervision continues; MAX_ERRORS in a row end the run."""
        errors = 0
        while not self.stopped.is_set():
            wait()
            if self.stopped.is_set():
                return
            try:
                action()
                errors = 0
            except Exception as error:  # in the code that watches: it must not end silently
                errors += 1
                reason = f"the thread {threading.current_thread().name} raised {type(error).__name__}: {first_line(error)}"
                place = stack_traces.place_of(error)
                stack_traces.print_lines([f"{reason}; {place}"])
                if errors == MAX_ERRORS and not self.is_exiting:
                    self.end(replace(verdict.blame(self.record, reason), place=place))

    def observe(self) -> Record:
        """Record what this process does."""
        beat = self.status.heartbeat()
        if verdict.save_is_late(beat, self.limits) and (
            beat.save_waits == status.SAVE or beat.idle_seconds < self.limits.late_seconds
        ):
            beat = replace(beat, waits=beat.save_waits)
        overdue = verdict.overdue(beat, self.limits, is_single=self.follower is None)
        reported = min(self.limits.late_seconds, self.limits.stuck_seconds or math.inf)
        is_idle = overdue or beat.idle_seconds >= LOOK_AFTER * reported
        stacks = stack_traces.capture(self.status.training_thread) if is_idle else []
        if beat.waits == status.DEVICES and any(stack.name.startswith(stack_traces.NATIVE) for stack in stacks):
            beat = replace(beat, waits=status.CALLBACK)
        names = stack_traces.AWAITED if beat.waits == status.THREAD else beat.waits or stack_traces.MAIN
        is_judged = self.follower is None or self.follower.session  # before that, processes are missing, not stuck
        self.update(
            count=self.record.count + 1,
            beat=beat,
            place=stack_traces.place_in(stacks, names),
            step_times=self.own_step_times,
            overdue=overdue if is_judged else "",
            stacks=tuple(stack_traces.format_stacks(stacks)) if overdue else (),
        )
        return self.record

    def print_report(self, lines: tuple[str, ...], number: int | None = None) -> None:
        """Print once what is late, and once when progress resumes. number: the number of the report that rank 0 printed."""
        last, before = self.record.report
        if (bool(lines) != bool(before)) if number is None else number != last:
            self.update(report=(last + 1 if number is None else number, lines))
            stack_traces.print_lines(lines or ("progress resumed",))

    def _sleep(self) -> None:
        """Wait for a tick, and report if this process has not run meanwhile."""
        began = time.monotonic()
        self.stopped.wait(self._tick_seconds)
        if (pause := time.monotonic() - began) > self.limits.silence_seconds:
            cause = "it was suspended, or native code held the GIL"
            stack_traces.print_lines([f"no thread of this process has run for {pause:.0f} s: {cause}"])

    @property
    def exit_seconds(self) -> float:
        """How long this process waits for other processes before it ends: longer if its last write shows a slow directory."""
        return min(EXIT_SECONDS + EXIT_ACCESSES * self.record.write_seconds, MAX_EXIT_SECONDS)

    @property
    def _tick_seconds(self) -> float:
        return min(TICK_SECONDS, self.limits.late_seconds / 4)

    def _watch(self) -> None:
        self.status.tick(self._tick_seconds)
        own, now = self.observe(), self.status.clock
        if self.follower is None:
            self._records.add(0, own, now)
            found = self._judge.verdict(self._records, now)
            self.print_report(tuple(verdict.report(self._records.alive, self.limits)))
        else:
            found = self.follower.check_board(own)
        if found is not None and not self.is_exiting:
            self.end(found)

    def dump_stacks_on_signal(self, file: IO[bytes] | int = STDERR) -> None:
        """Let STACKS_SIGNAL write the stacks of all threads, even while native code holds the GIL; a user's handler is kept.

        Only the signal does so, not faulthandler's timer. The timer would also run while the process is suspended, and then
        walk the frames of threads that continue. This has ended healthy runs by SIGSEGV.
        """
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # there is no stderr
            faulthandler.register(STACKS_SIGNAL, file=file, chain=signal.getsignal(STACKS_SIGNAL) != signal.SIG_DFL)

    def end(self, found: Verdict) -> None:
        """Print why the run ends, and end this process: operations of JAX in progress would never return."""
        self.is_exiting = True
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread ends this process
        code, is_own = found.code or EXIT_FAILURE, self.follower is None or found.rank == self.record.rank
        forced = threading.Timer(2 * self.exit_seconds, os._exit, [code])  # printing blocks if a full pipe is not read
        forced.daemon = True
        forced.start()
        with contextlib.suppress(Exception):
            self.before_exit()
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            if is_own and code == EXIT_FAILURE:
                print_safe("jaxdp: ending the run. Stack traces of all threads:", sys.stderr)
                faulthandler.dump_traceback(file=STDERR, all_threads=True)
            hint = f"; {self.resume_hint}" if self.resume_hint else ""
            print_safe(f"jaxdp: {printable(found, MOST_CHARS)}{hint}", sys.stderr)
        with contextlib.suppress(Exception):
            if self.follower is not None:
                self.follower.write_last()
        os._exit(code)


_current: Watchdog | None = None


def current() -> Watchdog:
    """The watchdog of this process, which may not watch yet."""
    global _current
    _current = _current or Watchdog(Limits())
    return _current


@contextmanager
def watch(limits: Limits | None = None) -> Iterator[Watchdog]:
    """Watch this process while the context lasts. A nested context sets new limits."""
    global _current
    watchdog = current()
    watchdog.set_limits(limits or Limits())
    if watchdog.is_watching:
        yield watchdog
        return
    watchdog.is_watching = True
    watchdog.dump_stacks_on_signal()
    watchdog.status.training_thread = threading.get_ident()
    watchdog.status.set_activity("start")
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.is_watching = False
        watchdog.status.set_activity(status.OUTSIDE)
        watchdog.status.step = None
        if watchdog.follower is None:  # a group of processes stays until the program ends
            faulthandler.unregister(STACKS_SIGNAL)
            watchdog.stop()
            _current = None
