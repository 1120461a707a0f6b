"""Clock of a run: seconds of training, and of the activities that do not count as training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jaxdp.checkpoint.progress import Progress


class Clock:
    """Adds the seconds of steps and of other activities to the progress of a run, and measures its throughput.

    Training seconds are those between two steps, without evaluation, saving, audits and profiling.
    command_start: `time.monotonic()` at the start of the command.
    """

    def __init__(self, progress: Progress, command_start: float) -> None:
        self.progress, self.command_start = progress, command_start
        self.earlier_seconds = progress.wall_seconds  # of earlier sessions
        self.last_step_end = time.perf_counter()
        self.is_first_step = True
        self.restart_throughput()

    @property
    def wall_seconds(self) -> float:
        """Time since the start of the run's first session, without the time between sessions."""
        return self.earlier_seconds + time.monotonic() - self.command_start

    def restart(self) -> None:
        """Start the time of the next step now."""
        self.last_step_end = time.perf_counter()

    def end_step(self, images: int) -> dict[str, float]:
        """Count a step of so many images, from the end of the previous one or from `restart`.

        Returns fields of its record, with the throughput since the last call of `restart_throughput`.
        """
        now = time.perf_counter()
        seconds, self.last_step_end = now - self.last_step_end, now
        self.progress.training_seconds += seconds
        self._images += images
        self._seconds += seconds
        if self.is_first_step:
            self.progress.first_step_seconds = time.monotonic() - self.command_start
            self.is_first_step = False
        speed = self._images / self._seconds
        return {"images_per_second": speed, "input_seconds": self._input_seconds, "wall_seconds": self.wall_seconds}

    def add_input_seconds(self, seconds: float) -> None:
        """Count time for which the devices waited for images."""
        self.progress.input_seconds += seconds
        self._input_seconds += seconds

    def restart_throughput(self) -> None:
        self._images, self._seconds, self._input_seconds = 0, 0.0, 0.0

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave the time of the block out of the time of the current step: it was not spent on training."""
        began = time.perf_counter()
        yield
        self.last_step_end += time.perf_counter() - began

    @contextmanager
    def paused(self, activity: str) -> Iterator[None]:
        """Count the time of the block as an activity (see `Progress.add_seconds`), and restart the time of the step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.restart()
            self.progress.add_seconds(activity, self.last_step_end - started)
