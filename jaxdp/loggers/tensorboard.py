"""TensorBoard events: scalars, held-out images with their predicted classes, the configuration and the mesh."""

import dataclasses
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp.config import Config
from jaxdp.config_words import HELD_OUT_LABELS, training_labels
from jaxdp.data.records import masked_checksum
from jaxdp.files import open_regular
from jaxdp.loggers.example_grid import example_grid
from jaxdp.planning import PlannedPhase
from jaxdp.validation import flatten, to_json

ACCURACY_TAG = "evaluation/accuracy"
EXAMPLES_TAG = "examples/held_out"  # not a scalar's tag: TensorBoard shows only one kind of data per tag


class RunInfo(NamedTuple):
    """Facts about a whole run. mesh: Markdown. class_names: may be shorter than the number of classes."""

    config: Config
    mesh: str
    class_names: tuple[str, ...] = ()


def mesh_table(phases: Sequence[PlannedPhase], device_kind: str, strategy_of: Callable[[PlannedPhase], str]) -> str:
    """The mesh of every phase as a Markdown table."""
    names = ("phase", "mesh", "global batch", "per-worker batch", "micro-batches", "images", "all-reduce")
    rows = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for phase in phases:
        rows.append(
            f"| {phase.index} | {phase.vertical}x{phase.horizontal} {device_kind} | {phase.global_batch} | "
            f"{phase.per_worker_batch} | {phase.accumulation} | {phase.image_size}x{phase.image_size} | {strategy_of(phase)} |"
        )
    return "\n".join(rows)


class TensorBoard:
    """Writes every number of a record as a scalar over samples seen, so that runs of different batch sizes are comparable.

    The run's configuration and mesh are text summaries. The config fields are hyperparameters, which the HParams page compares
    by the last held-out accuracy.
    """

    def __init__(self, directory: Path, samples: int, run_info: RunInfo | None = None) -> None:
        """samples: samples seen by the run; events beyond these, from an interrupted session, are hidden."""
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._scalars: dict[str, Any] = {}  # the summary of each field of a record; only its value changes
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names. Each event is written at once, so that a kill
        # loses none: tensorboardX's SummaryWriter keeps them in memory for up to two minutes.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self.file = open_regular(directory / name, "ab")
        self._write(file_version="brain.Event:2")
        if samples:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(samples + 1, session_log=start)
        self.class_names = run_info.class_names if run_info else ()
        self.descriptions = {"eval_loss": f"Cross entropy on held-out images with {HELD_OUT_LABELS}"}
        if run_info:
            text = f"Cross entropy on training batches with {training_labels(run_info.config)}"
            self.descriptions["loss"] = f"{text}; not comparable with evaluation/loss unless both have {HELD_OUT_LABELS}"
            self._write_run_info(run_info, samples)

    def _write_run_info(self, run_info: RunInfo, samples: int) -> None:
        from tensorboardX.summary import hparams, text

        config = "".join(f"    {line}\n" for line in to_json(run_info.config).splitlines())
        self._write(samples, summary=text("config", config))
        self._write(samples, summary=text("mesh", run_info.mesh))
        fields = flatten(dataclasses.asdict(run_info.config))
        simple = {name: v if isinstance(v, (bool, int, float, str)) else str(v) for name, v in fields.items()}
        *started, _ = hparams(simple, {ACCURACY_TAG: 0.0})  # the last summary marks the run as successful
        for summary in started:
            self._write(summary=summary)

    def _write(self, samples: int = 0, **content: Any) -> None:
        """Append an event to the file, which is a TFRecord file. RecordWriter of tensorboardX would wait for the disk."""
        data = self._event(wall_time=time.time(), step=samples, **content).SerializeToString()
        length = struct.pack("<Q", len(data))
        self.file.write(length + masked_checksum(length) + data + masked_checksum(data))

    def write(self, record: dict[str, Any]) -> None:
        values = [self._scalar(name, value) for name, value in record.items() if name not in ("step", "samples")]
        self._write(record["samples"], summary=self._summary(value=values))

    def _scalar(self, name: str, value: float) -> Any:
        if name not in self._scalars:
            from tensorboardX.summary import scalar

            group = "evaluation" if name.startswith("eval_") else "training"
            tag, text = f"{group}/{name.removeprefix('eval_')}", self.descriptions.get(name, "")
            self._scalars[name] = scalar(tag, value, summary_description=text).value[0]
        self._scalars[name].simple_value = value
        return self._scalars[name]

    def write_examples(self, record: dict[str, Any], *arrays: np.ndarray) -> None:
        """Write the image of `example_grid`. arrays: images, labels and predicted classes."""
        from tensorboardX.summary import image

        if len(arrays[0]):
            grid = example_grid(*arrays, class_names=self.class_names)
            self._write(record["samples"], summary=image(EXAMPLES_TAG, grid, dataformats="HWC"))

    def close(self) -> None:
        self.file.close()
