"""Asking a run to stop: SIGTERM and SIGINT are noted, and looked at where the run can be saved."""

import os
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

from jaxdp.errors import EXIT_STOPPED, OneLine
from jaxdp.parallel.alone import Alone

POLL_SECONDS = 0.1


class StopAsked(Exception):
    """Raised where a run looks whether it was asked to stop; the loop saves, and raises `Stopped`."""


class Stopped(OneLine, Exception):
    """The run was asked to stop and can be continued: one line with where it is and how to go on."""

    exit_code = EXIT_STOPPED


class StoppedAtOnce(OneLine, KeyboardInterrupt):
    """A second signal came while the run was being saved for the first one."""


class Signals:
    """While entered, in the main thread: the first SIGTERM or SIGINT is noted, a second one ends the process at once.

    asked: the name of the signal that has come, or None. leave: what a second one does; by default it ends the process with 1.
    team: the processes of the run, all of which stop at the same point. wanted: what they have agreed to do beside stopping.
    """

    def __init__(self, leave=None):
        self.asked: str | None = None
        self.came = False
        self.leave = leave or _leave
        self.before = {}
        self.team = Alone()
        self.wanted: set[str] = set()

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _on_signal(self, number, frame):
        if self.came:
            self.leave()
        self.came = True
        self.asked = self.asked or signal.Signals(number).name  # the others' signal may have been told of before

    def look(self) -> None:
        """Raise StopAsked if the run is to stop here. All processes of a run look in the same order."""
        self._do(self.team.point(self.asked))

    def look_alone(self) -> None:
        """Raise StopAsked if this process was asked to stop, whatever the others do."""
        if self.asked:
            raise StopAsked(self.asked)

    def look_waiting(self) -> None:
        """Raise StopAsked if the run is to stop here: where this process waits for the others."""
        self._do(self.team.agreed_here(self.asked))

    def result(self, future: Future):
        """The result of a future. Raises StopAsked as soon as the run is to stop here, the future going on."""
        while not wait([future], POLL_SECONDS).done:
            self.look_waiting()
        return future.result()

    def run(self, work, *arguments):
        """What work(*arguments) gives: done in a thread, since what goes on in the main thread keeps signals waiting."""
        thread = ThreadPoolExecutor(1)
        try:
            return self.result(thread.submit(work, *arguments))
        finally:
            thread.shutdown(wait=False)

    def _do(self, agreed: dict | None) -> None:
        if agreed and agreed["what"] == "stop":
            self.asked = self.asked or agreed["why"]
            raise StopAsked
        if agreed:
            self.wanted.add(agreed["what"])


def _leave() -> None:
    told = b"jaxdp: stopped at once by a second signal; the same command goes on from the last checkpoint, if there is one\n"
    os.write(sys.stderr.fileno(), told)
    os._exit(1)
