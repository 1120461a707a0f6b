"""TensorBoard events: scalars, held-out images with their predicted classes, and the configuration."""

import dataclasses
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp import metrics
from jaxdp.config import Config
from jaxdp.config_words import HELD_OUT_LABELS, training_labels
from jaxdp.data.record_files import masked_checksum
from jaxdp.files import open_regular
from jaxdp.loggers.example_grid import example_grid
from jaxdp.run_records import RECORD_FIELDS
from jaxdp.training.callback import Callback
from jaxdp.training.result import TrainResult
from jaxdp.training.run import Run
from jaxdp.validation import flatten, to_json

EXAMPLES_TAG = "examples/held_out"  # not a scalar's tag: TensorBoard shows only one kind of data per tag


class TensorBoard(Callback):
    """Writes records, held-out images and the configuration to the folder `tensorboard` of the run directory."""

    detach_on_error = True

    def on_start(self, run: Run) -> None:
        self.file = EventFile(run.workdir / "tensorboard", run.progress.samples, run.config)

    def after_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if run.is_logged:
            self.file.write(metrics)

    def after_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        if run.example_images:
            self.file.write_image(evaluation["samples"], example_grid(*run.example_images, class_names=run.datasets.classes))
        self.file.write(evaluation)

    def on_end(self, run: Run, result: TrainResult | None) -> None:
        self.file.close()


class EventFile:
    """Events of a session. Every number of a record is a scalar over samples seen, so that runs of different batch sizes are
    comparable.

    The fields of the config are hyperparameters, which the HParams page compares by the last value of the first metric.
    """

    def __init__(self, directory: Path, samples: int, config: Config) -> None:
        """samples: samples seen by the run; events beyond these, from an interrupted session, are hidden."""
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._scalars: dict[str, Any] = {}  # the summary of each tag; only its value changes
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names. Each event is written at once, so that a kill
        # loses none: tensorboardX's SummaryWriter keeps them in memory for up to two minutes.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self.file, self.samples = open_regular(directory / name, "ab"), samples
        self._write(file_version="brain.Event:2")
        if samples:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(samples + 1, session_log=start)
        text = f"Cross entropy on training batches with {training_labels(config)}"
        self.descriptions = {
            "loss": f"{text}; not comparable with evaluation/loss unless both have {HELD_OUT_LABELS}",
            "eval_loss": f"Cross entropy on held-out images with {HELD_OUT_LABELS}",
        }
        self._write_config(config)

    def _write_config(self, config: Config) -> None:
        from tensorboardX.summary import hparams, text

        lines = "".join(f"    {line}\n" for line in to_json(config).splitlines())
        self._write(self.samples, summary=text("config", lines))
        fields = flatten(dataclasses.asdict(config))
        simple = {name: v if isinstance(v, (bool, int, float, str)) else str(v) for name, v in fields.items()}
        tag = f"evaluation/{metrics.bare(config.first_metric)}"
        *started, _ = hparams(simple, {tag: 0.0})  # the last summary marks the run as successful
        for summary in started:
            self._write(summary=summary)

    def _write(self, samples: int = 0, **content: Any) -> None:
        """Append an event to the file, which is a TFRecord file. RecordWriter of tensorboardX would wait for the disk."""
        data = self._event(wall_time=time.time(), step=samples, **content).SerializeToString()
        length = struct.pack("<Q", len(data))
        self.file.write(length + masked_checksum(length) + data + masked_checksum(data))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a record; numbers that callbacks have added belong to the record's group."""
        own = "evaluation" if metrics.is_evaluation(record) else "training"
        values = []
        for name, value in record.items():
            if name not in ("step", "samples"):
                group = "evaluation" if name.startswith("eval_") else "training" if name in RECORD_FIELDS else own
                values.append(self._scalar(f"{group}/{name.removeprefix('eval_')}", value, self.descriptions.get(name, "")))
        self._write(record["samples"], summary=self._summary(value=values))

    def _scalar(self, tag: str, value: float, description: str) -> Any:
        if tag not in self._scalars:
            from tensorboardX.summary import scalar

            self._scalars[tag] = scalar(tag, value, summary_description=description).value[0]
        self._scalars[tag].simple_value = value
        return self._scalars[tag]

    def write_image(self, samples: int, pixels: np.ndarray) -> None:
        from tensorboardX.summary import image

        self._write(samples, summary=image(EXAMPLES_TAG, pixels, dataformats="HWC"))

    def close(self) -> None:
        self.file.close()
