"""Clock of a run: seconds of training, and of the activities that do not count as training."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple

from jaxdp.checkpoint.progress import Progress


class Completion(NamedTuple):
    """When the devices had completed a step. time: by `time.monotonic()`; training_seconds: by the clock of the run."""

    time: float
    training_seconds: float


class TimedStep(NamedTuple):
    """A step on the devices. input_seconds: how long they waited for its images."""

    completion: Future[Completion]
    input_seconds: float


class Clock:
    """Adds the seconds of steps and of other activities to the progress of a run, and measures its throughput.

    A step lasts from the completion of the previous step on the devices to its own completion. When the host reads its results
    does not matter, because a thread waits for each step. The time stops in evaluations, saves and audits while no step is on
    the devices. command_start: `time.monotonic()` at the start of the command. Close it when done.
    """

    def __init__(self, progress: Progress, command_start: float) -> None:
        self.progress, self.command_start = progress, command_start
        self.earlier_seconds = progress.wall_seconds  # of earlier sessions
        self.is_first_step = True
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._lock = threading.Lock()  # of the state that both threads change: the next four lines
        self._on_devices = self._pauses = 0  # steps; blocks of `excluded`
        self._stopped_at: float | None = None  # since when training time is stopped
        self._stopped_seconds = 0.0  # how long it was stopped before
        self._completed_at = monotonic()  # of the last step
        self._input_seconds = 0.0  # of the step that is started next
        self._sums = [0.0, 0.0, 0.0]  # images, seconds and input seconds since `restart_throughput`
        self.restart()

    @property
    def wall_seconds(self) -> float:
        """Time since the start of the run's first session, without the time between sessions."""
        return self._wall_seconds(monotonic())

    def _wall_seconds(self, now: float) -> float:
        return self.earlier_seconds + now - self.command_start

    def _training_seconds(self, now: float) -> float:
        return (now if self._stopped_at is None else self._stopped_at) - self._stopped_seconds

    def _stop_or_go(self, now: float) -> None:
        """Stop training time while a pause is open and no step is on the devices, and resume it otherwise."""
        if self._pauses and not self._on_devices:
            self._stopped_at = now if self._stopped_at is None else self._stopped_at
        elif self._stopped_at is not None:
            self._stopped_seconds, self._stopped_at = self._stopped_seconds + now - self._stopped_at, None

    def restart(self) -> None:
        """Start the time of the next step now. No step may be on the devices."""
        self._completed_at = monotonic()
        self._counted = self._training_seconds(self._completed_at)

    def start_step(self, wait: Callable[[], Any]) -> TimedStep:
        """Record that a step was started. wait: returns once the devices have completed it."""
        with self._lock:
            self._on_devices += 1
            self._stop_or_go(monotonic())
        step = TimedStep(self._waiter.submit(self._complete, wait), self._input_seconds)
        self._input_seconds = 0.0
        return step

    def _complete(self, wait: Callable[[], Any]) -> Completion:
        try:
            wait()
        finally:
            with self._lock:
                self._on_devices -= 1
                self._completed_at = now = monotonic()
                completion = Completion(now, self._training_seconds(now))
                self._stop_or_go(now)
        return completion

    def end_step(self, step: TimedStep, images: int) -> dict[str, float]:
        """Count a step of so many images, once it is complete; in the order of their start.

        Returns fields of its record, with the throughput since the last call of `restart_throughput`.
        """
        completion = step.completion.result()
        seconds, self._counted = completion.training_seconds - self._counted, completion.training_seconds
        self.progress.training_seconds += seconds
        self.progress.input_seconds += step.input_seconds
        if self.is_first_step:
            self.progress.first_step_seconds = completion.time - self.command_start
            self.is_first_step = False
        self._sums = [total + value for total, value in zip(self._sums, (images, seconds, step.input_seconds), strict=True)]
        images_seen, training, waited = self._sums
        wall_seconds = self._wall_seconds(completion.time)
        return {"images_per_second": images_seen / training, "input_seconds": waited, "wall_seconds": wall_seconds}

    def add_input_wait(self, seconds: float) -> None:
        """Record how long the host has waited, until now, for the next step's images; idle devices have waited too."""
        with self._lock:
            idle = 0.0 if self._on_devices else monotonic() - self._completed_at
        self._input_seconds += min(seconds, idle)

    def restart_throughput(self) -> None:
        self._sums = [0.0, 0.0, 0.0]

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave the time of the block, while no step is on the devices, out of the time of the next step."""
        self._pause(1)
        try:
            yield
        finally:
            self._pause(-1)

    def _pause(self, change: int) -> None:
        with self._lock:
            self._pauses += change
            self._stop_or_go(monotonic())

    @contextmanager
    def paused(self, activity: str) -> Iterator[None]:
        """Exclude the time of the block, and count it as an activity (see `Progress.add_seconds`)."""
        started = monotonic()
        try:
            with self.excluded():
                yield
        finally:
            self.progress.add_seconds(activity, monotonic() - started)

    def close(self) -> None:
        """End the thread after the steps on the devices."""
        self._waiter.shutdown(wait=False)
