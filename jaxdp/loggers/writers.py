"""Writers of a run's records. Every record is passed to each writer's `write(record)`; `close()` is called at the end.

A record is a flat dict; RECORD_FIELDS describes its fields.
"""

import errno
import io
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np

from jaxdp.config import training_labels
from jaxdp.errors import ConfigError, first_line
from jaxdp.files import LOG as LOG
from jaxdp.files import open_regular
from jaxdp.loggers.tensorboard import RunInfo, TensorBoard

RECORD_FIELDS = {  # also the table in docs/watching.md
    "step": "steps so far",
    "samples": "training images so far",
    "epoch": "`samples` divided by the number of training images",
    "wall_seconds": "time since the start of the command, over all sessions of the run",
    "phase": "index of the phase, from 0",
    "loss": "training loss of this step's batch, before the update, with label smoothing and mixing",
    "accuracy": "share of this step's batch that was predicted correctly, from 0 to 1",
    "gradient_norm": "norm of the gradient over all trainable parameters",
    "learning_rate": "learning rate of this step",
    "momentum": "momentum of this step",
    "global_batch": "images in this step, on all devices",
    "images_per_second": "training speed of all devices since the last training record",
    "input_seconds": "time since the last training record for which the devices waited for images",
    "skipped_steps": "steps skipped so far for a gradient that is not finite; with loss scaling or `--guard.non-finite skip`",
    "skipped_in_a_row": "skipped steps up to this one without another between them",
    "loss_scale": "factor of the loss in this step; with loss scaling",
    "audit_share": "largest difference that this step's audit found between devices, divided by its bound; in audited steps",
    "waiting_share": "share of the time since the last training record for which devices waited for another process",
    "slowest_rank": "rank of the process that the others waited for most",
    "eval_accuracy": "share of the held-out images whose class is predicted correctly, from 0 to 1",
    "eval_top5": "share whose class is among the five most likely; with six classes or more",
    "eval_loss": "mean cross-entropy of the held-out images, without label smoothing",
    "eval_examples": "held-out images that were counted",
}
# Fields of a record or of result.json that measure time or depend on connections from outside. All other fields are identical
# for every run of a config on a mesh, however often it is interrupted.
TIMING = (
    "images_per_second",
    "input_seconds",
    "wall_seconds",
    "seconds_to_first_step",
    "training_seconds",
    "evaluation_seconds",
    "saving_seconds",
    "audit_seconds",
    "compilation_seconds",
    "sessions",
    "waiting_share",
    "slowest_rank",
    "slowest",
    "refused_connections",
)


def to_json(record: dict[str, Any], indent: int | None = None) -> str:
    """A record as standard JSON: NaN and infinity become null."""
    return json.dumps(without_nan(record), indent=indent, allow_nan=False)


def without_nan(record: dict[str, Any]) -> dict[str, Any]:
    """A record in which null replaces NaN and infinity, which standard JSON does not have."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; leaves out damaged lines and a torn last line."""
    return scan_log(path)[0]


def scan_log(path: Path, accept: Callable[[dict[str, Any]], bool] = lambda record: True) -> tuple[list[dict[str, Any]], int]:
    """(records of a metrics.jsonl, number of damaged lines, without a torn last one). accept: whether a record is intact."""
    records, damaged = [], 0
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            record = parse_record(line)
            if record is not None and accept(record):
                records.append(record)
            elif line.endswith("\n"):
                damaged += 1
    return records, damaged


def parse_record(line: str) -> dict[str, Any] | None:
    """The record in a line of a metrics.jsonl; None for a damaged or torn one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if line.endswith("\n") and isinstance(record, dict) and isinstance(record.get("samples"), int) else None


def is_plausible(record: dict[str, Any]) -> bool:
    """Whether a record has its position, and the fields of jaxdp are numbers that can be drawn, or null."""
    values = (record[name] for name in RECORD_FIELDS.keys() & record.keys() if record[name] is not None)
    numbers = all(isinstance(value, int | float) and abs(value) < 2**63 and not math.isnan(value) for value in values)
    return numbers and record.get("epoch") is not None


class Writer(Protocol):
    """Receives a run's records.

    An optional third method `write_examples(record, images, labels, predicted)` receives a few held-out images after every
    evaluation: uint8 [E, H, W, 3], with their labels and predicted classes, int32 [E] each.
    """

    def write(self, record: dict[str, Any]) -> None:
        """Receive a record."""

    def close(self) -> None:
        """Called once, at the end of the session."""


class NullWriter:
    """Writes nothing."""

    def write(self, record: dict[str, Any]) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class JsonLines:
    """Appends each record to a file as one line of JSON, without buffering.

    buffer_when_full: if the disk is full, keep lines in memory and write them when there is space again; reported once to
    `info`.
    """

    def __init__(self, path: Path, *, buffer_when_full: bool = False, info: Callable[[str], Any] = print) -> None:
        self.path, self.buffer_when_full, self.info = path, buffer_when_full, info
        self.file = open_regular(path, "ab")
        self._lock = Lock()  # the saving thread calls `sync` while the training loop writes
        self._buffer = b""
        self._full_reported = False

    def write(self, record: dict[str, Any]) -> None:
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


class SafeWriter:
    """Wraps a writer whose errors must not stop the run: the first error is reported, and the writer is no longer called.

    The writer receives copies, so that it cannot modify what other writers receive. warn: called with the message.
    """

    def __init__(self, writer: Writer, warn: Callable[[str], Any]) -> None:
        self.writer, self.warn = writer, warn
        self._write_examples = getattr(writer, "write_examples", None)
        self.wants_examples = self._write_examples is not None
        self._failed = False

    def write(self, record: dict[str, Any]) -> None:
        self._call(self.writer.write, lambda: (dict(record),))

    def write_examples(self, record: dict[str, Any], *arrays: np.ndarray) -> None:
        if self._write_examples:
            self._call(self._write_examples, lambda: (dict(record), *(array.copy() for array in arrays)))

    def close(self) -> None:
        try:
            self.writer.close()
        except Exception as error:
            if not self._failed:
                self.warn(f"{type(self.writer).__name__} could not be closed: {first_line(error)}")

    def _call(self, method: Callable[..., Any], arguments: Callable[[], tuple]) -> None:
        if self._failed:
            return
        try:
            method(*arguments())
        except Exception as error:
            self._failed = True
            name, reason = type(self.writer).__name__, f"{type(error).__name__}: {first_line(error)}"
            self.warn(f"{name} raised {reason}; training continues without it and still writes {LOG}")


def wrap_writers(writers: Any) -> list[SafeWriter]:
    """The caller's writers, or a single one, wrapped so that errors become warnings. Raises ConfigError for other objects."""
    writers = list(writers) if isinstance(writers, (list, tuple)) else [writers]
    for writer in writers:
        if isinstance(writer, type) or not all(callable(getattr(writer, name, None)) for name in ("write", "close")):
            raise ConfigError(
                "writers", writer, reason="not a writer", hint="use a list of objects with write(record) and close()"
            )
    return [SafeWriter(writer, lambda text: warnings.warn(text, RuntimeWarning, stacklevel=2)) for writer in writers]


class PlotWriter:
    """Draws training.png from the log at the end of the session. labels: of the training loss, see `plot_training`."""

    def __init__(self, path: Path, log: Path, labels: str = "") -> None:
        self.path, self.log, self.labels = path, log, labels

    def write(self, record: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        from jaxdp.loggers.plot import plot_training

        if records := scan_log(self.log, is_plausible)[0]:
            plot_training(records, self.path, labels=self.labels)


def create_writers(
    workdir: Path,
    *,
    tensorboard: bool,
    samples: int = 0,
    buffer_when_full: bool = False,
    info: Callable[[str], Any] = print,
    run_info: RunInfo | None = None,
) -> list[Any]:
    """The writers of a run that has seen `samples` samples: first the log, then TensorBoard and the plot.

    buffer_when_full, info: see `JsonLines`. run_info: shown by TensorBoard.
    """
    log, labels = workdir / LOG, training_labels(run_info.config) if run_info else ""
    return [
        JsonLines(log, buffer_when_full=buffer_when_full, info=info),
        _open_tensorboard(workdir / "tensorboard", samples, run_info=run_info, info=info) if tensorboard else NullWriter(),
        SafeWriter(PlotWriter(workdir / "training.png", log, labels), info),
    ]


def _open_tensorboard(directory: Path, samples: int, *, run_info: RunInfo | None, info: Callable[[str], Any]) -> Writer:
    try:
        return SafeWriter(TensorBoard(directory, samples, run_info), info)
    except OSError as error:
        info(f"{directory}: {error.strerror}; training continues without TensorBoard and still writes {LOG}")
        return NullWriter()
