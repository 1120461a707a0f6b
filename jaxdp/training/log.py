"""The log of a session: a line every so many steps and one for every evaluation, to all writers."""

import time

from jaxdp.training.evaluation import Examples
from jaxdp.training.metrics import NoWriter


class Log:
    """Writes nothing until it has begun.

    every: steps from line to line. started: `time.monotonic()` at the start of the session.
    """

    def __init__(self, every: int, started: float):
        self.every, self.started = every, started
        self.writers, self.begun = [NoWriter()], False
        self.earlier = 0.0  # seconds of the run's earlier sessions
        self._count()

    def _count(self) -> None:
        """Count the images, their seconds, and those in which they were waited for, anew."""
        self.images, self.seconds, self.waited = 0, 0.0, 0.0

    def begin(self, writers, earlier: float) -> None:
        self.writers, self.begun, self.earlier = writers or [NoWriter()], True, earlier

    @property
    def wall(self) -> dict:
        """Seconds since the run's first session began, without those between sessions."""
        return {"wall_seconds": self.earlier + time.monotonic() - self.started}

    def timed(self, record: dict, seconds: float) -> dict:
        """The record of a step that took so long, with what has been counted since the last line."""
        self.images += record["global_batch"]
        self.seconds += seconds
        return record | {"images_per_second": self.images / self.seconds, "input_seconds": self.waited}

    def due(self, record: dict) -> bool:
        return record["step"] % self.every == 0

    def step(self, record: dict) -> None:
        self._write(record | self.wall)
        self._count()

    def examples(self, count: int) -> Examples | None:
        """Takes a few of `count` held-out images from an evaluation, where a writer wants them."""
        return Examples(count) if any(map(_wants_examples, self.writers)) else None

    def evaluation(self, record: dict, examples: Examples | None) -> None:
        self._write(record | self.wall)
        if examples and examples.found:
            for writer in filter(_wants_examples, self.writers):
                writer.write_examples(record, *examples.arrays())

    def _write(self, record: dict) -> None:
        for writer in self.writers:
            writer.write(record)

    def sync(self) -> None:
        """What is written is on the disk. Raises OSError where it is not."""
        self.writers[0].sync()

    def close(self, say) -> None:
        """The last writer first, the log itself last. One that cannot be finished is worth a remark, not the run."""
        for writer in reversed(self.writers):
            try:
                writer.close()
            except Exception as error:
                say(f"{type(writer).__name__} could not be finished: {error}")


def _wants_examples(writer) -> bool:
    return getattr(writer, "wants_examples", False)
