"""Ends a process in which a step does not end, after telling where every thread stands."""

import faulthandler
import os
import sys
import threading

TICK_SECONDS = 1.0


class Watchdog:
    """Counts the seconds since `busy` was last called; where they pass `seconds`, prints all threads' stacks and exits with 1.

    The time is counted in ticks of its own thread, so that a process that was stopped and continued is not taken for one that
    hangs. seconds: None for no limit. advice: one line that says how to go on.
    """

    def __init__(self, seconds: float | None, advice: str):
        self.seconds, self.advice = seconds, advice
        self.what, self.ticks = None, 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self):
        if self.seconds is not None:
            self.thread.start()
        return self

    def __exit__(self, *error):
        self.ended.set()

    def busy(self, what: str) -> None:
        """Something begins that must end in time."""
        self.ticks, self.what = 0, what

    def rest(self) -> None:
        """Nothing is under way that must end in time."""
        self.what = None

    def _watch(self) -> None:
        tick = min(TICK_SECONDS, self.seconds / 4)
        while not self.ended.wait(tick):
            self.ticks += 1
            what = self.what
            if what is not None and self.ticks * tick > self.seconds:
                self._end(what)

    def _end(self, what: str) -> None:
        print(
            f"jaxdp: {what} has not ended in {self.seconds:g} seconds. Every thread stands here:", file=sys.stderr, flush=True
        )
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        print(f"jaxdp: {what} has not ended in {self.seconds:g} seconds; {self.advice}", file=sys.stderr, flush=True)
        os._exit(1)
