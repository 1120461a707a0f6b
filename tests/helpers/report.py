"""Directories of runs without training, for tests of `jaxdp report`."""

import dataclasses
import json
import socket
from pathlib import Path

from jaxdp import TrainResult
from jaxdp.recipes import load_config
from jaxdp.validation import to_json

RESULT = TrainResult(
    metrics={"accuracy": 0.5, "top5": 0.9},
    loss=1.0,
    eval_examples=360,
    steps=9,
    samples=1437,
    epochs=1.0,
    wall_seconds=20.0,
    seconds_to_first_step=6.0,
    training_seconds=10.0,
    evaluation_seconds=3.0,
    images_per_second=9.0,
    devices=4,
    device_kind="cpu",
    mesh=(2, 2),
    versions={"jaxdp": "0.1.0", "jax": "0.10.2"},
    workdir="run",
    input_seconds=1.5,
    saving_seconds=0.5,
    compilation_seconds=4.0,
)


def write_run(path: Path, name: str = "digits", accuracies=(0.5, 0.7, 0.7601, 0.759), **changes) -> Path:
    """Write the files of a run on this host that was killed, with an evaluation every 20 epochs. changes: of its config."""
    path.mkdir(exist_ok=True)
    config = dataclasses.replace(load_config(name), **changes)
    (path / "config.json").write_text(to_json(config))
    records = [{"step": 1, "samples": 8, "epoch": 0.1, "wall_seconds": 1.0, "loss": 7.0}]
    for number, accuracy in enumerate(accuracies, 1):
        seconds = 60.0 * number
        records.append({"samples": 1000 * number, "epoch": 20.0 * number, "wall_seconds": seconds, "eval_accuracy": accuracy})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "events.jsonl").write_text(json.dumps({"event": "start", "host": socket.gethostname(), "text": ""}) + "\n")
    return path


def write_result(run: Path, **changes) -> None:
    """Write result.json, which marks the run as finished. changes: fields of the result."""
    (run / "result.json").write_text(json.dumps(RESULT.to_dict() | changes))


def write_log(run: Path, records: list[dict]) -> None:
    """Replace the log of a run. records: fields of its lines beside step and samples."""
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": 1, "samples": 8} | record) + "\n" for record in records))
