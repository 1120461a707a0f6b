"""Watches this process from its first line on, and ends it when the run has failed. Also follows the run's other processes.

The daemon thread `watchdog` counts time and notes what the process does. In a run of one process, it also judges the process by
the rules of `jaxdp.distributed.verdict`. In a run of several processes, the thread `status-files` writes this process's status
file and reads other files. Rank 0 reads all files and judges them by the same rules; other ranks read rank 0's verdict.
"""

import contextlib
import faulthandler
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jaxdp.distributed import stack_traces, status, verdict
from jaxdp.distributed.launchers import Cluster, host_identity
from jaxdp.distributed.status import Board, Directory, Failure, Record, Verdict, read_record
from jaxdp.distributed.stragglers import StepTimes
from jaxdp.distributed.verdict import Judge, Limits, Records
from jaxdp.errors import EXIT_FAILURE, first_line, print_safe, printable

if TYPE_CHECKING:  # the command line starts to watch before it imports the config
    from jaxdp.config import Guard

LATE_SECONDS = 30.0  # and at least 15 usual steps without progress are reported; longer than a usual save or evaluation step
TICK_SECONDS = 1.0
# After this share of the time until a process is reported, its stacks are taken once a tick; never in a run with progress.
LOOK_AFTER = 0.25
EXIT_SECONDS = 5.0  # for other processes to read a verdict, clean up and print, before a process ends anyway
EXIT_ACCESSES, MAX_EXIT_SECONDS = 6, 30.0  # of a slow directory: a process reads the verdict and writes that it leaves
STACKS_SIGNAL = signal.SIGUSR2
MAX_ERRORS = 5  # in a row, of one thread
STDERR, MOST_CHARS = 2, 8192
LEAVE_SECONDS = 0.5  # between the decision of a process to leave and its end
STACKS_SECONDS = 0.2  # for a process to write its stacks
REASON_SECONDS = 2.0  # for rank 0 to learn whose signal stops the run
NO_ANSWER = "no answer"
LOOKS = 2  # at an earlier file of this rank, one per period


def limits_from(guard: "Guard") -> Limits:
    seconds = guard.step_minutes and 60 * guard.step_minutes
    return Limits(LATE_SECONDS, seconds, guard.silence_seconds, 60 * guard.start_minutes)


class Supervisor:
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
        self.record = Record("", 0, host, machine=f"{machine} {_pid_namespace()}", pid=os.getpid())
        self.is_watching = self.is_exiting = False
        self.stopped = threading.Event()
        self._changing, self._ending = threading.Lock(), threading.Lock()
        self._records, self._judge = Records(), Judge(limits, lambda record: False)
        self.watchdog = threading.Thread(target=self.repeat, args=(self._watch, self._sleep), name="watchdog", daemon=True)

    def start(self) -> None:
        if not self.watchdog.is_alive():
            self.watchdog.start()

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
        """Note what this process does."""
        beat, is_single = self.status.heartbeat(), self.follower is None
        overdue = verdict.overdue(beat, self.limits, is_single=is_single)
        reported = min(self.limits.late_seconds, self.limits.stuck_seconds or math.inf)
        is_idle = overdue or beat.idle_seconds >= LOOK_AFTER * reported
        stacks = stack_traces.capture(self.status.training_thread) if is_idle else []
        work = stack_traces.work(stacks)
        overdue = verdict.overdue(beat, self.limits, is_single=is_single, work=work)
        is_judged = self.follower is None or self.follower.session  # before that, processes are missing, not stuck
        self.update(
            count=self.record.count + 1,
            beat=beat,
            place=stack_traces.place_of_work(stacks),
            work=work,
            at_devices=stack_traces.at_devices(stacks),
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


class Follower:
    """Follows the processes of `cluster` on a board, beginning when it is created."""

    def __init__(self, supervisor: Supervisor, cluster: Cluster, board: Board) -> None:
        self.supervisor, self.cluster, self.board = supervisor, cluster, board
        self._records, self._judge = Records(), Judge(supervisor.limits, self._is_gone)
        self._strangers = Records()  # of processes that name a different coordinator
        self._verdict: Verdict | None = None
        self._decided, self._due = threading.Event(), threading.Event()
        self._began = self._answered = supervisor.status.clock
        self._written: Record | None = None
        self._foreign: set[int] = set()  # counts that another process of the same rank has written
        self._looks = 0
        self._can_write, self._problem, self._is_told = True, NO_ANSWER, False
        self._probed = ""  # the value of `Record.overdue` when `Record.cut_off` was last set
        if isinstance(board, Directory):
            supervisor.dump_stacks_on_signal(open(board.path / f"{cluster.rank}.stacks", "ab", buffering=0))
        supervisor.update(run=f"{cluster.address}:{cluster.port}", rank=cluster.rank)
        supervisor.follower = self
        self._due.set()
        arguments = (self._follow, lambda: self._due.wait(board.period_seconds))
        threading.Thread(target=supervisor.repeat, args=arguments, name="status-files", daemon=True).start()
        supervisor.start()

    @property
    def session(self) -> str:
        """A random word of rank 0, the same for all processes, once all have started; "" before."""
        rank0 = self.supervisor.record if self.cluster.rank == 0 else self._records.alive.get(0)
        return rank0.session if rank0 else ""

    @property
    def step_times(self) -> dict[int, StepTimes]:
        """The times of the steps of each process, on rank 0."""
        return {rank: record.step_times for rank, record in self._records.alive.items()}

    def set_stop_reason(self, reason: str) -> None:
        """Write why this process asks all to stop."""
        if self.supervisor.record.stop_reason != reason:
            self.supervisor.update(stop_reason=reason)
            self._due.set()

    def stop_reason_of_others(self) -> str:
        """Why the run stops, if another process asked for it. Rank 0 waits up to REASON_SECONDS to read which one and why."""
        deadline = time.monotonic() + REASON_SECONDS * (self.cluster.rank == 0)
        while True:
            asked = [record for record in self._records.alive.values() if record.stop_reason]
            if asked:
                return f"{asked[0].stop_reason} ({verdict.names(asked[:1])})"
            if time.monotonic() >= deadline:
                return "a signal to another process"
            time.sleep(0.05)

    def fail(self, failure: Failure, *, end: bool = False) -> None:
        """Report that this process cannot continue. Returns once the other ranks know, unless this process is to `end` as well.

        If a collective failed here because another process failed, this process ends here with the other process's reason.
        """
        self.supervisor.is_exiting = True
        self.supervisor.update(failure=failure, cut_off=failure.collective and not self.cluster.reaches_rank0())
        self._due.set()
        seconds = self.supervisor.exit_seconds
        if failure.collective:
            seconds += self.supervisor.limits.silence_seconds + verdict.COLLECTIVE_SECONDS
        self._decided.wait(seconds)
        is_other = failure.collective and self._verdict is not None and self._verdict.rank != self.cluster.rank
        if self._verdict is not None and (end or is_other):
            self.supervisor.end(self._verdict)
        self.leave()

    def leave(self) -> None:
        """Write that this process leaves. Rank 0 waits for the other processes, because its end would end them."""
        self.supervisor.is_exiting = True
        self.supervisor.update(left=True)
        self._due.set()
        deadline = time.monotonic() + self.supervisor.exit_seconds
        while time.monotonic() < deadline and not (self._written and self._written.left and self._others_left()):
            time.sleep(0.02)
        _let_others_exit(self.cluster.rank)

    def check_board(self, own: Record) -> Verdict | None:
        """Called by the watchdog: the verdict if the board does not answer and this process makes no progress.

        Reports once that the board does not answer. Also finds out whether an overdue process is cut off from rank 0.
        """
        if own.overdue != self._probed and self.supervisor.record.failure is None:
            self._probed = own.overdue
            self.supervisor.update(cut_off=bool(own.overdue) and not self.cluster.reaches_rank0())
        seconds, limits = self.supervisor.status.clock - self._answered, self.supervisor.limits
        if seconds >= limits.late_seconds and not (self._is_told or self.supervisor.is_exiting):
            self._is_told = True
            problem = f"status files cannot be read and written for {seconds:.0f} s: {self._problem}"
            goes_on = "training goes on, and a failure of another process is not noticed until they can be"
            stack_traces.print_lines([f"{self.board.name}: {problem}; {goes_on}"])
        return verdict.cut_off(own, seconds, limits, board=self.board.name)

    def _follow(self) -> None:
        self._due.clear()
        try:
            own = read_record(self.board, self.cluster.rank)
            self._refuse_duplicate(own)
            self._looks += 1
            # The file of an earlier process of this rank does not change; the file of a running one does.
            is_free = own is None or own.left or self._is_gone(own) or self._looks > LOOKS
            if self._written is not None or (self._verdict is None and is_free):
                self._read(own)
                self.supervisor.observe()
                self._write()
        except OSError as error:
            self._problem = error.strerror or first_line(error)
        if self._verdict is not None and not self.supervisor.is_exiting:
            self.supervisor.end(self._verdict)

    def _write(self) -> None:
        record, began = self.supervisor.record, time.monotonic()
        self._can_write = False
        self.board.write(f"{self.cluster.rank}.json", record.to_json())
        self._can_write = True
        self.supervisor.update(write_seconds=time.monotonic() - began)
        self._written = record

    def _refuse_duplicate(self, own: Record | None) -> None:
        """End if another process writes the file of this rank, in this run or in a different run in the same directory."""
        record = self.supervisor.record
        if own is None or own.left or own.process == record.process or self.session or self.supervisor.is_exiting:
            return
        self._foreign.add(own.count)
        if len(self._foreign) > 1:  # it keeps writing
            found = verdict.duplicate(record, own)
            if self._written is not None:
                self.supervisor.update(failure=Failure(found.reason, found.code))
            self._decide(found)

    def _read(self, own: Record | None) -> None:
        """Read and judge the files that concern this process. If its own is not written and read, the directory is at fault."""
        now, rank, written = self.supervisor.status.clock, self.cluster.rank, self._written
        others = range(1, self.cluster.num_processes) if rank == 0 else (0,)
        read = {each: read_record(self.board, each) for each in others}
        is_own = own is not None and written is not None and (own.process, own.count) == (written.process, written.count)
        if own is None or not is_own or not self._can_write:
            return
        if self._problem != NO_ANSWER:
            self._records.add_outage(now - self._answered)
        self._answered, self._problem = now, NO_ANSWER
        for each, record in (read | {rank: own}).items():
            self._add(each, record, now)
        self._decide(self._judge_all() if rank == 0 else self._listen())

    def _add(self, rank: int, record: Record | None, now: float) -> None:
        """Add the record that was read for a process; a record of a different run does not show that the process is alive."""
        if record is not None and record.run != self.supervisor.record.run:
            self._strangers.add(rank, record, now)
            record = None
        self._records.add(rank, record, now)

    def _decide(self, found: Verdict | None) -> None:
        if found is not None and self._verdict is None:
            self._verdict = found
            self._decided.set()

    def _judge_all(self) -> Verdict | None:
        """Rank 0: the verdict over all processes, which is also written for the other ranks."""
        supervisor, alive, processes = self.supervisor, self._records.alive, self.cluster.num_processes
        limits, now = supervisor.limits, supervisor.status.clock
        stranger = _other_coordinator(supervisor.record.run, self._strangers)
        lone = "" if stranger or len(alive) > 1 else verdict.lone(self.cluster.launcher)
        if not self.session and len(alive) == processes:
            supervisor.update(session=secrets.token_hex(8))
        self._judge.limits = limits
        found = self._verdict or self._judge.verdict(self._records, now)
        if self.session:
            supervisor.print_report(tuple(verdict.report(alive, limits)))
        elif now - self._began >= limits.start_seconds:
            found = found or verdict.missing(self._records, processes, limits.start_seconds)
            found = found and replace(found, reason=found.reason + stranger + lone)
        elif now - self._began >= limits.late_seconds:
            supervisor.print_report((verdict.waiting(alive, processes, limits) + stranger + lone,))
        if found is not None and supervisor.record.verdict is None:
            found = self._placed(found)
            supervisor.update(verdict=found)
        return found

    def _listen(self) -> Verdict | None:
        """Other ranks: rank 0's verdict, or that rank 0 itself is lost."""
        rank0, limits, now = self._records.alive.get(0), self.supervisor.limits, self.supervisor.status.clock
        if rank0 is None:
            if now - self._began >= limits.start_seconds:
                run, seconds = self.supervisor.record.run, limits.start_seconds
                reason = f"rank 0 did not start at {run} within {seconds:g} s, or does not share --workdir"
                stranger = _other_coordinator(run, self._strangers)
                return Verdict(reason + (stranger or verdict.lone(self.cluster.launcher)))
            return None
        number, lines = rank0.report
        if lines or number > 0:
            self.supervisor.print_report(lines, number)
        if rank0.verdict is None and not rank0.left:
            if self._is_gone(rank0):
                return verdict.blame(rank0, verdict.KILLED)
            limit = limits.silence_seconds + EXIT_SECONDS
            if self._records.silent_seconds(0, now) > limit:
                reason = f"sent no sign of life for {limit:g} s ({verdict.SILENT_CAUSES})"
                return self._placed(verdict.blame(rank0, reason))
        return rank0.verdict

    def _placed(self, found: Verdict) -> Verdict:
        """The verdict, with the place of a silent process of this host. It may hold its GIL, so a signal writes its stacks."""
        record, board = self._records.alive.get(-1 if found.rank is None else found.rank), self.board
        if record is None or not isinstance(board, Directory) or record.machine != self.supervisor.record.machine:
            return found
        if self._records.silent_seconds(record.rank, self.supervisor.status.clock) <= self.supervisor.limits.silence_seconds:
            return found
        path = board.path / f"{record.rank}.stacks"
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
            os.kill(record.pid, STACKS_SIGNAL)
            time.sleep(STACKS_SECONDS)
            return replace(found, place=stack_traces.place_of_dump(path.read_text(errors="replace")) or found.place)
        return found

    def _is_gone(self, record: Record) -> bool:
        """Whether a process of this host has ended."""
        return record.machine == self.supervisor.record.machine and not _is_running(record.pid)

    def write_last(self) -> None:
        """Write that this process leaves. Rank 0 waits for ranks that can still print, because its end makes JAX abort them."""
        if self._written is None:
            return
        self.supervisor.update(left=True)
        deadline = time.monotonic() + self.supervisor.exit_seconds
        while True:
            self.supervisor.update(count=self.supervisor.record.count + 1)
            self._write()
            if time.monotonic() > deadline or self._others_left():
                break
            for rank in range(1, self.cluster.num_processes):
                self._add(rank, read_record(self.board, rank), self.supervisor.status.clock)
            time.sleep(0.05)
        _let_others_exit(self.cluster.rank)

    def _others_left(self) -> bool:
        """On rank 0, whether every other process has left, has ended or is silent; one that has not started may still come."""
        if self.cluster.rank != 0:
            return True
        limit, now = self.supervisor.limits.silence_seconds, self.supervisor.status.clock
        return len(self._records.alive) == self.cluster.num_processes and all(
            record.left or self._is_gone(record) or self._records.silent_seconds(rank, now) > limit
            for rank, record in self._records.alive.items()
            if rank != self.cluster.rank
        )


def _other_coordinator(run: str, strangers: Records) -> str:
    """What to add about processes that do not start because they give the coordinator a different name, else ""."""
    for other in strangers.alive.values():
        names = f"rank {other.rank} on {other.host} names the coordinator {other.run}, and this process {run}"
        return f"; {names}: give all processes the same HOST:PORT"
    return ""


def _let_others_exit(rank: int) -> None:
    """On rank 0, wait for processes that are about to leave: JAX aborts every process that outlives rank 0."""
    if rank == 0:
        time.sleep(LEAVE_SECONDS)


_current: Supervisor | None = None


def current() -> Supervisor:
    """The supervisor of this process, which may not watch yet."""
    global _current
    _current = _current or Supervisor(Limits())
    return _current


@contextmanager
def watch(limits: Limits | None = None) -> Iterator[Supervisor]:
    """Watch this process while the context lasts. A nested context sets new limits."""
    global _current
    supervisor = current()
    supervisor.set_limits(limits or Limits())
    if supervisor.is_watching:
        yield supervisor
        return
    supervisor.is_watching = True
    supervisor.dump_stacks_on_signal()
    supervisor.status.training_thread = threading.get_ident()
    supervisor.status.set_activity("start")
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.is_watching = False
        supervisor.status.set_activity(status.OUTSIDE)
        supervisor.status.step = None
        if supervisor.follower is None:  # a group of processes stays until the program ends
            faulthandler.unregister(STACKS_SIGNAL)
            supervisor.stop()
            _current = None


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_running(pid: int) -> bool:
    """Whether a process of this host runs; a zombie, which has ended but was not reaped, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
