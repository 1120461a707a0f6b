"""Follows the other processes of a run by their status files, and writes this process's own.

Rank 0 reads all files and judges them by the rules of `jaxdp.distributed.verdict`; other ranks read rank 0's verdict.
"""

import contextlib
import os
import secrets
import threading
import time
from dataclasses import replace

from jaxdp.distributed import stack_traces, verdict
from jaxdp.distributed.launchers import Cluster
from jaxdp.distributed.status import Board, Directory, Failure, Record, Verdict, read_record
from jaxdp.distributed.stragglers import StepTimes
from jaxdp.distributed.verdict import Judge, Records
from jaxdp.distributed.watchdog import EXIT_SECONDS, STACKS_SIGNAL, Watchdog
from jaxdp.errors import first_line
from jaxdp.file_locks import start_time

LEAVE_SECONDS = 0.5  # between the decision of a process to leave and its end
STACKS_SECONDS = 0.2  # for a process to write its stacks
REASON_SECONDS = 2.0  # for rank 0 to learn whose signal stops the run
NO_ANSWER = "no answer"
LOOKS = 2  # at an earlier file of this rank, one per period


class Follower:
    """Follows the processes of `cluster` on a board, beginning when it is created."""

    def __init__(self, watchdog: Watchdog, cluster: Cluster, board: Board) -> None:
        self.watchdog, self.cluster, self.board = watchdog, cluster, board
        self._records, self._judge = Records(), Judge(watchdog.limits, self._is_gone)
        self._strangers = Records()  # of processes that name a different coordinator
        self._verdict: Verdict | None = None
        self._decided, self._due = threading.Event(), threading.Event()
        self._began = self._answered = watchdog.status.clock
        self._written: Record | None = None
        self._foreign: set[int] = set()  # counts that another process of the same rank has written
        self._looks = 0
        self._can_write, self._problem, self._is_told = True, NO_ANSWER, False
        self._probed = ""  # the value of `Record.overdue` when `Record.cut_off` was last set
        if isinstance(board, Directory):
            watchdog.dump_stacks_on_signal(open(board.path / f"{cluster.rank}.stacks", "ab", buffering=0))
        watchdog.update(run=f"{cluster.address}:{cluster.port}", rank=cluster.rank)
        watchdog.follower = self
        self._due.set()
        arguments = (self._follow, lambda: self._due.wait(board.period_seconds))
        threading.Thread(target=watchdog.repeat, args=arguments, name="status-files", daemon=True).start()
        watchdog.start()

    @property
    def session(self) -> str:
        """A random word of rank 0, the same for all processes, once all have started; "" before."""
        rank0 = self.watchdog.record if self.cluster.rank == 0 else self._records.alive.get(0)
        return rank0.session if rank0 else ""

    @property
    def step_times(self) -> dict[int, StepTimes]:
        """The times of the steps of each process, on rank 0."""
        return {rank: record.step_times for rank, record in self._records.alive.items()}

    def set_stop_reason(self, reason: str) -> None:
        """Write why this process asks all to stop."""
        if self.watchdog.record.stop_reason != reason:
            self.watchdog.update(stop_reason=reason)
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
        """Report that this process cannot continue. Returns once the other ranks know, unless this process must `end` as well.

        If a collective failed here because another process failed, this process ends here with the other process's reason.
        """
        self.watchdog.is_exiting = True
        self.watchdog.update(failure=failure, cut_off=failure.collective and not self.cluster.reaches_rank0())
        self._due.set()
        seconds = self.watchdog.exit_seconds
        if failure.collective:
            seconds += self.watchdog.limits.silence_seconds + verdict.COLLECTIVE_SECONDS
        self._decided.wait(seconds)
        is_other = failure.collective and self._verdict is not None and self._verdict.rank != self.cluster.rank
        if self._verdict is not None and (end or is_other):
            self.watchdog.end(self._verdict)
        self.leave()

    def leave(self) -> None:
        """Write that this process leaves. Rank 0 waits for the other processes, because its end would end them."""
        self.watchdog.is_exiting = True
        self.watchdog.update(left=True)
        self._due.set()
        deadline = time.monotonic() + self.watchdog.exit_seconds
        while time.monotonic() < deadline and not (self._written and self._written.left and self._others_left()):
            time.sleep(0.02)
        _let_others_exit(self.cluster.rank)

    def check_board(self, own: Record) -> Verdict | None:
        """Called by the watchdog: the verdict if the board does not answer and this process makes no progress.

        Reports once that the board does not answer. Also finds out whether an overdue process is cut off from rank 0.
        """
        if own.overdue != self._probed and self.watchdog.record.failure is None:
            self._probed = own.overdue
            self.watchdog.update(cut_off=bool(own.overdue) and not self.cluster.reaches_rank0())
        seconds, limits = self.watchdog.status.clock - self._answered, self.watchdog.limits
        if seconds >= limits.late_seconds and not (self._is_told or self.watchdog.is_exiting):
            self._is_told = True
            problem = f"status files cannot be read and written for {seconds:.0f} s: {self._problem}"
            consequence = "training continues, and a failure of another process is not noticed until they can be"
            stack_traces.print_lines([f"{self.board.name}: {problem}; {consequence}"])
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
                self.watchdog.observe()
                self._write()
        except OSError as error:
            self._problem = error.strerror or first_line(error)
        if self._verdict is not None and not self.watchdog.is_exiting:
            self.watchdog.end(self._verdict)

    def _write(self) -> None:
        record, began = self.watchdog.record, time.monotonic()
        self._can_write = False
        self.board.write(f"{self.cluster.rank}.json", record.to_json())
        self._can_write = True
        self.watchdog.update(write_seconds=time.monotonic() - began)
        self._written = record

    def _refuse_duplicate(self, own: Record | None) -> None:
        """End if another process writes the file of this rank, in this run or in a different run in the same directory."""
        record = self.watchdog.record
        if own is None or own.left or own.process == record.process or self.session or self.watchdog.is_exiting:
            return
        self._foreign.add(own.count)
        if len(self._foreign) > 1:  # it keeps writing
            found = verdict.duplicate(record, own)
            if self._written is not None:
                self.watchdog.update(failure=Failure(found.reason, found.code))
            self._decide(found)

    def _read(self, own: Record | None) -> None:
        """Read and judge the files that concern this process. If this process cannot write and read its own file, the directory
        is at fault."""
        now, rank, written = self.watchdog.status.clock, self.cluster.rank, self._written
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
        if record is not None and record.run != self.watchdog.record.run:
            self._strangers.add(rank, record, now)
            record = None
        self._records.add(rank, record, now)

    def _decide(self, found: Verdict | None) -> None:
        if found is not None and self._verdict is None:
            self._verdict = found
            self._decided.set()

    def _judge_all(self) -> Verdict | None:
        """Rank 0: the verdict over all processes, which is also written for the other ranks."""
        watchdog, alive, processes = self.watchdog, self._records.alive, self.cluster.num_processes
        limits, now = watchdog.limits, watchdog.status.clock
        stranger = _other_coordinator(watchdog.record.run, self._strangers)
        lone = "" if stranger or len(alive) > 1 else verdict.lone(self.cluster.launcher)
        if not self.session and len(alive) == processes:
            watchdog.update(session=secrets.token_hex(8))
        self._judge.limits = limits
        found = self._verdict or self._judge.verdict(self._records, now)
        if self.session:
            watchdog.print_report(tuple(verdict.report(alive, limits)))
        elif now - self._began >= limits.start_seconds:
            found = found or verdict.missing(self._records, processes, limits.start_seconds)
            found = found and replace(found, reason=found.reason + stranger + lone)
        elif now - self._began >= limits.late_seconds:
            watchdog.print_report((verdict.waiting(alive, processes, limits) + stranger + lone,))
        if found is not None and watchdog.record.verdict is None:
            found = self._placed(found)
            watchdog.update(verdict=found)
        return found

    def _listen(self) -> Verdict | None:
        """Other ranks: rank 0's verdict, or that rank 0 itself is lost."""
        rank0, limits, now = self._records.alive.get(0), self.watchdog.limits, self.watchdog.status.clock
        if rank0 is None:
            if now - self._began >= limits.start_seconds:
                run, seconds = self.watchdog.record.run, limits.start_seconds
                reason = f"rank 0 did not start at {run} within {seconds:g} s, or does not share --workdir"
                stranger = _other_coordinator(run, self._strangers)
                return Verdict(reason + (stranger or verdict.lone(self.cluster.launcher)))
            return None
        number, lines = rank0.report
        if lines or number > 0:
            self.watchdog.print_report(lines, number)
        if rank0.verdict is None and not rank0.left:
            if self._is_gone(rank0):
                return verdict.blame(rank0, verdict.KILLED)
            limit = limits.silence_seconds + EXIT_SECONDS
            if self._records.silent_seconds(0, now) > limit:
                reason = f"sent no sign of life for {limit:g} s ({verdict.SILENT_CAUSES})"
                return self._placed(verdict.blame(rank0, reason))
        return rank0.verdict

    def _placed(self, found: Verdict) -> Verdict:
        """The verdict, with the place of a silent process of this host. A signal writes its stacks, because it may hold the
        GIL."""
        record, board = self._records.alive.get(-1 if found.rank is None else found.rank), self.board
        if record is None or not isinstance(board, Directory) or record.machine != self.watchdog.record.machine:
            return found
        if self._records.silent_seconds(record.rank, self.watchdog.status.clock) <= self.watchdog.limits.silence_seconds:
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
        return record.machine == self.watchdog.record.machine and not start_time(record.pid)

    def write_last(self) -> None:
        """Write that this process leaves. Rank 0 waits for ranks that can still print, because its end makes JAX abort them."""
        if self._written is None:
            return
        self.watchdog.update(left=True)
        deadline = time.monotonic() + self.watchdog.exit_seconds
        while True:
            self.watchdog.update(count=self.watchdog.record.count + 1)
            self._write()
            if time.monotonic() > deadline or self._others_left():
                break
            for rank in range(1, self.cluster.num_processes):
                self._add(rank, read_record(self.board, rank), self.watchdog.status.clock)
            time.sleep(0.05)
        _let_others_exit(self.cluster.rank)

    def _others_left(self) -> bool:
        """On rank 0, whether every other process has left, has ended or is silent; one that has not started may still come."""
        if self.cluster.rank != 0:
            return True
        limit, now = self.watchdog.limits.silence_seconds, self.watchdog.status.clock
        return len(self._records.alive) == self.cluster.num_processes and all(
            record.left or self._is_gone(record) or self._records.silent_seconds(rank, now) > limit
            for rank, record in self._records.alive.items()
            if rank != self.cluster.rank
        )


def _other_coordinator(run: str, strangers: Records) -> str:
    """A hint if processes do not start because they give the coordinator a different name, else ""."""
    for other in strangers.alive.values():
        names = f"rank {other.rank} on {other.host} names the coordinator {other.run}, and this process {run}"
        return f"; {names}: give all processes the same HOST:PORT"
    return ""


def _let_others_exit(rank: int) -> None:
    """On rank 0, wait for processes that are about to leave: JAX aborts every process that outlives rank 0."""
    if rank == 0:
        time.sleep(LEAVE_SECONDS)
