"""The process that sends a run to one tracker: `python -m jaxdp.trackers.sender TRACKER CLIENT WORKDIR TARGET [URL]`.

`jaxdp.trackers.supervisor` starts it and writes commands to its stdin, one line each: "start" when the log is that of this
session, "end OUTCOME" when the session has ended. It answers on stdout with events as JSON, one line each:

    {"connected": PLACE} | {"rejected": REASON, "hint": HINT} | {"unavailable": REASON} | {"warning": TEXT}
    {"sent": POSITION} | {"done": true}

It reads what it sends from the run directory, so nothing is lost if it, the run or the tracker dies. The outcome is "finished",
"stopped", "failed", or "killed" if stdin ends without a command: then it has `KILLED_SECONDS` for the last lines of the log.
"""

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from jaxdp.errors import first_line
from jaxdp.records import LOG
from jaxdp.trackers.client import Rejected, TrackerClient, Unavailable, position
from jaxdp.trackers.log_tail import LogTail
from jaxdp.trackers.run_files import TrackerState, exclusive, pictures, run_facts

POLL_SECONDS = 1.0
DESCRIBE_SECONDS = 30.0  # between two looks at the newest checkpoint
KILLED_SECONDS = 10.0
SHORTEST_RETRY, LONGEST_RETRY = 1.0, 30.0  # seconds between attempts to reach the tracker


class Inbox:
    """The commands received so far. outcome: of the session, None while it runs."""

    def __init__(self) -> None:
        self.started, self.outcome = False, ""
        self._changed = threading.Condition()

    def receive(self, command: str) -> None:
        with self._changed:
            verb, _, outcome = command.strip().partition(" ")
            self.started = True
            if verb == "end" and not self.outcome:
                self.outcome = outcome
            self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the next command, at most `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    def wait_for_start(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.started)

    def wait_for_end(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.outcome, seconds)


class Sender:
    """Sends the log of a run in order, beginning after the last record that the tracker has.

    report: receives events. url: of the run, if `workdir` is its local copy.
    """

    def __init__(
        self,
        client: TrackerClient,
        workdir: Path,
        state: TrackerState,
        *,
        inbox: Inbox,
        report: Callable[[dict[str, Any]], None],
        url: str | None = None,
    ) -> None:
        self.url = url
        self.client, self.workdir, self.state, self.inbox, self.report = client, workdir, state, inbox, report
        self.tail: LogTail | None = None
        self.position: int | None = None  # of the last record at the tracker; None if it must be asked
        self._was_connected = False
        self._described = -math.inf  # monotonic time
        self._config_refused = False

    def run(self) -> None:
        """Send until the end of the session. Raises Rejected if the tracker's run cannot be opened."""
        with ExitStack() as self._files:
            self._run()

    def _run(self) -> None:
        retry = SHORTEST_RETRY
        while True:
            outcome = self.inbox.outcome  # before the log is read: its last lines are written before the outcome
            try:
                if self.position is None:
                    self._connect()
                if self.inbox.started:
                    self._send_new()
                    if outcome:
                        self._finish(outcome)
                        return
                retry = SHORTEST_RETRY
                self.inbox.wait(POLL_SECONDS) if self.inbox.started else self.inbox.wait_for_start()
            except Exception as error:
                if isinstance(error, Rejected) and not self._was_connected:
                    raise
                self.position = None
                self.report({"unavailable": first_line(error) if isinstance(error, (Unavailable, Rejected)) else _name(error)})
                traceback.print_exc()
                self.inbox.wait_for_end(retry) if not outcome else self.inbox.wait(min(retry, 2 * SHORTEST_RETRY))
                retry = min(2 * retry, LONGEST_RETRY)

    def _connect(self) -> None:
        self.position = self.client.connect(run_facts(self.workdir, self.url).name)
        self._was_connected, self._described = True, -math.inf
        if self.tail is not None:
            self.tail.rewind()
        self.report({"connected": self.client.place})

    def _send_new(self) -> None:
        """Send what the log has beyond the tracker's last record."""
        assert self.position is not None
        if self.tail is None:
            if not (self.workdir / LOG).exists():  # the session ended before its first record
                return
            self.tail = self._files.enter_context(LogTail(self.workdir / LOG))
            self.state.set_complete(False)
        self._describe()
        while records := self.tail.read():
            new = [record for record in records if position(record) > self.position]
            if new:
                self.client.send(new, pictures(self.workdir))
                self.position = position(new[-1])
                self.report({"sent": self.position})

    def _describe(self) -> None:
        """Show the configuration and the newest checkpoint, from time to time."""
        if self._config_refused or time.monotonic() - self._described < DESCRIBE_SECONDS:
            return
        self._described = time.monotonic()
        try:
            self.client.describe(run_facts(self.workdir, self.url))
        except Rejected as error:
            self._config_refused = True
            self.report({"warning": f"the configuration was not sent: {error.reason}"})

    def _finish(self, outcome: str) -> None:
        self.client.finish(outcome, run_facts(self.workdir, self.url))
        self.state.set_complete(outcome == "finished")
        self.report({"sent": self.position, "done": True})


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def main(arguments: list[str]) -> None:
    """See the module's docstring. CLIENT is the name of a class, as `module:class`. WORKDIR is the local copy of URL."""
    tracker, client, workdir, target, *url = arguments
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what clients print is no event
    lock, inbox, path = threading.Lock(), Inbox(), Path(workdir)

    def report(event: dict[str, Any]) -> None:
        with lock, contextlib.suppress(OSError):  # OSError: the run is gone
            print(json.dumps(event), file=output, flush=True)

    def read_commands() -> None:
        for command in sys.stdin:
            inbox.receive(command)
        if not inbox.outcome:
            threading.Timer(KILLED_SECONDS, os._exit, [1]).start()
            inbox.receive("end killed")

    threading.Thread(target=read_commands, daemon=True).start()
    with exclusive(path, tracker):
        state = TrackerState(path, tracker, target)
        try:
            opened = resolve_name(client)(path, state, lambda text: report({"warning": text}))
            Sender(opened, path, state, inbox=inbox, report=report, url=url[0] if url else None).run()
        except Rejected as error:
            report({"rejected": error.reason, "hint": error.hint})
    os._exit(0)  # without the exit hooks of clients, which may wait for the network


if __name__ == "__main__":
    main(sys.argv[1:])
