"""A run read from its directory or URL: config, log, result, and how its wall time divides into parts."""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxdp.checkpoint.listing import checkpoint_paths, read_manifests
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.config import Config, Storage
from jaxdp.errors import ConfigError, print_safe, printable
from jaxdp.files import CHECKPOINTS, CONFIG, RESULT, expand_user, is_url
from jaxdp.metrics import is_evaluation
from jaxdp.run_records import EVENTS, FAILED, LOG, START, STOPPED, is_plausible, read_events, without_nan
from jaxdp.setup.run_dir import in_use, lost_records, read_records, read_result, read_result_text, run_config
from jaxdp.training.result import TrainResult

FIELD = "WORKDIR"
MAX_DRAWN = 1e300  # of a number in a plot: leaves room for margins and differences
RUNNING, KILLED, UNKNOWN = "running", "killed", "unknown"
# Disjoint parts of the wall time, in the order of the page, with their labels.
PARTS = {
    "input": "waiting for images",
    "steps": "steps: computation, communication and waiting for other processes",
    "evaluation": "evaluation",
    "saving": "saving checkpoints",
    "compilation": "waiting for compilation",
    "rest": "startup and everything else",
}


@dataclass(frozen=True)
class History:
    """A run as its directory records it.

    workdir: the directory or URL, as given. label: name of the run in a report, unique among its runs. records: lines of the
    log. status: finished, running, stopped (on request), failed, killed, or unknown (not running here, maybe elsewhere).
    result: result.json if finished, else the `Progress` of the newest checkpoint; {} without one. as_of: point of the run that
    `result` describes, for people. checkpoints: their samples. damaged: number of damaged lines of the log. events: see
    `records.read_events`. lost: number of records that the log has lost, as far as known.
    """

    workdir: str
    label: str
    config: Config
    records: list[dict]
    status: str
    result: dict
    as_of: str
    checkpoints: list[int]
    damaged: int
    events: list[dict]
    lost: int = 0

    @cached_property
    def training(self) -> list[dict]:
        """Records of training steps."""
        return [record for record in self.records if "loss" in record]

    @cached_property
    def evaluations(self) -> list[dict]:
        """Records of evaluations."""
        return [record for record in self.records if is_evaluation(record)]

    @property
    def session_start(self) -> int:
        """Samples at the start of the last session that trained; 0 if unknown."""
        return int(next((event.get("samples", 0) for event in reversed(self.events) if event["event"] == START), 0))

    def epochs_text(self) -> str:
        """The position in epochs; a last step may reach beyond the end."""
        epoch = next((record["epoch"] for record in reversed(self.records) if record.get("epoch") is not None), 0.0)
        return f"{min(epoch, self.config.epochs):.2f} of {self.config.epochs:g}"

    @property
    def evaluation(self) -> dict:
        """The record of the evaluation that is the result: with early stopping the best one, else the last; {} without one."""
        best = {"samples": self.result.get("best_samples")} if self.status == "finished" else self.result.get("best") or {}
        chosen = [record for record in self.evaluations if record["samples"] == best.get("samples")]
        return next(reversed(chosen or self.evaluations), {})

    def seconds(self) -> dict[str, float]:
        """Seconds of every part of `PARTS`; {} without a result."""
        result = self.result
        if not result or not result["wall_seconds"]:
            return {}
        parts = {
            "input": result["input_seconds"],
            "steps": result["training_seconds"] - result["input_seconds"],
            "evaluation": result["evaluation_seconds"],
            "saving": result["saving_seconds"],
            "compilation": result["compilation_seconds"],
        }
        return parts | {"rest": result["wall_seconds"] - sum(parts.values())}

    def waiting_text(self) -> str:
        """Share of the steps' time that devices waited for another process, for people."""
        if self.status != "finished":
            return "not measured before the end of the run (metrics.jsonl has it per line)"
        if self.result["processes"] == 1:
            return "none: one process"
        session = " of the last session" if self.result["sessions"] > 1 else ""
        return f"{100 * self.result['waiting_share']:.1f} % of the steps{session}"


def read(workdir: str | os.PathLike, label: str | None = None) -> History:
    """The run in a directory or at a URL; without its result.json if that is damaged, as a line on stderr says.

    Raises ConfigError if there is no run, a URL cannot be read, or another file is damaged.
    """
    workdir = expand_user(workdir, FIELD)
    if is_url(workdir):
        return _read_url(workdir, label)
    _check_is_run(Path(workdir), workdir)
    return read_directory(Path(workdir), label, is_running=in_use(Path(workdir)), needs_result=False)


def _check_is_run(path: Path, workdir: str) -> None:
    if not (path / CONFIG).is_file():
        raise ConfigError(FIELD, workdir, reason=f"holds no run: {CONFIG} not found", hint="give the directory of a run")
    if not (path / LOG).exists():
        raise ConfigError(FIELD, workdir, reason=f"its {LOG} is missing")


def read_directory(path: Path, label: str | None = None, *, is_running: bool, needs_result: bool = True) -> History:
    """The run in a directory, which may not have a log yet. Raises ConfigError if a file is damaged.

    needs_result: False: as `read` for a damaged result.json.
    """
    folder = path / CHECKPOINTS
    samples = [int(checkpoint.name) for checkpoint in checkpoint_paths(folder)]
    holder = RUNNING if is_running else UNKNOWN
    newest = next(read_manifests(folder), None)
    result = _read_result(path, str(path), needed=needs_result)
    return _assemble(path, str(path), label, holder=holder, samples=samples, newest=newest, result=result)


def _read_url(url: str, label: str | None) -> History:
    from jaxdp.cloud.local import temporary_directory
    from jaxdp.cloud.location import storage_errors
    from jaxdp.cloud.remote_run import RemoteRun
    from jaxdp.cloud.retry import open_patiently

    with temporary_directory(Storage()) as copy:
        path = Path(copy)
        with storage_errors(url, FIELD):
            remote = RemoteRun(open_patiently(url, FIELD))
            lease, held = remote.holder()
            remote.download_files((CONFIG, LOG, RESULT, EVENTS), path, lease=lease)
        _check_is_run(path, url)
        with storage_errors(url, FIELD):
            manifests = remote.manifests(lease)
        newest = next((manifest for manifest in manifests.values() if isinstance(manifest, Manifest)), None)
        holder = {"held": RUNNING, "lost": KILLED, "free": UNKNOWN}[held]
        samples, result = [name.samples for name in manifests], _read_result(path, url, needed=False)
        return _assemble(path, url, label, holder=holder, samples=samples, newest=newest, result=result)


def _read_result(path: Path, workdir: str, *, needed: bool) -> TrainResult | None:
    """The result of the run whose files are in `path`, None if it has none.

    needed: whether a damaged one is an error; else it counts as none, as a line on stderr says.
    """
    if not (path / RESULT).exists():
        return None
    try:
        return read_result(workdir, read_result_text(path))
    except ConfigError as error:
        if needed:
            raise
        print_safe(f"jaxdp: {printable(workdir, 4096)}: {error.reason}; the run is shown without it", sys.stderr)
        return None


def _assemble(
    path: Path,
    workdir: str,
    label: str | None,
    *,
    holder: str,
    samples: list[int],
    newest: Manifest | None,
    result: TrainResult | None,
) -> History:
    """The history of the run whose files are in `path`.

    holder: what is known of the process that trains it: RUNNING, KILLED, or UNKNOWN. samples: of the checkpoints. newest: the
    manifest of the newest one.
    """
    config, events = run_config(path), read_events(path / EVENTS)
    records, damaged = read_records(path, lambda record: is_plausible(without_nan(record)))
    status, facts, as_of = holder if holder == RUNNING else _end(events, holder), dict[str, Any](), ""
    if result is not None:
        status, facts, as_of = "finished", result.to_dict(), "the end"
    elif newest is not None:
        facts, as_of = newest.metadata["progress"], f"the newest checkpoint, epoch {newest.epoch:.2f}"
    if result is None and (path / RESULT).exists():  # a damaged one
        status = UNKNOWN
    is_ahead = is_url(workdir) and result is None  # a checkpoint may be, of the log, which is uploaded less often
    lost = lost_records(newest, len(records), damaged) if (newest or result) and not is_ahead else 0
    return History(workdir, label or config.name, config, records, status, facts, as_of, samples, damaged, events, lost)


def _end(events: list[dict], holder: str) -> str:
    """How the last session of a run without a result ended, if no process holds the run.

    The lock of a directory tells of processes on this host only: some file systems do not share locks between hosts.
    """
    last = events[-1] if events else {}
    if last.get("event") in (STOPPED, FAILED):
        return last["event"]
    return KILLED if last.get("host") == socket.gethostname() else holder


def read_all(workdirs: Sequence[str | os.PathLike]) -> list[History]:
    """Several runs, with their labels. Raises ConfigError as `labels_of` and `read`."""
    return [read(workdir, label) for workdir, label in zip(workdirs, labels_of(workdirs), strict=True)]


def is_number(value: object) -> bool:
    """Whether a value of a log is a number for plots and statistics, or one that was not finite."""
    return value is None or (isinstance(value, int | float) and not abs(value) > MAX_DRAWN)


def labels_of(workdirs: Sequence[str | os.PathLike]) -> list[str]:
    """Printable labels of several runs: the names of their directories, or the paths if names occur twice.

    Raises ConfigError if there is no directory, or one is given twice.
    """
    if not workdirs:
        raise ConfigError(FIELD, reason="missing", hint="give the directory of at least one run")
    if len({os.path.realpath(workdir) for workdir in workdirs}) < len(workdirs):
        raise ConfigError(FIELD, reason="a run is given twice", hint="give every run once")
    names = [printable(Path(os.path.realpath(workdir)).name) for workdir in workdirs]
    return names if len(set(names)) == len(names) else [printable(workdir, 4096) for workdir in workdirs]
