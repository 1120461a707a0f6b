"""Threads of each process that write its status file, follow those of the others, and end it when the run has failed."""

import contextlib
import faulthandler
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from jaxdp.distributed import stack_traces, status, verdict
from jaxdp.distributed.launchers import Cluster, host_identity
from jaxdp.distributed.status_files import Board, Directory, Failure, Record, Verdict, file_name, read_record
from jaxdp.distributed.stragglers import StepTimes
from jaxdp.distributed.verdict import Judge, Limits, Records
from jaxdp.errors import EXIT_FAILURE

TICK_SECONDS = 1.0
LEAVE_SECONDS = 0.5  # between the decision of a process to leave and its end
REASON_SECONDS = 2.0  # in which rank 0 learns whose signal stops the run
EXIT_SECONDS = 5.0  # for the others to read a verdict, to clean up and to print, before a process ends anyway
STACKS_BEFORE_SILENCE_SECONDS = 0.5  # a process whose GIL is held writes its stacks before the others call it silent


class Supervisor:
    """Supervises a process of a run, from its first line. Time is counted in ticks of a thread: none while it is suspended.

    before_exit, resume_hint: see `ProcessGroup`. failure: what this process has reported of itself.
    """

    def __init__(self, cluster: Cluster, board: Board, limits: Limits) -> None:
        self.cluster, self.board, self.limits, self.status = cluster, board, limits, status.current()
        self.before_exit: Callable[[], None] = lambda: None
        self.resume_hint = ""
        host, machine = host_identity()
        self._machine = f"{machine} {_pid_namespace()}"
        self._record = Record(
            run=f"{cluster.address}:{cluster.port}", rank=cluster.rank, host=host, machine=self._machine, pid=os.getpid()
        )
        self.own_step_times = StepTimes()
        self._changing = threading.Lock()
        self._clock = 0.0
        self._records, self._judge = Records(), Judge(limits, self._is_gone)
        self._verdict: Verdict | None = None
        self._decided, self._due, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self._exiting = False  # this process ends by itself
        self._dump: IO[bytes] | None = None
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("watchdog", self._tick), ("status-files", self._follow))
        ]

    @property
    def failed(self) -> bool:
        return self._record.failure is not None

    @property
    def session(self) -> str:
        """A random word of rank 0, the same for all processes, once all have started; "" before."""
        if self.cluster.rank == 0:
            return self._record.session
        rank0 = self._records.alive.get(0)
        return rank0.session if rank0 else ""

    def start(self) -> None:
        self.status.use_heartbeat_ticks()
        for thread in self._threads:
            thread.start()

    @property
    def step_times(self) -> dict[int, StepTimes]:
        """The times of the steps of each process, on rank 0."""
        return {rank: record.step_times for rank, record in self._records.alive.items()}

    def set_stop_reason(self, reason: str) -> None:
        """Write why this process asks all to stop."""
        if self._record.stop_reason != reason:
            self._update(stop_reason=reason)
            self._due.set()

    def stop_reason_of_others(self) -> str:
        """Why the run stops, if another process has asked for it: on rank 0 with its name, as soon as that is read."""
        deadline = time.monotonic() + REASON_SECONDS * (self.cluster.rank == 0)
        while True:
            asked = [record for record in self._records.alive.values() if record.stop_reason]
            if asked:
                return f"{asked[0].stop_reason} to rank {asked[0].rank} on {asked[0].host}"
            if time.monotonic() >= deadline:
                return "a signal to another process"
            time.sleep(0.05)

    def _update(self, **changes: Any) -> None:
        with self._changing:
            self._record = replace(self._record, **changes)

    def fail(self, failure: Failure) -> None:
        """Report that this process cannot continue. Returns once the others know.

        If a collective has failed here because another process has, this one is ended here, with the reason of the other.
        """
        self._exiting = True
        self._update(failure=failure)
        self._due.set()
        seconds = EXIT_SECONDS
        if failure.collective:
            seconds += self.limits.silence_seconds + verdict.COLLECTIVE_SECONDS
        self._decided.wait(seconds)
        if failure.collective and self._verdict is not None and self._verdict.rank != self.cluster.rank:
            self._end(self._verdict)
        self._leave()

    def end_as_decided(self) -> None:
        """End this process with the verdict on its own failure, whatever its threads do."""
        if self._verdict is not None:
            self._end(self._verdict)

    def close(self) -> None:
        """Stop once this process needs no other any more."""
        self._exiting = True
        self._leave()
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _leave(self) -> None:
        """Write that this process leaves; rank 0, whose end ends the others, waits for them."""
        self._update(left=True)
        self._due.set()
        deadline = time.monotonic() + EXIT_SECONDS
        while time.monotonic() < deadline and not self._may_leave():
            time.sleep(0.02)
        self._let_others_exit()

    def _may_leave(self) -> bool:
        if self._due.is_set():  # not yet written
            return False
        return self.cluster.rank != 0 or self._others_left()

    # The thread `watchdog`: counts time, and has the stacks written if this process no longer runs.

    def _tick(self) -> None:
        while not self._stopped.is_set():
            self._arm_dump()
            began = time.monotonic()
            time.sleep(TICK_SECONDS)
            if (pause := time.monotonic() - began) > self.limits.silence_seconds:
                cause = "it was suspended, or native code held the GIL"
                stack_traces.print_lines([f"no thread of this process has run for {pause:.0f} s: {cause}"])
            self._clock += TICK_SECONDS
            self.status.tick(TICK_SECONDS)

    def _arm_dump(self) -> None:
        """Write the stacks of all threads unless this is called again: faulthandler does not need the GIL for that."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            if self._dump is None and isinstance(self.board, Directory):
                self.board.path.mkdir(parents=True, exist_ok=True)
                self._dump = open(dump_path(self.board, self.cluster.rank), "ab", buffering=0)
            if self._dump is not None and os.fstat(self._dump.fileno()).st_size:
                self._dump.truncate(0)  # of a time at which this process was suspended
            seconds = self.limits.silence_seconds - STACKS_BEFORE_SILENCE_SECONDS
            faulthandler.dump_traceback_later(max(seconds, TICK_SECONDS + 0.5), file=self._dump or sys.stderr)

    # The thread `status-files`: writes, reads, and ends this process.

    def _follow(self) -> None:
        while not self._stopped.is_set():
            self._due.clear()
            self._update_record()
            with contextlib.suppress(OSError):
                self._write()
                self._read()
            if self._verdict is not None and not self._exiting:
                self._end(self._verdict)
            self._due.wait(self.board.period_seconds)

    def _update_record(self) -> None:
        beat = self.status.heartbeat()
        overdue, seconds = verdict.overdue(beat, self.limits)
        stacks = stack_traces.capture(self.status.training_thread)
        place = stack_traces.innermost_frames(stacks)
        self._update(
            count=self._record.count + 1,
            activity=beat.activity,
            step=beat.step,
            detail=beat.detail,
            background_save=beat.background_save,
            position=beat.position,
            place=place,
            is_working=any(map(stack_traces.is_working, stacks)),
            idle_seconds=seconds,
            step_times=self.own_step_times,
            overdue=overdue if self.session else "",  # before that, processes are missing, not stuck
            stacks=tuple(stack_traces.format_stacks(stacks)) if overdue else (),
        )

    def _write(self) -> None:
        began = time.monotonic()
        self.board.write(file_name(self.cluster.rank), self._record.to_json())
        self._update(write_seconds=time.monotonic() - began)

    def _read(self) -> None:
        """Read the files that concern this process, unless it cannot read its own: then the directory is at fault."""
        ranks = range(self.cluster.num_processes) if self.cluster.rank == 0 else (self.cluster.rank, 0)
        read = {rank: read_record(self.board, rank, self._record.run) for rank in ranks}
        own = read[self.cluster.rank]
        if own is None or own.count != self._record.count:
            return
        for rank, record in read.items():
            self._records.add(rank, record, self._clock)
        decided = self._judge_all() if self.cluster.rank == 0 else self._listen()
        if decided is not None and self._verdict is None:
            self._verdict = decided
            self._decided.set()

    def _judge_all(self) -> Verdict | None:
        """Rank 0: the verdict over all processes, which is also written for the others."""
        alive = self._records.alive
        if not self._record.session and len(alive) == self.cluster.num_processes:
            self._update(session=secrets.token_hex(8))
            self._due.set()
        found = self._verdict or self._judge.verdict(self._records, self._clock)
        if found is None and not self.session and self._clock >= self.limits.start_seconds:
            found = verdict.missing(self._records, self.cluster.num_processes, self.limits.start_seconds)
        number, lines = self._record.report
        new = tuple(verdict.report(alive, self.limits)) if self.session else ()
        if bool(new) != bool(lines):  # reported once, and once more when it is over
            self._print_report(number + 1, new)
        if found is not None and self._record.verdict is None:
            found = replace(found, place=self._place_of_silent(found) or found.place)
            self._update(verdict=found)
            self._due.set()
        return found

    def _listen(self) -> Verdict | None:
        """Other ranks: rank 0's verdict, or that rank 0 itself is lost."""
        rank0 = self._records.alive.get(0)
        if rank0 is None:
            if not self.session and self._clock >= self.limits.start_seconds:
                return Verdict(f"rank 0 did not start at {self._record.run} within {self.limits.start_seconds:g} s")
            return None
        number, lines = rank0.report
        if number != self._record.report[0]:
            self._print_report(number, lines)
        if rank0.verdict is None and not rank0.left:
            if self._is_gone(rank0):
                return verdict.blame(rank0, verdict.KILLED)
            if self._records.silent(self.limits.silence_seconds + EXIT_SECONDS, self._clock):
                reason = f"sent no sign of life for {self.limits.silence_seconds + EXIT_SECONDS:g} s ({verdict.SILENT_CAUSES})"
                found = verdict.blame(rank0, reason)
                return replace(found, place=self._place_of_silent(found) or found.place)
        return rank0.verdict

    def _print_report(self, number: int, lines: tuple[str, ...]) -> None:
        self._update(report=(number, lines))
        stack_traces.print_lines(lines or ("progress resumed",))

    def _is_gone(self, record: Record) -> bool:
        """Whether a process of this host has ended."""
        return record.machine == self._machine and not _is_running(record.pid)

    def _place_of_silent(self, found: Verdict) -> str:
        """The place that a silent process has written with faulthandler, if it has."""
        if found.rank is None or not isinstance(self.board, Directory):
            return ""
        with contextlib.suppress(OSError):
            return stack_traces.place_of_dump(dump_path(self.board, found.rank).read_text(errors="replace"))
        return ""

    def _end(self, found: Verdict) -> None:
        """Print why the run ends, and end this process: operations of JAX in progress would never return."""
        self._exiting = True
        code = found.code if found.code else EXIT_FAILURE
        forced = threading.Timer(2 * EXIT_SECONDS, os._exit, [code])  # printing blocks if nobody reads a full pipe
        forced.daemon = True
        forced.start()
        with contextlib.suppress(Exception):
            self.before_exit()
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            if found.rank == self.cluster.rank:
                print("jaxdp: stack traces of all threads:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            hint = f"; {self.resume_hint}" if self.resume_hint else ""
            print(f"jaxdp: {found}{hint}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            self._write_until_others_left()
        os._exit(code)

    def _write_until_others_left(self) -> None:
        """Write that this process leaves. Rank 0, whose end makes JAX abort the others, waits for those that can print."""
        self._update(left=True)
        deadline = time.monotonic() + EXIT_SECONDS
        while True:
            self._update(count=self._record.count + 1)
            self._write()
            if self.cluster.rank != 0 or time.monotonic() > deadline or self._others_left():
                break
            for rank in range(1, self.cluster.num_processes):
                self._records.add(rank, read_record(self.board, rank, self._record.run), self._clock)
            time.sleep(0.05)
        self._let_others_exit()

    def _let_others_exit(self) -> None:
        """On rank 0, wait for processes that have said that they leave: JAX aborts every process that rank 0 leaves behind."""
        if self.cluster.rank == 0:
            time.sleep(LEAVE_SECONDS)

    def _others_left(self) -> bool:
        """Whether every other process has left, has ended or is silent; a process that has not started yet may still come."""
        limit = self.limits.silence_seconds
        return len(self._records.alive) == self.cluster.num_processes and all(
            record.left or self._is_gone(record) or self._records.silent_seconds(rank, self._clock) > limit
            for rank, record in self._records.alive.items()
            if rank != self.cluster.rank
        )


def dump_path(board: Directory, rank: int) -> Path:
    return board.path / f"{rank}.stacks"


def _is_running(pid: int) -> bool:
    """Whether a process of this host runs: False too if it has ended and its parent has not noticed yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
