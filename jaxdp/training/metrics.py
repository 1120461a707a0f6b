"""Where a run's numbers go. A writer has `write(record)` and `close()`; the loop hands every record to each of them.

A record is a flat dict. Training records have step, samples, epoch, loss, accuracy, gradient_norm, learning_rate, momentum,
global_batch and images_per_second; evaluation records have step, samples, epoch, eval_accuracy, eval_top5, eval_loss and
eval_examples.
"""

import json
import math
from pathlib import Path
from typing import Protocol


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

    def close(self):
        pass


class JsonLines:
    """One JSON object a line, in the file as soon as it is written."""

    def __init__(self, path: Path):
        self.file = open(path, "a", encoding="utf-8")

    def write(self, record):
        try:
            self.file.write(to_json(record) + "\n")
            self.file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.file.name) from None

    def close(self):
        self.file.close()


class TensorBoard:
    """Every number of a record as a scalar over samples seen, so that runs of different batch sizes lie side by side."""

    def __init__(self, directory: Path):
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(directory))

    def write(self, record):
        for name, value in record.items():
            if name not in ("step", "samples"):
                group = "evaluation" if name.startswith("eval_") else "training"
                self.writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, record["samples"])

    def close(self):
        self.writer.close()


class Picture:
    """Keeps the records and draws training.png when the run ends."""

    def __init__(self, path: Path):
        self.path, self.records = path, []

    def write(self, record):
        self.records.append(record)

    def close(self):
        from jaxdp.training.picture import draw

        if self.records:
            draw(self.records, self.path)


def writers_for(workdir: Path, tensorboard: bool) -> list[Writer]:
    return [
        JsonLines(workdir / "metrics.jsonl"),
        TensorBoard(workdir / "tensorboard") if tensorboard else NoWriter(),
        Picture(workdir / "training.png"),
    ]
