"""What a run has recorded: metrics.jsonl, whose records are flat dicts with the fields of RECORD_FIELDS, and events.jsonl."""

import errno
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxdp import metrics
from jaxdp.files import LARGEST, open_regular
from jaxdp.files import LOG as LOG
from jaxdp.metrics import METRICS

EVENTS = "events.jsonl"
START, MESSAGE, STOPPED, FAILED, FINISHED = "start", "message", "stopped", "failed", "finished"
RESUMING = "resuming from "  # how the message of a session that continues from a checkpoint begins
ENDS = (STOPPED, FAILED, FINISHED)
MAX_READ = 2**18  # bytes that are read, from the end of the file
RECORD_FIELDS = {  # docs/watching.md shows it
    "step": "steps so far",
    "samples": "training images so far",
    "epoch": "`samples` divided by the number of training images",
    "wall_seconds": "time since the start of the command, over all sessions of the run",
    "phase": "index of the phase, from 0",
    "loss": "training loss of this step's batch, before the update, with label smoothing and mixing",
    "accuracy": "share of this step's batch that was predicted correctly, from 0 to 1",
    "gradient_norm": "norm of the gradient over all trainable parameters, before clipping",
    "learning_rate": "learning rate of this step",
    "momentum": "momentum of this step",
    "global_batch": "images in this step, on all devices",
    "images_per_second": "training speed of all devices since the last training record",
    "input_seconds": "time since the last training record that the devices waited for images",
    "skipped_steps": "steps skipped so far for a gradient that is not finite; with loss scaling or `--guard.non-finite skip`",
    "skipped_in_a_row": "skipped steps up to this one without another between them",
    "loss_scale": "factor of the loss in this step; with loss scaling",
    "audit_share": "largest difference that this step's audit found between devices, divided by its bound; in audited steps",
    "waiting_share": "share of the time since the last training record that devices waited for another process",
    "slowest_rank": "rank of the process that all other processes waited for most",
    **{name: METRICS[name].help for name in metrics.names()},
    metrics.COUNT: "held-out images that were counted",
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
)


def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """A record as standard JSON: NaN and infinity become null."""
    return json.dumps(without_nan(record), indent=indent, allow_nan=False)


def without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with null in place of NaN and infinity, which standard JSON does not have."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; leaves out damaged lines and a torn last line."""
    return scan_log(path)[0]


def scan_log(path: Path, accept: Callable[[dict[str, Any]], bool] = lambda record: True) -> tuple[list[dict[str, Any]], int]:
    """(records of a metrics.jsonl, number of damaged lines, without a torn last one). accept: whether a record is intact.

    Raises OSError if the file cannot be read or is larger than `LARGEST`.
    """
    records, damaged = [], 0
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace", newline="\n") as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        for line in file:
            record, is_whole = _dict_of(line), line.endswith("\n")
            if is_whole and isinstance(record.get("samples"), int) and accept(record):
                records.append(record)
            elif is_whole:
                damaged += 1
    return records, damaged


def _dict_of(line: str | bytes) -> dict[str, Any]:
    """The dict that a line of JSON holds; {} for a damaged one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def is_plausible(record: dict[str, Any]) -> bool:
    """Whether a record has its position, and the fields of jaxdp are numbers that can be drawn, or null."""
    values = (record[name] for name in RECORD_FIELDS.keys() & record.keys() if record[name] is not None)
    return all(map(_is_number, values)) and record.get("epoch") is not None


def _is_number(value: object) -> bool:
    """Whether a value is a number that can be computed with and drawn: neither NaN nor infinite nor huge."""
    return isinstance(value, int | float) and abs(value) < 2**63


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events in the last 256 KiB of an events.jsonl, oldest first, without damaged lines; [] without the file.

    Every event has `event` and `text`, strings, and may have `host`, a string, and `samples`, `sessions` and
    `wall_seconds`, numbers.
    """
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_READ))
            lines = file.read(MAX_READ).split(b"\n")[:-1]
    except OSError:
        return []
    fields: dict[str, Callable[[object], bool]] = dict.fromkeys(("event", "text", "host"), lambda value: isinstance(value, str))
    fields |= dict.fromkeys(("samples", "sessions", "wall_seconds"), _is_number)
    events = [_dict_of(line) for line in lines]
    known = [{name: event[name] for name, fits in fields.items() if fits(event.get(name))} for event in events]
    return [event for event in known if {"event", "text"} <= event.keys()]
