"""Where a run's numbers go. A writer has `write(record)` and `close()`; the loop hands every record to each of them.

A record is a flat dict. Training records have step, samples, epoch, loss, accuracy, gradient_norm, learning_rate, momentum,
global_batch, images_per_second and wall_seconds; evaluation records have step, samples, epoch, eval_accuracy, eval_top5,
eval_loss, eval_examples and wall_seconds. wall_seconds: from the start of the command, over all sessions of the run.
"""

import errno
import json
import math
import os
from pathlib import Path
from threading import Lock
from typing import Protocol

LOG = "metrics.jsonl"
# Fields of a record, and of result.json, that tell how long something took: all others are the same for every run of a config
# on a mesh, however often it was interrupted.
TIMING = ("images_per_second", "input_seconds", "wall_seconds", "seconds_to_first_step", "training_seconds")
TIMING += ("evaluation_seconds", "saving_seconds", "compilation_seconds", "sessions")
TIMING += ("waiting_share", "slowest_rank", "slowest")


def to_json(record: dict, indent: int | None = None) -> str:
    """A record as JSON that every reader takes: a number that is not finite becomes null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, indent=indent, allow_nan=False)


class Writer(Protocol):
    def write(self, record: dict) -> None: ...

    def close(self) -> None: ...


class NoWriter:
    """Writes nothing."""

    def write(self, record):
        pass

    def sync(self):
        pass

    def close(self):
        pass


class JsonLines:
    """One JSON object a line, in the file as soon as it is written.

    patient: lines that a full disk does not take are kept, and written when it does; say is told of it, once.
    """

    def __init__(self, path: Path, patient: bool = False, say=print):
        self.file = open(path, "ab", buffering=0)
        self.lock = Lock()  # a save syncs from a thread of its own, while the run writes on
        self.waiting, self.patient, self.say, self.told = b"", patient, say, False

    def write(self, record):
        try:
            self._write_waiting(to_json(record).encode() + b"\n")
        except OSError as error:
            if not (self.patient and error.errno in (errno.ENOSPC, errno.EDQUOT)):
                raise OSError(error.errno, error.strerror, self.file.name) from None
            if not self.told:
                self.told = True
                self.say(f"{self.file.name}: {error.strerror}; the run goes on, and writes its log when there is space again")

    def _write_waiting(self, more: bytes = b""):
        with self.lock:
            self.waiting += more
            while self.waiting:
                written = self.file.write(self.waiting)
                self.waiting = self.waiting[written:]

    def sync(self):
        """On the disk, whatever happens to the machine. Raises OSError where not all lines are in the file."""
        self._write_waiting()
        os.fsync(self.file.fileno())

    def close(self):
        try:
            self._write_waiting()
        finally:
            self.file.close()


class TensorBoard:
    """Every number of a record as a scalar over samples seen, so that runs of different batch sizes lie side by side."""

    def __init__(self, directory: Path, samples: int):
        """samples: what was written beyond these, by a session that was cut off, is not to be shown."""
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=samples + 1 if samples else None)

    def write(self, record):
        for name, value in record.items():
            if name not in ("step", "samples"):
                group = "evaluation" if name.startswith("eval_") else "training"
                self.writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, record["samples"])

    def close(self):
        self.writer.close()


class Picture:
    """Draws training.png from the log when the run ends."""

    def __init__(self, path: Path, log: Path):
        self.path, self.log = path, log

    def write(self, record):
        pass

    def close(self):
        from jaxdp.training.picture import draw

        if records := read_log(self.log):
            draw(records, self.path)


def read_log(path: Path) -> list[dict]:
    """The records of a metrics.jsonl, without lines that are torn or damaged."""
    records = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if line.endswith("\n") and isinstance(record, dict) and isinstance(record.get("samples"), int):
                records.append(record)
    return records


def writers_for(workdir: Path, tensorboard: bool, samples: int = 0, patient: bool = False, say=print) -> list[Writer]:
    """All writers of a run that has seen `samples` samples. Closed in the opposite order: the log last.

    patient, say: see `JsonLines`.
    """
    log = workdir / LOG
    return [
        JsonLines(log, patient, say),
        TensorBoard(workdir / "tensorboard", samples) if tensorboard else NoWriter(),
        Picture(workdir / "training.png", log),
    ]
