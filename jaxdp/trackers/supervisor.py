"""Beside the run: starts a process for each tracker, tells it when the session starts and ends, and never waits for long."""

import contextlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jaxdp.config import Config
from jaxdp.distributed.preemption import ForcedStop, Stopped, StopTraining
from jaxdp.errors import ConfigError, plural, printable
from jaxdp.files import write_atomically
from jaxdp.loggers.example_grid import example_grid
from jaxdp.records import LOG, read_log
from jaxdp.trackers.client import NO_POINT, position
from jaxdp.trackers.run_files import FOLDER, TrackerState, picture_path

CLIENTS = {"wandb": "jaxdp.trackers.wandb_client:WandbClient", "mlflow": "jaxdp.trackers.mlflow_client:MlflowClient"}
CONNECT_SECONDS = 10.0  # to wait for an answer before training
END_SECONDS = 30.0  # to wait for the last points of a finished run
QUIET_SECONDS = 2.0  # of that without a message
STOP_SECONDS = 5.0  # the same after a stop signal or an error, when a scheduler may be about to kill the process
CHECK_SECONDS = 0.1


class TrackerProcess:
    """The process of one tracker. info: shows a line. url: of the run, if `workdir` is its local copy."""

    def __init__(self, tracker: str, workdir: Path, *, target: str, info: Callable[[str], Any], url: str | None = None) -> None:
        self.tracker, self.workdir, self.target, self.info = tracker, workdir, target, info
        self.is_new = not TrackerState(workdir, tracker, target).exists
        self.log = workdir / FOLDER / f"{tracker}.log"
        self.log.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "jaxdp.trackers.sender", tracker, CLIENTS[tracker], os.path.abspath(workdir), target]
        command += [] if url is None else [url]
        pipe = subprocess.PIPE
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True, bufsize=0)
        self.sent = NO_POINT
        self.error: ConfigError | None = None
        self.answered = self.done = self.ended = False
        self.is_down = self._closing = False
        self._changed = threading.Condition()
        assert self.process.stdin is not None
        self._input = self.process.stdin
        self._reader = threading.Thread(target=self._read_events, name=f"{tracker} events", daemon=True)
        self._reader.start()

    def tell(self, command: str) -> None:
        with contextlib.suppress(OSError):  # the process has ended, which `_read_events` reports
            self._input.write(f"{command}\n".encode())

    def wait_until(self, event: str, deadline: float, while_waiting: Callable[[], Any]) -> None:
        """Wait until "answered" or "done", until the process has ended, or until the deadline of `time.monotonic()`."""
        with self._changed:
            while not (getattr(self, event) or self.ended or while_waiting()) and time.monotonic() < deadline:
                self._changed.wait(CHECK_SECONDS)

    def abandon(self) -> None:
        """Close the input of the process, which then ends within seconds, and do not wait."""
        self._closing = True
        self._input.close()

    def kill(self) -> None:
        """End the process and what it has started."""
        self._closing = True
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._input.close()
        self._reader.join(CHECK_SECONDS * 20)

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as events:
            for line in events:
                with contextlib.suppress(ValueError):
                    self._handle(json.loads(line))
        code = self.process.wait()
        if not (self.done or self.error or self._closing):
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.info(f"{self.tracker}: its process has ended ({how}, see {self.log}); training continues without it")
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def _handle(self, event: dict[str, Any]) -> None:
        """Show the event if it is news, then note it."""
        if "connected" in event and (self.is_down or not self.answered):
            self.info(f"{self.tracker}: {event['connected']}")
        elif "unavailable" in event and not self.is_down:
            self.info(f"{self.tracker}: no connection ({printable(event['unavailable'])}); training continues")
        elif "warning" in event:
            self.info(f"{self.tracker}: {event['warning']}")
        with self._changed:
            if "rejected" in event:
                self.error = ConfigError(f"logging.{self.tracker}", self.target, reason=event["rejected"], hint=event["hint"])
            if "connected" in event or "unavailable" in event:
                self.answered, self.is_down = True, "unavailable" in event
            self.sent, self.done = event.get("sent", self.sent), event.get("done", self.done)
            self._changed.notify_all()


def check_packages(config: Config) -> None:
    """Raise ConfigError if the package of a tracker is not installed. Does not import it."""
    for name in CLIENTS:
        target = getattr(config.logging, name)
        spec = importlib.util.find_spec(name) if target is not None else None
        if target is not None and (spec is None or spec.origin is None):  # without origin: a directory of that name
            hint = f"pip install -e '.[{name}]', or omit it"
            raise ConfigError(f"logging.{name}", target, reason=f"the package {name} is not installed", hint=hint)


class Trackers:
    """The trackers of a session: a context manager, and a writer that notes the start of the log and saves pictures.

    config: None on other ranks than 0, which send nothing. class_names: may be shorter than the number of classes.
    while_waiting: called ten times a second in waits before training and after it; a true value ends the wait.
    url: of the run, if `workdir` is its local copy.
    """

    def __init__(
        self,
        config: Config | None,
        workdir: Path,
        *,
        class_names: Sequence[str] = (),
        info: Callable[[str], Any] = print,
        while_waiting: Callable[[], Any] = lambda: False,
        url: str | None = None,
    ) -> None:
        self.url = url
        self.workdir, self.class_names, self.info, self.while_waiting = workdir, class_names, info, while_waiting
        self.targets = {name: target for name in CLIENTS if config and (target := getattr(config.logging, name)) is not None}
        if os.environ.get("WANDB_MODE") == "disabled":
            self.targets.pop("wandb", None)
        self.processes: list[TrackerProcess] = []
        self._started = False

    def connect(self) -> None:
        """Start the processes and wait for a short time until each has opened its run. Raises ConfigError if one cannot."""
        for name, target in self.targets.items():
            try:
                self.processes.append(TrackerProcess(name, self.workdir, target=target, info=self.info, url=self.url))
            except OSError as error:  # such as a full disk
                self.info(f"{name}: its process cannot start ({error}); training continues without it")
        deadline = time.monotonic() + CONNECT_SECONDS
        for one in self.processes:
            one.wait_until("answered", deadline, self.while_waiting)
            if one.error and one.is_new:
                for other in self.processes:
                    other.kill()
                self.processes = []
                raise one.error
            if one.error:
                self.info(f"{one.error}; training continues without it")
            elif not (one.answered or one.ended):
                one.is_down = True
                self.info(f"{one.tracker}: no answer within {CONNECT_SECONDS:g} s; training continues")

    def send_finished(self) -> None:
        """Send what the trackers lack of a run that has finished before."""
        state_of = partial(TrackerState, self.workdir)
        self.targets = {name: target for name, target in self.targets.items() if not state_of(name, target).complete}
        self.connect()
        sending = self.processes
        self.finish("finished")
        for one in sending:
            if one.done:
                self.info(f"{one.tracker}: everything has arrived")

    def write(self, record: dict[str, Any]) -> None:
        """The log is that of this session from its first record on: the processes read it."""
        if not self._started:
            self._started = True
            for one in self.processes:
                one.tell("start")

    def write_examples(self, record: dict[str, Any], *arrays: np.ndarray) -> None:
        from PIL import Image

        png = io.BytesIO()
        Image.fromarray(example_grid(*arrays, class_names=self.class_names)).save(png, "png")
        write_atomically(picture_path(self.workdir, record["samples"]), png.getvalue())

    def close(self) -> None:
        """The session ends later, see `finish`."""

    def finish(self, outcome: str) -> None:
        """Tell the outcome of the session and wait for a limited time until everything has arrived."""
        running, self.processes = self.processes, []
        for one in running:
            one.tell(f"end {outcome}")
        started = time.monotonic()
        finished = outcome == "finished"
        if finished:
            for one in running:
                one.wait_until("done", started + QUIET_SECONDS, self.while_waiting)
            if waiting_for := [one.tracker for one in running if not (one.done or one.ended)]:
                names = " and ".join(waiting_for)
                self.info(f"waiting at most {END_SECONDS:g} s for {names} to receive the last points; Ctrl-C skips this")
        for one in running:
            if finished:
                one.wait_until("done", started + END_SECONDS, self.while_waiting)
            else:  # the stop signal is no reason not to wait
                one.wait_until("done", started + STOP_SECONDS, lambda: False)
            one.kill()
            if not one.done:
                self._report_unsent(one, finished)

    def _report_unsent(self, one: TrackerProcess, finished: bool) -> None:
        log = self.workdir / LOG
        unsent = sum(position(record) > one.sent for record in read_log(log)) if log.exists() else 0
        what = f"{plural(unsent, 'line')} of {LOG}" if unsent else "the end of the run"
        if unsent or finished:
            self.info(f"{one.tracker}: not confirmed: {what}; the same command sends the rest")

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, ForcedStop):
            self.finish("stopped" if issubclass(kind, (Stopped, StopTraining)) else "failed")
        for one in self.processes:
            one.abandon()
