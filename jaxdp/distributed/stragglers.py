"""Stragglers: finds the process that delays the rest, by how long each process waits for the results of its steps."""

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

MAX_NAMED = 3


class StepTimes(NamedTuple):
    """Sums over the steps of a process: their number, their seconds, and the seconds that it waited for their results."""

    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0


class Stragglers:
    """Compares, over steps, how long the processes wait for results.

    A step completes at the same time on all processes, because they exchange gradients. A process that dispatched the step
    early waits long for its results. The process that dispatched it last, or reads the results late, waits least. Each process
    measures with its own clock. A slow device is not detected, because all devices then wait inside the step.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes, self.own = num_processes, StepTimes()
        self._last_step: tuple[int, float] | None = None  # number, and when it completed
        self._reported: Mapping[int, StepTimes] = {}

    def add(self, step: int, waited: float, completed: float) -> None:
        """Add a step of this process: the seconds that it waited for the devices, and the seconds of all steps so far."""
        if self._last_step is not None and self._last_step[0] == step - 1:
            sums, seconds = self.own, completed - self._last_step[1]
            self.own = StepTimes(sums.steps + 1, sums.seconds + seconds, sums.waited_seconds + waited)
        self._last_step = step, completed

    def report(self, times: Mapping[int, StepTimes], hosts: Sequence[str], whole_run: bool = False) -> dict[str, Any]:
        """{"waiting_share", "slowest": [{"rank", "host", "late_seconds"}, ...]}; {} without steps. times: by rank.

        Covers the steps since the last report, or all. waiting_share: average share of the time that a device waited for
        another process. late_seconds: how much less than the median process this one waited, averaged over steps.
        """
        before, self._reported = ({}, self._reported) if whole_run else (self._reported, times)
        sums = dict[int, StepTimes]()
        for rank, now in times.items():
            then = before.get(rank, StepTimes())
            sums[rank] = StepTimes(now.steps - then.steps, now.seconds - then.seconds, now.waited_seconds - then.waited_seconds)
        if len(sums) < self.num_processes or not all(each.steps and each.seconds for each in sums.values()):
            return {}
        waited = {rank: each.waited_seconds / each.steps for rank, each in sums.items()}
        least, most = min(waited.values()), max(waited.values())
        typical = median(waited.values()) if self.num_processes > 2 else most
        slowest = sorted(waited, key=waited.__getitem__)[:MAX_NAMED]
        lost = mean(seconds - least for seconds in waited.values())
        late = {rank: max(0.0, typical - waited[rank]) for rank in slowest}
        return {
            "waiting_share": min(1.0, lost / mean(each.seconds / each.steps for each in sums.values())),
            "slowest": [{"rank": rank, "host": hosts[rank], "late_seconds": seconds} for rank, seconds in late.items()],
        }


def describe(report: dict[str, Any]) -> str:
    """One line for the log; "" if the share rounds to 0 %. report: from `Stragglers.report`, not empty."""
    if report["waiting_share"] < 0.005:
        return ""
    slowest = report["slowest"][0]
    return (
        f"devices waited for other processes {100 * report['waiting_share']:.0f} % of the time, mostly for rank "
        f"{slowest['rank']} on {slowest['host']} ({1e3 * slowest['late_seconds']:.0f} ms late per step)"
    )
