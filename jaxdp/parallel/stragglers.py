"""Who makes the others wait: the moments at which the processes of a run were ready for each step."""

import threading
from statistics import median

NAMED = 3


class Stragglers:
    """Adds up, over steps, the time that the devices of each process stood idle because another was not ready.

    A step is asked for while the one before is still computed. A process is ready for it when it has asked for it and the step
    before is done, which is the same moment for all of them, as they exchange gradients. Until the last one is ready the
    others' devices wait. What is not seen: a device that computes slowly; all then wait inside the step.
    """

    def __init__(self, processes: int):
        self.processes = processes
        self.lock = threading.Lock()
        self.before: tuple[int, float] | None = None
        self.total = self._nothing()
        self.recent = self._nothing()

    def _nothing(self) -> dict:
        return {"seconds": 0.0, "waited": 0.0, "late": [0.0] * self.processes, "last": [0] * self.processes, "steps": 0}

    def include(self, step: int, asked: list[float], done: list[float]) -> None:
        """asked, done: by rank, when a step was asked for and when it was seen to be done, seconds of one clock."""
        with self.lock:
            end = min(done)
            if self.before is not None and self.before[0] == step - 1:
                began = self.before[1]
                ready = [max(moment, began) for moment in asked]
                last, usual = max(ready), median(ready)
                for sums in (self.total, self.recent):
                    sums["steps"] += 1
                    sums["seconds"] += max(0.0, end - began)
                    sums["waited"] += sum(last - moment for moment in ready) / self.processes
                    sums["last"][ready.index(last)] += 1
                    for rank, moment in enumerate(ready):
                        sums["late"][rank] += max(0.0, moment - usual) if self.processes > 2 else moment - min(ready)
            self.before = (step, end)

    def report(self, hosts: list[str], whole: bool = False) -> dict:
        """{"waiting_share", "slowest": [{"rank", "host", "late_seconds", "last_share"}, ...]}, {} where there were no steps.

        Of the steps since the last report, or of all (whole).

        waiting_share: of the time of these steps, how much the devices waited on average. late_seconds: how much later than the
        usual process this one was ready, a step on average; last_share: in how many steps it was the last.
        """
        with self.lock:
            sums = self.total if whole else self.recent
            if not whole:
                self.recent = self._nothing()
        if not sums["steps"] or not sums["seconds"]:
            return {}
        order = sorted(range(self.processes), key=lambda rank: -sums["late"][rank])[:NAMED]
        return {
            "waiting_share": min(1.0, sums["waited"] / sums["seconds"]),
            "slowest": [
                {
                    "rank": rank,
                    "host": hosts[rank],
                    "late_seconds": sums["late"][rank] / sums["steps"],
                    "last_share": sums["last"][rank] / sums["steps"],
                }
                for rank in order
            ],
        }


def in_words(report: dict) -> str:
    """One line for the log."""
    slowest = report["slowest"][0]
    return (
        f"{100 * report['waiting_share']:.0f} % of the time the devices waited for a process that was not ready, most of it "
        f"for rank {slowest['rank']} on {slowest['host']} ({1e3 * slowest['late_seconds']:.0f} ms late a step, the last in "
        f"{100 * slowest['last_share']:.0f} % of them)"
    )
