"""Rules that decide which process failed or is stuck, from all processes' records and the reader's clock. No threads or files.

A run of one process is judged by the same rules, from its own record.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from jaxdp.distributed.launchers import ALONE
from jaxdp.distributed.status import DEVICES, ITERATION_OF_ACTIVITY, OUTSIDE, Heartbeat, Record, Verdict
from jaxdp.errors import EXIT_CONFIG, plural

LATE, STUCK = "late", "stuck"
SLOW_FACTOR = 15.0  # times the usual duration of a step: below it a step is slow, not stuck
FIRST_STEPS_FACTOR = 4.0  # times the longest step, while too few durations are known
UNKNOWN_FACTOR = 1.75  # times `late_seconds`, in a compilation and while no duration is known
FIRST_STEP_FACTOR = 4.0  # times `late_seconds`, for the first step of a single process, which waits for no other process
COMPILATION_SECONDS = 1800.0  # a compilation is one call and may take at least this long
CUT_OFF_SECONDS = 600.0  # without progress and without an answer of the directory, before a process ends
MIN_READS = 3  # of an unchanged file, before a process counts as silent: the directory may only be slow
SLOW_WRITES = 3.0  # times the last write's duration: how much longer than the limit a process may be silent
COLLECTIVE_SECONDS = 5.0  # beyond the limit for a silent process: how long to wait for the cause of a failed collective
CUT_OFF_LOOK_SECONDS = 5.0  # if all processes wait: how long they have to find out whether they reach rank 0
MAX_NAMED = 5
SILENT_CAUSES = "suspended, cut off from the network, or in native code that holds the GIL"
KILLED = "exited without a message (killed or crashed)"


@dataclass(frozen=True)
class Limits:
    """Seconds without progress: late_seconds before a process is reported, stuck_seconds before the run ends (None: never).

    silence_seconds: without a change of its file before a process counts as lost. start_seconds: for all processes to start.
    """

    late_seconds: float = 30.0
    stuck_seconds: float | None = 1800.0
    silence_seconds: float = 15.0
    start_seconds: float = 300.0

    def stuck_after(self, activity: str, work: str = "code") -> float:
        """Seconds without progress in an activity after which the run ends; infinite for never. work: see `Heartbeat`."""
        if self.stuck_seconds is None:
            return float("inf")
        # In a compilation, a process may wait for another one that compiles and is not overdue.
        return max(self.stuck_seconds, self._least(activity, is_compiling=work != ""))

    def cut_off_after(self, activity: str, work: str = "compiler") -> float:
        """`stuck_after` for a process that cannot read the other processes' files, as on a host without network."""
        if self.stuck_seconds is None:
            return float("inf")
        return max(min(self.stuck_seconds, CUT_OFF_SECONDS), self._least(activity, is_compiling=work == "compiler"))

    def _least(self, activity: str, *, is_compiling: bool) -> float:
        if activity == "compile":
            return COMPILATION_SECONDS if is_compiling else 0.0
        return self.start_seconds if activity == "start" else 0.0


def late_after(beat: Heartbeat, limits: Limits, *, is_single: bool = False) -> float:
    """Seconds without progress after which a process is reported, longer where its activity usually takes longer."""
    if is_single and beat.is_first_step:
        return FIRST_STEP_FACTOR * limits.late_seconds
    if beat.activity in ("start", "load") and beat.step is None:
        return limits.late_seconds
    if beat.activity == "save":  # waits for the previous save
        return max(UNKNOWN_FACTOR * limits.late_seconds, SLOW_FACTOR * beat.longest_save_seconds)
    if beat.typical_seconds is None:
        return max(UNKNOWN_FACTOR * limits.late_seconds, FIRST_STEPS_FACTOR * beat.longest_seconds)
    return max(limits.late_seconds, SLOW_FACTOR * beat.typical_seconds)


def save_is_late(beat: Heartbeat, limits: Limits) -> bool:
    """Whether the background save takes longer than it may."""
    return beat.save_seconds >= max(UNKNOWN_FACTOR * limits.late_seconds, SLOW_FACTOR * beat.longest_save_seconds)


def overdue(beat: Heartbeat, limits: Limits, *, is_single: bool = False) -> str:
    """ "", LATE or STUCK: how long a process has made no progress, by its own clock; a background save counts too."""
    in_save = save_is_late(beat, limits)
    seconds = max(beat.idle_seconds, beat.save_seconds if in_save else 0.0)
    if beat.activity == OUTSIDE or not (in_save or beat.idle_seconds >= late_after(beat, limits, is_single=is_single)):
        return ""
    return STUCK if seconds >= limits.stuck_after("save" if in_save else beat.activity, beat.work) else LATE


@dataclass
class _Seen:
    """The last record of a process, when its count last changed, and how often it was read since then."""

    record: Record
    changed: float
    reads: int = 0
    is_alive: bool = False  # the count has changed, so the file is not an earlier process's


class Records:
    """The records of the processes of a run, as one of them reads them. Time is the reader's own clock, in seconds.

    The clock must not run while the reader is suspended, so that a reader does not blame other processes for its own delay.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def add(self, rank: int, record: Record | None, clock: float) -> None:
        """Add the record that was read for a process; None if nothing could be read, which counts as unchanged."""
        seen = self._seen.get(rank)
        if seen is None:
            if record is not None:
                self._seen[rank] = _Seen(record, clock)
        elif record is not None and (record.count, record.process) != (seen.record.count, seen.record.process):
            self._seen[rank] = _Seen(record, clock, is_alive=True)
        else:
            seen.reads += 1

    def add_outage(self, seconds: float) -> None:
        """Do not count a time as silence when no file could be read or written."""
        for seen in self._seen.values():
            seen.changed += seconds

    @property
    def alive(self) -> dict[int, Record]:
        """The newest records of processes that have run while this one read their files."""
        return {rank: seen.record for rank, seen in sorted(self._seen.items()) if seen.is_alive}

    def silent_seconds(self, rank: int, clock: float) -> float:
        """How long a process has been silent, less what a slow directory explains."""
        seen = self._seen[rank]
        if seen.reads < MIN_READS:
            return 0.0
        return clock - seen.changed - SLOW_WRITES * seen.record.write_seconds

    def silent(self, limit: float, clock: float) -> list[Record]:
        """The processes that have been silent for longer than `limit` and have not left."""
        return [record for rank, record in self.alive.items() if not record.left and self.silent_seconds(rank, clock) > limit]


def blame(record: Record, reason: str) -> Verdict:
    """The verdict that a process has failed, with its last known location and place; a single process has no rank."""
    if not record.run:
        return Verdict(f"failed {record.beat.location}: {reason}", place=record.place)
    return Verdict(reason, record.rank, record.host, record.beat.location, record.place)


def own_failure(record: Record) -> Verdict:
    """The verdict of a process that has reported its own failure."""
    failure = record.failure
    assert failure is not None
    return replace(blame(record, failure.reason), place=failure.place, code=failure.code)


class Judge:
    """Rank 0's verdict. is_gone(record): whether a process of this host has ended."""

    def __init__(self, limits: Limits, is_gone: Callable[[Record], bool]) -> None:
        self.limits, self._is_gone = limits, is_gone
        self._collective_failed: float | None = None  # when the first process reported a failed collective
        self._all_wait: float | None = None  # since when all are stuck and wait
        self._gone: set[int] = set()

    def verdict(self, records: Records, clock: float) -> Verdict | None:
        """The first failure, if any: a process that reports one, then a process that is gone or silent, then a stuck one."""
        alive = records.alive
        own = [record for record in alive.values() if record.failure and not record.failure.collective]
        if own:
            return own_failure(own[0])
        gone = {rank for rank, record in alive.items() if not (record.left or record.failure) and self._is_gone(record)}
        if confirmed := gone & self._gone:  # its last record may be on its way
            return blame(alive[min(confirmed)], KILLED)
        self._gone = gone
        if silent := records.silent(self.limits.silence_seconds, clock):
            quiet = [record for record in silent if not record.failure]
            return self._silent(quiet or silent, len(alive))
        return self._collective(alive, clock) or (self._stuck(alive, clock) if alive else None)

    def _silent(self, silent: list[Record], processes: int) -> Verdict:
        reason = f"sent no sign of life for {self.limits.silence_seconds:g} s ({SILENT_CAUSES})"
        if len(silent) == processes - 1 > 1:
            reason += "; so did all others, so the host of rank 0 may be cut off"
        return blame(silent[0], reason)

    def _collective(self, alive: Mapping[int, Record], clock: float) -> Verdict | None:
        """A process whose collective has failed is blamed only if no other cause appears, such as a lost link."""
        failed = [record for record in alive.values() if record.failure]
        if not failed:
            return None
        self._collective_failed = self._collective_failed or clock
        if clock - self._collective_failed < self.limits.silence_seconds + COLLECTIVE_SECONDS:
            return None
        first, isolated, lost_link = own_failure(failed[0]), isolated_by_link(alive), _lost_link(alive)
        if len(failed) == 1 and not lost_link:
            return first
        quiet = names(record for record in alive.values() if not record.failure)
        others = lost_link or (f"; {quiet} reported nothing" if quiet else "")
        reason = f"a collective failed on {names(failed)}: {first.reason}{others}"
        return replace(blame(isolated[0], reason) if len(isolated) == 1 else Verdict(reason), place=first.place)

    def _stuck(self, alive: Mapping[int, Record], clock: float) -> Verdict | None:
        behind = at_fault(alive)
        if not all(record.overdue == STUCK for record in behind or alive.values()):
            self._all_wait = None
            return None
        if len(alive) > 1 and not any(record.beat.work for record in alive.values()):
            self._all_wait = self._all_wait or clock
            if clock - self._all_wait < CUT_OFF_LOOK_SECONDS:
                return None
        seconds = min(record.seconds for record in behind or alive.values())
        if len(behind) == 1:
            return blame(behind[0], f"stuck: no progress for {seconds:.0f} s{_lost_link(alive)}")
        return Verdict(f"stuck: no progress for {seconds:.0f} s: {headline(alive)}", place=behind[0].place if behind else "")


def at_fault(alive: Mapping[int, Record]) -> list[Record]:
    """The overdue processes that execute code instead of waiting. If all processes are overdue and wait: those that are cut
    off, or else those that are behind the rest.

    [] if all are at the same point, or if a process that is not overdue may hold up the rest. Also [] if the processes behind
    wait for their devices: a step starts while the previous one computes.
    """
    late = [record for record in alive.values() if record.overdue]
    if working := [record for record in late if record.beat.work]:
        return working
    if any(record.cut_off for record in late):
        return isolated_by_link(alive) if len(late) == len(alive) else []
    behind = [record for record in late if record.beat.position == min(each.beat.position for each in late)]
    is_single = any(not record.run for record in late)
    is_known = len(behind) < len(late) == len(alive) and not all(record.beat.waits == DEVICES for record in behind)
    return behind if is_known or is_single else []


def isolated_by_link(alive: Mapping[int, Record]) -> list[Record]:
    """The processes that do not reach rank 0, or rank 0 if no other host reaches it; [] if none, or if there are two hosts."""
    cut_off = [record for record in alive.values() if record.cut_off]
    hosts, theirs = ({record.host for record in records} for records in (alive.values(), cut_off))
    if len(hosts) <= 2:
        return []
    return cut_off if len(theirs) < len(hosts) - 1 else [alive[0]]


def names(records: Iterable[Record]) -> str:
    shown = [f"rank {record.rank} on {record.host}" for record in records if record.run]
    return ", ".join(shown[:MAX_NAMED]) + (f" and {len(shown) - MAX_NAMED} more" if len(shown) > MAX_NAMED else "")


def headline(alive: Mapping[int, Record]) -> str:
    """Which processes make no progress, and where."""
    behind = at_fault(alive)
    if not behind:
        places = dict.fromkeys(record.beat.location for record in alive.values())
        at = [f"{names(record for record in alive.values() if record.beat.location == place)} {place}" for place in places]
        where = f" {next(iter(places))}" if len(places) == 1 else f" ({'; '.join(at)})"
        reason = f"all ranks wait for each other or for their devices{where}: a device, the network or a collective is stuck"
        parts = {ITERATION_OF_ACTIVITY.get(record.beat.activity, record.beat.activity) for record in alive.values()}
        advice = "; check that callbacks ask for evaluate and stop on all processes" if len(parts) > 1 else ""
        return reason + (_lost_link(alive) or advice)
    waiting = len(alive) - len(behind)
    others = f"; {waiting} rank{'s are' if waiting > 1 else ' is'} waiting" if waiting else ""
    return f"{names(behind)} {behind[0].beat.location}{others}{_lost_link(alive)}".lstrip()


def _lost_link(alive: Mapping[int, Record]) -> str:
    """A hint if processes do not reach rank 0, else ""."""
    cut_off = [record for record in alive.values() if record.cut_off]
    do = "does" if len(cut_off) == 1 else "do"
    return f"; {names(cut_off)} {do} not reach rank 0 on {alive[0].host} over the network" if cut_off else ""


def report(alive: Mapping[int, Record], limits: Limits) -> list[str]:
    """Lines about processes that are late, [] if none is: who, when the run will end, and their stacks."""
    late = [record for record in alive.values() if record.overdue]
    shown = at_fault(alive) or late
    if not shown or (shown == late and len(late) < len(alive) and not any(record.beat.work for record in late)):
        return []
    (first, *_), end = shown, limits.stuck_after(shown[0].beat.activity, shown[0].beat.work)
    ends = "" if end == float("inf") else f". The run ends after {end / 60:g} minutes without progress"
    ends += " (guard.step_minutes)" if end == limits.stuck_seconds else ""
    seconds = f"{first.seconds:.0f} s"
    if all(record.beat.work == "compiler" for record in shown):
        return [f"XLA has been compiling for {seconds}; this can take minutes: {headline(alive)}{ends}"]
    if not first.run and first.beat.is_first_step:
        return [f"the first step has taken {seconds} so far, which is normal on a slow machine{ends}"]
    lines = [f"no progress for {seconds}: {headline(alive)}{ends}"]
    for record in shown[:MAX_NAMED]:
        owner = f" of {names([record])}" if record.run else ""
        lines += [f"Stack{owner}, most recent call first:", *record.stacks]
    return lines


def waiting(alive: Mapping[int, Record], processes: int, limits: Limits) -> str:
    """A line about processes that have not started yet."""
    end = f"the run ends after {limits.start_seconds / 60:g} minutes (guard.start_minutes)"
    return f"waiting for {_absent(alive, processes)} to start; {end}"


def lone(launcher: str) -> str:
    """A hint for a process that waits for all others: the variables of the launcher may be left over."""
    if launcher == "flags":
        return ""
    return f"; if nothing has started more processes, as in a shell of `srun --pty`, use {ALONE}"


def cut_off(own: Record, seconds: float, limits: Limits, *, board: str) -> Verdict | None:
    """The verdict of a process on itself if the files have not answered for `seconds`: it cannot learn what happened."""
    limit = limits.cut_off_after(own.beat.activity, own.beat.work)
    if min(own.beat.idle_seconds, seconds) < limit or own.beat.activity == OUTSIDE:
        return None
    reason = f"no progress, and no answer of the status files in {board}, for {limit:.0f} s: no network on this host?"
    return blame(own, reason)


def duplicate(own: Record, other: Record) -> Verdict:
    """The verdict of a process on itself if another one has its rank, in this run or in a different one in its directory."""
    if other.run != own.run:
        reason = f"a run that {other.run} coordinates uses this directory, with process {other.pid} on {other.host}"
        return replace(blame(own, f"{reason}; use another --workdir, or end that run"), place="", code=EXIT_CONFIG)
    places = f"process {own.pid} on {own.host} and process {other.pid} on {other.host}"
    reason = f"rank={own.rank}: {places} both have it; give each process its own rank"
    return replace(blame(own, reason), place="", code=EXIT_CONFIG)


def _absent(alive: Mapping[int, Record], processes: int) -> str:
    absent = [rank for rank in range(processes) if rank not in alive]
    ranks = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent[:MAX_NAMED]))}"
    return ranks + f" and {len(absent) - MAX_NAMED} more" * (len(absent) > MAX_NAMED)


def missing(records: Records, processes: int, seconds: float) -> Verdict | None:
    """The verdict that processes have not started within `seconds`; None if all have."""
    alive = records.alive
    if not (absent := processes - len(alive)):
        return None
    started = names(alive.values()) or "none"
    return Verdict(
        f"{absent} of {plural(processes, 'process')} did not start within {seconds:g} s: {_absent(alive, processes)} "
        f"(started: {started}); they may not share --workdir"
    )
