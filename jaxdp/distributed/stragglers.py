"""Stragglers: which process delays the others, from the times at which the processes were ready for each step."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

MAX_NAMED = 3


@dataclass
class _Sums:
    """Sums over steps. late_seconds, times_last: by rank."""

    num_processes: int
    steps: int = 0
    seconds: float = 0.0
    waiting_seconds: float = 0.0
    late_seconds: list[float] = field(init=False)
    times_last: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.late_seconds, self.times_last = [0.0] * self.num_processes, [0] * self.num_processes

    def add(self, ready: Sequence[float], seconds: float) -> None:
        """Add a step. ready: when each process was ready; seconds: how long the step took."""
        last, typical = max(ready), median(ready)
        self.steps += 1
        self.seconds += seconds
        self.waiting_seconds += sum(last - moment for moment in ready) / self.num_processes
        self.times_last[ready.index(last)] += 1
        for rank, moment in enumerate(ready):
            self.late_seconds[rank] += max(0.0, moment - typical) if self.num_processes > 2 else moment - min(ready)


class Stragglers:
    """Sums, over steps, the time that the devices of each process were idle because another process was not ready.

    A process dispatches a step while the previous one still runs. It is ready once it has dispatched the step and the previous
    one has completed, which happens at the same time on all processes, because they exchange gradients. The devices wait until
    the last process is ready. A slow device is not detected, because all devices then wait inside the step.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self._lock = threading.Lock()
        self._last_step: tuple[int, float] | None = None  # number, and when it completed
        self._whole_run, self._recent = _Sums(num_processes), _Sums(num_processes)

    def include(self, step: int, dispatched: Sequence[float], completed: Sequence[float]) -> None:
        """Add a step. dispatched, completed: by rank, in seconds of one clock."""
        with self._lock:
            end = min(completed)
            if self._last_step is not None and self._last_step[0] == step - 1:
                began = self._last_step[1]
                ready = [max(moment, began) for moment in dispatched]
                for sums in (self._whole_run, self._recent):
                    sums.add(ready, max(0.0, end - began))
            self._last_step = (step, end)

    def report(self, hosts: Sequence[str], whole_run: bool = False) -> dict[str, Any]:
        """{"waiting_share", "slowest": [{"rank", "host", "late_seconds", "last_share"}, ...]}; {} without steps.

        Covers the steps since the last report, or all. waiting_share: average share of the time in which a device waited for
        another process. late_seconds: how much later than the median process this one was ready, averaged over steps.
        last_share: share of the steps in which it was the last.
        """
        with self._lock:
            sums = self._whole_run if whole_run else self._recent
            if not whole_run:
                self._recent = _Sums(self.num_processes)
        if not sums.steps or not sums.seconds:
            return {}
        slowest = sorted(range(self.num_processes), key=lambda rank: -sums.late_seconds[rank])[:MAX_NAMED]
        return {
            "waiting_share": min(1.0, sums.waiting_seconds / sums.seconds),
            "slowest": [
                {
                    "rank": rank,
                    "host": hosts[rank],
                    "late_seconds": sums.late_seconds[rank] / sums.steps,
                    "last_share": sums.times_last[rank] / sums.steps,
                }
                for rank in slowest
            ],
        }


def describe(report: dict[str, Any]) -> str:
    """One line for the log; "" if the share rounds to 0 %. report: of `Stragglers.report`, not empty."""
    if report["waiting_share"] < 0.005:
        return ""
    slowest = report["slowest"][0]
    return (
        f"devices waited for other processes {100 * report['waiting_share']:.0f} % of the time, mostly for rank "
        f"{slowest['rank']} on {slowest['host']} ({1e3 * slowest['late_seconds']:.0f} ms late per step, last in "
        f"{100 * slowest['last_share']:.0f} % of the steps)"
    )
