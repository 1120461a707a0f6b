"""Clock of a run: seconds of training, and of the activities that do not count as training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jaxdp.checkpoint.progress import Progress


class StepTimer:
    """Adds the seconds of steps and of other activities to the progress of a run.

    Training seconds are those between two steps, without evaluation, saving, audits and profiling.
    command_start: `time.monotonic()` at the start of the command.
    """

    def __init__(self, progress: Progress, command_start: float) -> None:
        self.progress, self.command_start = progress, command_start
        self.last_step_end = time.perf_counter()
        self.is_first_step = True

    def restart(self) -> None:
        """Start the time of the next step now."""
        self.last_step_end = time.perf_counter()

    def end_step(self) -> float:
        """Seconds since the previous step ended or the timer was restarted."""
        now = time.perf_counter()
        seconds, self.last_step_end = now - self.last_step_end, now
        self.progress.add_seconds("training", seconds)
        if self.is_first_step:
            self.progress.first_step_seconds = time.monotonic() - self.command_start
            self.is_first_step = False
        return seconds

    def exclude(self, seconds: float) -> None:
        """Remove seconds that were not spent on training from the time of the current step."""
        self.last_step_end += seconds

    @contextmanager
    def paused(self, activity: str) -> Iterator[None]:
        """Count the time of the block as `activity` ("evaluation", "saving" or "audit"), and restart the time of the step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.restart()
            self.progress.add_seconds(activity, self.last_step_end - started)

    @contextmanager
    def waiting_for_compiler(self) -> Iterator[None]:
        """Count the time of the block as compilation."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.progress.add_seconds("compilation", time.perf_counter() - started)
