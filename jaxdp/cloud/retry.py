"""Repeats requests to object storage that fail for a while, with growing pauses."""

import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from jaxdp.cloud.location import Location, open_location
from jaxdp.errors import StorageError, print_safe

START_SECONDS = 20.0  # how long failing requests are repeated before a run begins, and by commands
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0  # seconds between two attempts: a random part, at least half
QUIET_SECONDS = 2.0  # failures that last less long are not reported
Result = TypeVar("Result")


class Patience:
    """Repeats failed requests for up to `seconds`. Threads share it, and report an interruption once.

    notice: receives a line when requests have failed for a while, and one when they succeed again. while_waiting: called
    several times a second during a pause.
    """

    def __init__(self, seconds: float, notice: Callable[[str], Any], while_waiting: Callable[[], Any] = lambda: None) -> None:
        self.seconds, self.notice, self.while_waiting = seconds, notice, while_waiting
        self._lock, self._reported = threading.Lock(), False
        self._failing_since: float | None = None

    def __call__(self, request: Callable[[], Result]) -> Result:
        """The result of a request. Raises StorageError at once if it is permanent, else when the time is over."""
        began, pause = None, FIRST_PAUSE
        while True:
            try:
                result = request()
            except StorageError as error:
                now = time.monotonic()
                began = now if began is None else began
                if error.permanent or now - began >= self.seconds:
                    raise
                self._record_failure(error, now)
                sleep(pause * random.uniform(0.5, 1), self.while_waiting)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                if self._failing_since is not None:
                    self._record_success()
                return result

    def _record_failure(self, error: StorageError, now: float) -> None:
        with self._lock:
            if self._failing_since is None:
                self._failing_since = now
            report = now - self._failing_since >= QUIET_SECONDS and not self._reported
            self._reported = self._reported or report
        if report:
            self.notice(f"waiting for object storage: {error}; retrying")

    def _record_success(self) -> None:
        with self._lock:
            since, reported = self._failing_since, self._reported
            self._failing_since, self._reported = None, False
        if reported and since is not None:
            self.notice(f"object storage answers again, after {time.monotonic() - since:.0f} s")


def sleep(seconds: float, while_waiting: Callable[[], Any]) -> None:
    """Sleep; `while_waiting` is called several times a second, and may raise."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        while_waiting()
        time.sleep(min(left, 0.2))


def open_patiently(
    url: str,
    field: str,
    *,
    notice: Callable[[str], Any] = lambda line: print_safe(line, sys.stderr),
    while_waiting: Callable[[], Any] = lambda: None,
) -> Location:
    """`open_location`, with requests that are repeated while they fail. notice, while_waiting: see `Patience`."""
    return replace(open_location(url, field), patience=Patience(START_SECONDS, notice, while_waiting))
