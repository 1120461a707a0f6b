"""What a client of a tracker does, and how records of the log are numbered and named there."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

NO_POINT = -1  # position before the first record
RESULT = 2  # kind of the point behind the last record of a run, which shows the result


class Unavailable(Exception):
    """The tracker does not answer, or not now: try again later."""


class Rejected(Exception):
    """The tracker cannot be used as it is named or set up. hint: how to fix it."""

    def __init__(self, reason: str, hint: str) -> None:
        self.reason, self.hint = reason, hint
        super().__init__(f"{reason}; {hint}")


def is_evaluation(record: dict[str, Any]) -> bool:
    return "eval_accuracy" in record


def position(record: dict[str, Any]) -> int:
    """The number of a record in the order of the log, the same whenever a resumed run writes it again.

    An evaluation comes after the step with the same samples.
    """
    return 3 * record["samples"] + is_evaluation(record)


def values(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record under training/ or evaluation/. null, which the log has for NaN and infinity, is NaN."""
    group = "evaluation" if is_evaluation(record) else "training"
    return {
        f"{group}/{name.removeprefix('eval_')}": math.nan if value is None else value
        for name, value in record.items()
        if value is None or isinstance(value, (int, float))
    }


class RunFacts(NamedTuple):
    """What a tracker shows about a run beside its log.

    config: all fields by dotted name. directory, checkpoint: absolute paths, or URLs of a run at a URL;
    checkpoint is the newest, None before the first.
    result: fields of result.json by dotted name; empty before the end. pictures: of the held-out examples, by samples.
    """

    name: str
    config: dict[str, Any]
    directory: str
    host: str
    checkpoint: str | None
    result: dict[str, Any]
    pictures: dict[int, Path]
    plot: Path | None


class TrackerClient(Protocol):
    """The run of one tracker. Methods block, and raise `Unavailable` or `Rejected`; they are called by one thread.

    place: where a person finds the run, after `connect`.
    """

    place: str

    def connect(self, name: str) -> int:
        """Continue the tracker's run, or create it under this name. Returns the position of the last record it holds."""

    def describe(self, facts: RunFacts) -> None:
        """Show the configuration and the newest checkpoint."""

    def send(self, records: Sequence[dict[str, Any]], pictures: dict[int, Path]) -> None:
        """Add records to the run: all of them, or none and an exception."""

    def finish(self, outcome: str, facts: RunFacts) -> None:
        """Show the result and end the tracker's run, after everything has arrived. outcome: see `jaxdp.trackers.sender`."""
