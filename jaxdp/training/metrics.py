"""Where a run's numbers go. A writer has `write(record)` and `close()`; the loop hands every record to each of them.

A record is a flat dict. Training records have step, samples, epoch, loss, accuracy, gradient_norm, learning_rate, momentum,
global_batch, images_per_second and wall_seconds; evaluation records have step, samples, epoch, eval_accuracy, eval_top5,
eval_loss, eval_examples and wall_seconds. wall_seconds: from the start of the command, over all sessions of the run.
"""

import errno
import json
import math
import os
import warnings
from pathlib import Path
from threading import Lock
from typing import Protocol

from jaxdp.config import ConfigError
from jaxdp.errors import first_line
from jaxdp.training.tensorboard import About, TensorBoard

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
    """Where records go. It may have a third method, `write_examples(record, images, labels, predicted)`: a few held-out images,
    uint8 [E, H, W, 3], with their labels and the classes predicted for them, int32 [E], after every evaluation."""

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


class Guarded:
    """A writer that cannot cost the run: one that raises is told of, once, and left alone from then on.

    It gets records of its own, so that it cannot change what others get. tell: takes the line that says so.
    """

    def __init__(self, writer: Writer, tell):
        self.writer, self.tell, self.failed = writer, tell, False
        self.wants_examples = hasattr(writer, "write_examples")

    def write(self, record):
        self._try(lambda: self.writer.write(dict(record)))

    def write_examples(self, record, images, labels, predicted):
        if self.wants_examples:
            self._try(lambda: self.writer.write_examples(dict(record), images.copy(), labels.copy(), predicted.copy()))

    def close(self):
        try:
            self.writer.close()
        except Exception as error:
            if not self.failed:
                self.tell(f"{type(self.writer).__name__} could not be finished: {first_line(error)}")

    def _try(self, call):
        if self.failed:
            return
        try:
            call()
        except Exception as error:
            self.failed = True
            what = f"{type(error).__name__}: {first_line(error)}"
            self.tell(f"{type(self.writer).__name__} raised {what}; the run goes on without it, and its log is metrics.jsonl")


def guarded(writers) -> list[Guarded]:
    """Writers that a caller hands over, which warn where they fail. Raises ConfigError for what is no writer."""
    found = list(writers) if isinstance(writers, (list, tuple)) else [writers]
    for one in found:
        if isinstance(one, type) or not all(callable(getattr(one, name, None)) for name in ("write", "close")):
            raise ConfigError(f"writers: {one!r} is not allowed; give a list of objects with write(record) and close()")
    return [Guarded(one, lambda text: warnings.warn(text, RuntimeWarning, stacklevel=2)) for one in found]


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


def writers_for(
    workdir: Path, tensorboard: bool, samples: int = 0, patient: bool = False, say=print, about: About | None = None
) -> list[Writer]:
    """All writers of a run that has seen `samples` samples. Closed in the opposite order: the log last.

    patient, say: see `JsonLines`. about: what TensorBoard is to show of the run as a whole.
    """
    log = workdir / LOG
    return [
        JsonLines(log, patient, say),
        Guarded(TensorBoard(workdir / "tensorboard", samples, about), say) if tensorboard else NoWriter(),
        Guarded(Picture(workdir / "training.png", log), say),
    ]
