"""Follows the heartbeats of a run: reports a hang once with stack traces, reports when it resolves, and ends the run."""

from collections.abc import Callable, Iterable, Sequence

from jaxdp.distributed import hang_rules
from jaxdp.distributed.hang_rules import Hang, HangDescription, HangLimits, Heartbeats, Hosts
from jaxdp.distributed.stack_traces import Stack

MAX_ANSWER_TICKS = 3  # to wait for the stack traces of a process; after that it is reported without


class HangMonitor:
    """Compares heartbeats over time. Call `update` about once a second, and `add_stacks` with what a process sends.

    hosts: host name by rank. request_stacks(rank): asks a process for its stack traces. report(lines): has every process print
    the lines. end_run(rank, reason): ends the run; rank is None unless a single rank is at fault.
    """

    def __init__(
        self,
        limits: HangLimits,
        hosts: Hosts,
        *,
        request_stacks: Callable[[int], None],
        report: Callable[[list[str]], None],
        end_run: Callable[[int | None, str], None],
    ) -> None:
        self.limits, self.hosts = limits, hosts
        self._request_stacks, self._report_lines, self._end_run = request_stacks, report, end_run
        self._candidate: Hang | None = None  # not yet reported; its stack traces are being collected
        self._candidate_ticks = 0
        self._stacks: dict[int, Sequence[Stack]] = {}
        self._requested: set[int] = set()
        self._reported: HangDescription | None = None  # reported and not resolved

    def add_stacks(self, rank: int, stacks: Sequence[Stack]) -> None:
        self._stacks[rank] = stacks

    def update(self, heartbeats: Heartbeats) -> None:
        """Evaluate the newest heartbeats, by rank."""
        if self._reported is not None:
            if self._is_unresolved(self._reported, heartbeats):
                self._end_if_due(self._reported, heartbeats)
                return
            ranks = f": {hang_rules.describe_ranks(_ranks(self._reported), self.hosts)}" if len(self.hosts) > 1 else ""
            self._report_lines([f"progress resumed after more than {self._reported.hang.seconds:.0f} s{ranks}"])
            self._reported = None
        hang = hang_rules.find_hang(heartbeats, self.limits)
        if hang is None or not hang.is_same(self._candidate):
            self._candidate, self._stacks, self._requested, self._candidate_ticks = hang, {}, set(), 0
            self._request(hang.ranks if hang else ())
        if hang is None:
            return
        self._candidate = hang
        self._candidate_ticks += 1
        all_wait = not any(map(hang_rules.is_working, self._stacks.values()))
        if all(rank in self._stacks for rank in hang.ranks) and all_wait:
            self._request(hang.waiting)
        if all(rank in self._stacks for rank in self._requested) or self._candidate_ticks > MAX_ANSWER_TICKS:
            self._report(hang, heartbeats)

    def _request(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self._requested:
                self._requested.add(rank)
                self._request_stacks(rank)

    def _report(self, hang: Hang, heartbeats: Heartbeats) -> None:
        at_fault = hang_rules.ranks_at_fault(hang, self._stacks)
        if not at_fault and not hang.all_ranks and not hang.in_save:
            self._candidate = None  # they wait for a rank that makes progress
            return
        self._reported = self._describe(hang, at_fault, heartbeats)
        self._report_lines(self._reported.report(self.limits))
        self._end_if_due(self._reported, heartbeats)

    def _describe(self, hang: Hang, at_fault: tuple[int, ...], heartbeats: Heartbeats) -> HangDescription:
        return HangDescription(hang=hang, at_fault=at_fault, heartbeats=heartbeats, hosts=self.hosts, stacks=self._stacks)

    def _is_unresolved(self, reported: HangDescription, heartbeats: Heartbeats) -> bool:
        return all(
            rank in heartbeats and _stuck_seconds(reported.hang, heartbeats, rank) >= reported.hang.seconds
            for rank in _ranks(reported)
        )

    def _end_if_due(self, reported: HangDescription, heartbeats: Heartbeats) -> None:
        limit = reported.end_after(self.limits)
        seconds = min(_stuck_seconds(reported.hang, heartbeats, rank) for rank in _ranks(reported))
        if limit is not None and seconds >= limit:
            reason = self._describe(reported.hang, reported.at_fault, heartbeats).reason(seconds)
            self._end_run(reported.at_fault[0] if len(reported.at_fault) == 1 else None, reason)


def _ranks(reported: HangDescription) -> tuple[int, ...]:
    return reported.at_fault or reported.hang.ranks


def _stuck_seconds(hang: Hang, heartbeats: Heartbeats, rank: int) -> float:
    return heartbeats[rank].save_seconds if hang.in_save else heartbeats[rank].idle_seconds
