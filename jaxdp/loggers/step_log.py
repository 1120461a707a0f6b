"""Log of one session: a record every few steps and one for every evaluation, passed to all writers."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxdp.loggers.examples import ExampleCollector
from jaxdp.loggers.writers import TIMING, NullWriter, Writer, without_nan


class StepLog:
    """Measures throughput between records and passes records to the writers. Writes nothing until it is opened.

    every: steps between records. started: `time.monotonic()` at the start of the session. is_open: whether `open` was called.
    """

    def __init__(self, every: int, started: float) -> None:
        self.every, self.started = every, started
        self.is_open = False
        self._writers: list[Any] = [NullWriter()]
        self._earlier_seconds = 0.0
        self._logged: list[dict[str, Any]] = []
        self._reset()

    def _reset(self) -> None:
        """Reset the counts since the last step record."""
        self._images, self._seconds, self._input_seconds = 0, 0.0, 0.0

    def open(self, writers: Sequence[Writer], earlier_seconds: float, logged: Sequence[dict[str, Any]] = ()) -> None:
        """Start writing. The first writer is the log itself.

        earlier_seconds: wall time of the run's earlier sessions. logged: last records of the log. An evaluation that repeats
        one of these, because the session that wrote it did not save afterwards, is not written to the log again.
        """
        self._writers, self.is_open, self._earlier_seconds = [*writers] or [NullWriter()], True, earlier_seconds
        self._logged = [_without_timing(record) for record in logged]

    @property
    def wall_time(self) -> dict[str, float]:
        """{"wall_seconds"}: time since the start of the run's first session, without the time between sessions."""
        return {"wall_seconds": self._earlier_seconds + time.monotonic() - self.started}

    def add_input_seconds(self, seconds: float) -> None:
        """Count time for which the devices waited for images."""
        self._input_seconds += seconds

    def add_throughput(self, record: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The record of a step that took `seconds`, with images_per_second and input_seconds since the last step record."""
        self._images += record["global_batch"]
        self._seconds += seconds
        return record | {"images_per_second": self._images / self._seconds, "input_seconds": self._input_seconds}

    def is_due(self, record: dict[str, Any]) -> bool:
        """Whether the record's step is a multiple of `every`."""
        return record["step"] % self.every == 0

    def write_step(self, record: dict[str, Any]) -> None:
        self._write(record | self.wall_time)
        self._reset()

    def example_collector(self, total: int) -> ExampleCollector | None:
        """A collector of examples from `total` held-out images; None if no writer shows examples."""
        return ExampleCollector(total) if any(map(_wants_examples, self._writers)) else None

    def write_evaluation(self, record: dict[str, Any], examples: ExampleCollector | None) -> None:
        if examples and examples.collected:  # before the record, so that a reader of the log finds their pictures
            for writer in filter(_wants_examples, self._writers):
                writer.write_examples(record, *examples.arrays())
        self._write(record | self.wall_time, is_logged=_without_timing(without_nan(record)) in self._logged)

    def _write(self, record: dict[str, Any], *, is_logged: bool = False) -> None:
        for writer in self._writers[is_logged:]:
            writer.write(record)

    def sync(self) -> None:
        """Flush the log to the disk. Raises OSError if that fails."""
        self._writers[0].sync()

    def close(self, info: Callable[[str], Any]) -> None:
        """Close the writers, the log last. Errors are reported to `info`."""
        for writer in reversed(self._writers):
            try:
                writer.close()
            except Exception as error:
                info(f"{type(writer).__name__} could not be closed: {error}")


def _without_timing(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in TIMING}


def _wants_examples(writer: Any) -> bool:
    return getattr(writer, "wants_examples", False)
