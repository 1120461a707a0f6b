"""Which process is stuck: rules over the heartbeats of all ranks, without a clock, threads or I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxdp.distributed import stack_traces
from jaxdp.distributed.stack_traces import COMPILER, OTHER_RANKS, Stack, format_stacks, innermost_frames
from jaxdp.distributed.status import OUTSIDE, Heartbeat, Location

SLOW_FACTOR = 15.0  # times the typical duration of a step: below it a step is slow, not stuck
FIRST_STEPS_FACTOR = 4.0  # times the longest step, while too few durations are known
FIRST_STEP_FACTOR = 4.0  # times `stuck_seconds`, for the first step of a single process, which waits for no other
UNKNOWN_FACTOR = 1.75  # times `stuck_seconds`, if no duration is known: compilation, the first steps
COMPILATION_SECONDS = 1800.0  # without progress in a compilation, before which `end_seconds` does not end the run
COMPILE_ACTIVITIES = ("compile",)
ITERATION_ACTIVITIES = ("load", "step", "audit", "evaluate")
SAVE_ACTIVITIES = ("save", "finish")
MAX_NAMED = 5
Heartbeats = Mapping[int, Heartbeat]
Stacks = Mapping[int, Sequence[Stack]]
Hosts = Mapping[int, str]


@dataclass(frozen=True)
class HangLimits:
    """stuck_seconds: time without progress before a process is reported; end_seconds: before the run ends, None for never."""

    stuck_seconds: float = 30.0
    end_seconds: float | None = 1800.0

    def end_after(self, activity: str) -> float | None:
        """Seconds without progress in an activity after which the run ends; a compilation, one call, may take long."""
        if self.end_seconds is None or activity not in COMPILE_ACTIVITIES:
            return self.end_seconds
        return max(self.end_seconds, COMPILATION_SECONDS)


@dataclass(frozen=True)
class Hang:
    """ranks: those furthest behind, without progress for `seconds`; waiting: ranks ahead of them without progress.

    all_ranks: no rank makes progress. in_save: the background save of these ranks hangs, not their main thread.
    may_end_run: whether the hang may end the run (False before and after a run).
    """

    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    seconds: float
    all_ranks: bool = False
    in_save: bool = False
    may_end_run: bool = True

    def is_same(self, other: "Hang | None") -> bool:
        return other is not None and (self.ranks, self.in_save) == (other.ranks, other.in_save)


def idle_limit(heartbeats: Heartbeats, rank: int, limits: HangLimits) -> float:
    """Seconds without progress after which a rank counts as stuck: `stuck_seconds`, longer if its activity takes longer."""
    activity = heartbeats[rank].activity
    typical = max((beat.typical_seconds for beat in heartbeats.values() if beat.typical_seconds is not None), default=None)
    if activity in COMPILE_ACTIVITIES:
        return UNKNOWN_FACTOR * limits.stuck_seconds
    if _is_first_step(heartbeats):
        return FIRST_STEP_FACTOR * limits.stuck_seconds
    if activity in ITERATION_ACTIVITIES and typical is None:
        longest = max(beat.longest_seconds for beat in heartbeats.values())
        return max(UNKNOWN_FACTOR * limits.stuck_seconds, FIRST_STEPS_FACTOR * longest)
    if activity in SAVE_ACTIVITIES:
        return _save_limit(heartbeats, limits)
    return max(limits.stuck_seconds, SLOW_FACTOR * (typical or 0.0))


def _is_first_step(heartbeats: Heartbeats) -> bool:
    """Whether a single process runs the first step of its session, which takes minutes on a slow machine."""
    (beat, *others) = heartbeats.values()
    return not others and beat.activity == "step" and beat.typical_seconds is None and not beat.longest_seconds


def _save_limit(heartbeats: Heartbeats, limits: HangLimits) -> float:
    longest = max(beat.longest_save_seconds for beat in heartbeats.values())
    return max(limits.stuck_seconds, SLOW_FACTOR * longest) if longest else UNKNOWN_FACTOR * limits.stuck_seconds


def find_hang(heartbeats: Heartbeats, limits: HangLimits) -> Hang | None:
    """The hang of a main thread, or else of a background save; None if there is none."""
    if all(beat.activity == OUTSIDE for beat in heartbeats.values()):
        return None
    behind = min(beat.position for beat in heartbeats.values())
    idle = {rank for rank, beat in heartbeats.items() if beat.idle_seconds >= idle_limit(heartbeats, rank, limits)}
    ranks = tuple(sorted(rank for rank in idle if heartbeats[rank].position == behind))
    if ranks:
        return Hang(
            ranks=ranks,
            waiting=tuple(sorted(rank for rank in idle if heartbeats[rank].position > behind)),
            seconds=min(heartbeats[rank].idle_seconds for rank in ranks),
            all_ranks=len(idle) == len(heartbeats),
            may_end_run=all(heartbeats[rank].activity != OUTSIDE for rank in ranks),
        )
    limit = _save_limit(heartbeats, limits)
    saving = tuple(sorted(rank for rank, beat in heartbeats.items() if beat.background_save and beat.save_seconds >= limit))
    if saving:
        return Hang(saving, (), min(heartbeats[rank].save_seconds for rank in saving), in_save=True)
    return None


def ranks_at_fault(hang: Hang, stacks: Stacks) -> tuple[int, ...]:
    """Of the stuck ranks, those that do not just wait for other ranks or for their devices, judged by their stack traces.

    Ranks without a known stack trace stay. If all of them wait, a rank ahead may hold them up, for example with a callback of
    the compiled program; () if no such rank is found either.
    """
    if hang.in_save:
        return tuple(
            rank
            for rank in hang.ranks
            if rank not in stacks or not any(stack["waits_for"] == OTHER_RANKS for stack in stacks[rank])
        )
    behind = tuple(rank for rank in hang.ranks if rank not in stacks or is_working(stacks[rank]))
    ahead = tuple(rank for rank in hang.waiting if rank in stacks and is_working(stacks[rank]))
    return behind or ahead or (hang.ranks if hang.waiting else ())


def is_working(stacks: Sequence[Stack]) -> bool:
    """Whether any thread of a process executes code instead of waiting."""
    return any(map(stack_traces.is_working, stacks))


def describe_location(beat: Heartbeat, in_save: bool = False) -> str:
    if in_save:
        return f"saving {beat.background_save}"
    return f"{Location(beat.activity, beat.step)}" + (f", {beat.detail}" if beat.detail else "")


def describe_ranks(ranks: Sequence[int], hosts: Hosts) -> str:
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks[:MAX_NAMED]) + more


@dataclass(frozen=True)
class HangDescription:
    """Texts about a hang. at_fault: see `ranks_at_fault`; hosts: host name by rank, of one host for a single process."""

    hang: Hang
    at_fault: tuple[int, ...]
    heartbeats: Heartbeats
    hosts: Hosts
    stacks: Stacks

    @property
    def _shown(self) -> tuple[int, ...]:
        return self.at_fault or self.hang.ranks

    def headline(self) -> str:
        """Which ranks make no progress, in which activity, and how many wait for them."""
        location = describe_location(self.heartbeats[self._shown[0]], self.hang.in_save)
        if len(self.hosts) == 1:
            return location
        if not self.at_fault:
            return (
                f"all ranks are waiting for each other or for their devices {location}: "
                "a device, the network or a collective is stuck"
            )
        others = len(self.heartbeats) - len(self.at_fault) if self.hang.waiting else 0
        waiting = f"; {others} rank{'s are' if others > 1 else ' is'} waiting" if others else ""
        return f"{describe_ranks(self.at_fault, self.hosts)} {location}{waiting}"

    def _is_compiling(self) -> bool:
        """Whether the ranks at fault do nothing but compile, which can take minutes."""
        working = [
            {stack["waits_for"] for stack in self.stacks.get(rank, []) if stack_traces.is_working(stack)}
            for rank in self.at_fault
        ]
        return bool(working) and all(waits == {COMPILER} for waits in working)

    def end_after(self, limits: HangLimits) -> float | None:
        """Seconds without progress after which the run ends; None for never."""
        if not self.hang.may_end_run:
            return None
        activities = ("save",) if self.hang.in_save else {self.heartbeats[rank].activity for rank in self._shown}
        seconds = [limits.end_after(activity) for activity in activities]
        return max((limit for limit in seconds if limit is not None), default=None)

    def report(self, limits: HangLimits) -> list[str]:
        """Lines to print: the headline, when the run will end, and the stack traces of the ranks at fault (else of all)."""
        end, seconds = "", self.end_after(limits)
        if seconds is not None:
            field = " (guard.step_minutes)" if seconds == limits.end_seconds else ""
            end = f". The run ends after {seconds / 60:g} minutes without progress{field}"
        if self._is_compiling():
            return [f"XLA has been compiling for {self.hang.seconds:.0f} s; this can take minutes: {self.headline()}{end}"]
        if _is_first_step(self.heartbeats) and not self.hang.in_save:
            return [f"the first step has taken {self.hang.seconds:.0f} s so far, which is normal on a slow machine{end}"]
        lines = [f"no progress for {self.hang.seconds:.0f} s: {self.headline()}{end}"]
        for rank in self._shown[:MAX_NAMED]:
            owner = f" of rank {rank} on {self.hosts[rank]}" if len(self.hosts) > 1 else ""
            if stacks := self.stacks.get(rank):
                lines += [f"Stack{owner}, most recent call first:", *format_stacks(stacks)]
            else:
                lines += [f"No stack trace{owner}: no thread of the process answers"]
        return lines

    def reason(self, seconds: float) -> str:
        """Why the run ends, after `seconds` without progress: the same text on every process."""
        names_ranks = len(self.at_fault) != 1 and len(self.hosts) > 1
        subject = f": {self.headline()}" if names_ranks else ""
        frames = innermost_frames(self.stacks.get(self._shown[0], []))
        save = " of the save" if self.hang.in_save else ""
        return f"stuck: no progress{save} for {seconds:.0f} s{subject}" + (f"; {frames}" if frames else "")
