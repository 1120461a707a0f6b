"""The process that sends a run to one tracker: `python -m jaxdp.trackers.sender JSON`, with the fields of `Task`.

`jaxdp.trackers.tracker` starts this process and shows the lines that it prints. It writes the outcome of the session to the
process's stdin: finished, stopped or failed. The process exits with code 0 when the tracker has everything, and with
EXIT_CONFIG after the line "rejected", tab, reason, tab, hint. If stdin ends without an outcome, the run was killed, and the
process ends within `KILLED_SECONDS`.

It reads what it sends from the run directory, so nothing is lost if the process, the run or the tracker dies.
"""

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol

from jaxdp.errors import EXIT_CONFIG, first_line, printable
from jaxdp.files import open_regular
from jaxdp.run_records import LOG
from jaxdp.trackers.run_files import (
    Rejected,
    RunFacts,
    TrackerState,
    Unavailable,
    exclusive,
    next_records,
    position,
    run_facts,
)

POLL_SECONDS = 1.0
DESCRIBE_SECONDS = 30.0  # between two updates about the newest checkpoint
KILLED_SECONDS = 10.0
SHORTEST_RETRY, LONGEST_RETRY = 1.0, 30.0  # seconds between attempts to reach the tracker


class TrackerClient(Protocol):
    """The run of one tracker. Methods block, and raise `Unavailable` or `Rejected`; they are called by one thread.

    place: where a person finds the run, after `connect`.
    """

    place: str

    def connect(self, name: str) -> int:
        """Continue the tracker's run, or create it under this name. Returns the position of the last record it holds."""

    def describe(self, facts: RunFacts) -> None:
        """Show the configuration and the newest checkpoint."""

    def send(self, records: Sequence[dict[str, Any]]) -> None:
        """Add records to the run, and the pictures of evaluations: all of them, or none and an exception."""

    def finish(self, outcome: str, facts: RunFacts) -> None:
        """Show the result and end the tracker's run, after everything has arrived."""


class Task(NamedTuple):
    """What to send, and where to. client: a class, as `module:class`. workdir: the local copy, if `location` is a URL."""

    tracker: str
    client: str
    target: str
    workdir: str
    location: str


class Sender:
    """Sends the log of a run in order, beginning after the last record that the tracker has. show: receives lines."""

    def __init__(self, client: TrackerClient, task: Task, *, state: TrackerState, show: Callable[[str], Any]) -> None:
        self.client, self.task, self.state, self.show = client, task, state, show
        self.workdir = Path(task.workdir)
        self.outcome, self.ended = "", threading.Event()
        self.position = self.offset = 0  # of the last record at the tracker; bytes of the log that were sent
        self._described = -math.inf  # monotonic time
        self._has_connected = self._is_connected = self._is_down = self._config_refused = False

    def end(self, outcome: str) -> None:
        """The session has ended; another thread may call this."""
        self.outcome = outcome
        self.ended.set()

    def run(self) -> None:
        """Send until the end of the session. Raises Rejected if the tracker's run cannot be opened."""
        retry = SHORTEST_RETRY
        while True:
            outcome = self.outcome  # read before the log, whose last lines are written before the outcome
            try:
                self._send_new()
                if outcome:
                    self.client.finish(outcome, self._facts())
                    return self.state.set_complete(outcome == "finished")
                retry = SHORTEST_RETRY
                self.ended.wait(POLL_SECONDS)
            except Exception as error:
                if isinstance(error, Rejected) and not self._has_connected:
                    raise
                self._report(error)
                self.ended.wait(retry) if not outcome else time.sleep(min(retry, 2 * SHORTEST_RETRY))
                retry = min(2 * retry, LONGEST_RETRY)

    def _send_new(self) -> None:
        """Send the log's records after the tracker's last record."""
        if not self._is_connected:
            self.position, self.offset = self.client.connect(self._facts().name), 0
            self.show(self.client.place)
            self._has_connected, self._is_connected, self._is_down, self._described = True, True, False, -math.inf
            self.state.set_complete(False)
        self._describe()
        with open_regular(self.workdir / LOG) as log:
            log.seek(self.offset)
            while records := next_records(log):
                new = [record for record in records if position(record) > self.position]
                if new:
                    self.client.send(new)
                    self.position = position(new[-1])
                self.offset = log.tell()

    def _report(self, error: Exception) -> None:
        """Report once that the tracker does not answer; the next attempt asks it for its last record."""
        traceback.print_exc()
        is_own = isinstance(error, (Unavailable, Rejected))
        if not self._is_down:
            reason = first_line(error) if is_own else f"{type(error).__name__}: {first_line(error)}"
            self.show(f"no connection ({printable(reason)}); training continues")
        self._is_down, self._is_connected = True, False

    def _describe(self) -> None:
        """Show the configuration and the newest checkpoint, from time to time."""
        if self._config_refused or time.monotonic() - self._described < DESCRIBE_SECONDS:
            return
        self._described = time.monotonic()
        try:
            self.client.describe(self._facts())
        except Rejected as error:
            self._config_refused = True
            self.show(f"the configuration was not sent: {error.reason}")

    def _facts(self) -> RunFacts:
        return run_facts(self.workdir, self.task.location)


def main(argument: str) -> None:
    """See the module's docstring."""
    task = Task(**json.loads(argument))
    output = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")  # the name of a directory may be any bytes
    os.dup2(2, 1)  # what clients print is not shown

    def show(line: str) -> None:
        with contextlib.suppress(OSError):  # the run is gone
            print(line, file=output, flush=True)

    path, code = Path(task.workdir), 0
    with exclusive(path, task.tracker):
        state = TrackerState(path, task.tracker, task.target)
        try:
            sender = Sender(resolve_name(task.client)(path, state, show), task, state=state, show=show)
            threading.Thread(target=_wait_for_outcome, args=[sender], daemon=True).start()
            sender.run()
        except Rejected as error:
            show(f"rejected\t{error.reason}\t{error.hint}")
            code = EXIT_CONFIG
    os._exit(code)  # without the exit hooks of clients, which may wait for the network


def _wait_for_outcome(sender: Sender) -> None:
    outcome = sys.stdin.readline().strip()
    if not outcome:
        threading.Timer(KILLED_SECONDS, os._exit, [1]).start()
    sender.end(outcome or "killed")


if __name__ == "__main__":
    main(sys.argv[1])
