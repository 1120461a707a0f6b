"""How far a run is, how fast it trains, where its time goes, and how long the rest will take: arithmetic on its log."""

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

RECENT_SECONDS, RECENT_RECORDS = 300.0, 5  # the window of speed and shares: this long, and at least so many records


@dataclass(frozen=True)
class Pace:
    """Position and recent speed of a run; None for what is not known yet.

    fraction: of the run, in [0, 1]. remaining_seconds: at the pace of the second half of this session, evaluation and saving
    included. The other fields are of the last `recent_seconds`. steps_share: share of the time that the devices trained,
    input_share: that they waited for images; the rest is evaluation, saving and compilation. waiting_share: share of the
    steps' time that devices waited for another process, most often for `slowest_rank`.
    """

    fraction: float
    epoch: float
    remaining_seconds: float | None = None
    images_per_second: float | None = None
    recent_seconds: float | None = None
    steps_share: float | None = None
    input_share: float | None = None
    waiting_share: float | None = None
    slowest_rank: int | None = None


def measure(records: list[dict[str, Any]], epochs: float, session_start: int = 0) -> Pace:
    """The pace of a run of `epochs` epochs. session_start: samples at the start of its last session."""
    epoch = next((record["epoch"] for record in reversed(records) if record.get("epoch") is not None), 0.0)
    fraction = min(1.0, max(0.0, epoch / epochs))
    needed = ("epoch", "wall_seconds", "images_per_second", "samples")
    session = (record for record in records if record["samples"] > session_start)
    steps = [record for record in session if all(record.get(name) is not None for name in needed)]
    if len(steps) < 2:
        return Pace(fraction, epoch, images_per_second=steps[-1]["images_per_second"] if steps else None)
    return Pace(fraction, epoch, _remaining_seconds(records, steps, epochs), **_recent(steps))


def _remaining_seconds(records: list[dict[str, Any]], steps: list[dict[str, Any]], epochs: float) -> float | None:
    first, last = steps[0], steps[-1]
    middle = (first["wall_seconds"] + last["wall_seconds"]) / 2
    start = next((step for step in reversed(steps[:-1]) if step["wall_seconds"] <= middle), first)
    seconds, trained = last["wall_seconds"] - start["wall_seconds"], last["epoch"] - start["epoch"]
    if seconds <= 0 or trained <= 0:
        return None
    since = max(0.0, (records[-1].get("wall_seconds") or 0.0) - last["wall_seconds"])  # an evaluation after the last step
    return max(0.0, (epochs - last["epoch"]) * seconds / trained - since)


def _recent(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of `Pace` about the last time."""
    oldest = max(0, len(steps) - 1 - RECENT_RECORDS)
    while oldest > 0 and steps[-1]["wall_seconds"] - steps[oldest]["wall_seconds"] < RECENT_SECONDS:
        oldest -= 1
    window = steps[oldest:]
    images = [after["samples"] - before["samples"] for before, after in pairwise(window)]
    seconds = [
        count / step["images_per_second"] if step["images_per_second"] > 0 else 0.0
        for count, step in zip(images, window[1:], strict=True)
    ]
    training, elapsed = sum(seconds), window[-1]["wall_seconds"] - window[0]["wall_seconds"]
    if training <= 0 or elapsed <= 0:
        return {"images_per_second": steps[-1]["images_per_second"]}
    waiting = min(training, sum(step.get("input_seconds") or 0.0 for step in window[1:]))
    total = max(elapsed, training)  # lines are written a moment after their steps end
    ranks = [step["slowest_rank"] for step in window[1:] if step.get("slowest_rank") is not None]
    shares = [(share, weight) for step, weight in zip(window[1:], seconds, strict=True) if (share := step.get("waiting_share"))]
    return {
        "images_per_second": sum(images) / training,
        "recent_seconds": elapsed,
        "steps_share": (training - waiting) / total,
        "input_share": waiting / total,
        "waiting_share": sum(share * weight for share, weight in shares) / training if ranks else None,
        "slowest_rank": statistics.mode(ranks) if ranks else None,
    }
