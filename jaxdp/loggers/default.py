"""The callbacks of every run that show and record it: the console, metrics.jsonl and training.png."""

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from jaxdp.errors import print_safe
from jaxdp.files import open_regular
from jaxdp.loggers.console import Screen
from jaxdp.run_records import LOG, TIMING, is_plausible, scan_log, to_json, without_nan
from jaxdp.training.callback import Callback
from jaxdp.training.result import TrainResult
from jaxdp.training.run import Run


class Console(Callback):
    """Shows the run on a screen."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def on_start(self, run: Run) -> None:
        steps = run.progress.steps
        total = steps + run.plan.steps_after(run.progress.samples)
        self.screen.begin(total, steps)

    def after_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self.screen.step(metrics)

    def after_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        self.screen.evaluated(evaluation)

    def on_end(self, run: Run, result: TrainResult | None) -> None:
        self.screen.end()


class JsonLines:
    """Appends each record to a file as one line of JSON, without buffering.

    buffer_when_full: if the disk is full, keep lines in memory and write them when there is space again; reported once to
    `info`.
    """

    def __init__(self, path: Path, *, buffer_when_full: bool = False, info: Callable[[str], Any] = print_safe) -> None:
        self.path, self.buffer_when_full, self.info = path, buffer_when_full, info
        self.file = open_regular(path, "ab")
        self._lock = Lock()  # the saving thread calls `sync` while the training loop writes
        self._buffer = b""
        self._full_reported = False

    def write(self, record: Mapping[str, Any]) -> None:
        try:
            self._flush(to_json(record).encode() + b"\n")
        except OSError as error:
            if not (self.buffer_when_full and error.errno in (errno.ENOSPC, errno.EDQUOT)):
                raise OSError(error.errno, error.strerror, str(self.path)) from None
            if not self._full_reported:
                self._full_reported = True
                self.info(
                    f"{self.path}: {error.strerror}; training continues, and the log is written when there is space again"
                )

    def _flush(self, data: bytes = b"") -> None:
        """Write the buffer and `data`."""
        with self._lock:
            self._buffer += data
            while self._buffer:
                written = self.file.write(self._buffer)
                self._buffer = self._buffer[written:]

    def sync(self) -> None:
        """Flush all lines to the disk. Raises OSError if that fails."""
        self._flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self.file.close()


class MetricsFile(Callback):
    """Writes the records of the log to metrics.jsonl.

    A single process keeps lines in memory while the disk is full; several processes end. An evaluation that repeats the last
    record, after a change that did not affect it, is not written again.
    """

    def on_start(self, run: Run) -> None:
        self.file = JsonLines(run.workdir / LOG, buffer_when_full=run.processes.num_processes == 1, info=run.info)
        self.logged = [_without_timing(record) for record in run.logged]
        run.before_manifest = self.file.sync

    def after_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if run.is_logged:
            self._write(run, metrics)

    def after_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        if _without_timing(without_nan(evaluation)) not in self.logged:
            self._write(run, evaluation)

    def _write(self, run: Run, record: Mapping[str, Any]) -> None:
        with run.processes.status.performing("writing the log"):
            self.file.write(record)
        run.progress.records += 1

    def on_end(self, run: Run, result: TrainResult | None) -> None:
        self.file.close()


class TrainingPlot(Callback):
    """Draws training.png from metrics.jsonl at the end of the session."""

    detach_on_error = True

    def on_end(self, run: Run, result: TrainResult | None) -> None:
        from jaxdp.loggers.plot import plot_training

        if records := scan_log(run.workdir / LOG, is_plausible)[0]:
            plot_training(records, run.workdir / "training.png", run.config)


def _without_timing(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in TIMING}
