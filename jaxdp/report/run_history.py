"""A run read from its directory: config, log, result, and how its wall time divides into parts."""

import dataclasses
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxdp.config import Config
from jaxdp.errors import ConfigError
from jaxdp.records import EVENTS, FAILED, START, STOPPED, read_events
from jaxdp.report.run_files import RunFiles, open_run_files
from jaxdp.report.summary import read_files
from jaxdp.setup.run_dir import RESULT, read_result, read_result_text

NAN = float("nan")
# Disjoint parts of the wall time, in the order in which they are shown, with their labels.
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

    label: name of the run in a report, unique among its runs. records: lines of the log. status: finished, running, stopped (on
    request), failed, killed, or unknown (not running here, maybe elsewhere). result: result.json if finished, else the
    `Progress` of the newest checkpoint; {} without one. as_of: point of the run that `result` describes, for people. damaged:
    number of damaged lines of the log. events: see `records.read_events`.
    """

    files: RunFiles
    label: str
    config: Config
    records: list[dict]
    status: str
    result: dict
    as_of: str
    damaged: int = 0
    events: list[dict] = dataclasses.field(default_factory=list)

    @property
    def training(self) -> list[dict]:
        """Records of training steps."""
        return [record for record in self.records if "loss" in record]

    @property
    def evaluations(self) -> list[dict]:
        """Records of evaluations."""
        return [record for record in self.records if record.get("eval_accuracy") is not None]

    @property
    def session_start(self) -> int:
        """Samples at the start of the last session that trained; 0 if unknown."""
        return int(next((event.get("samples", 0) for event in reversed(self.events) if event["event"] == START), 0))

    @property
    def has_callbacks(self) -> bool:
        """Whether the user has given the run callbacks, whose names its events of a start have as text."""
        return any(event["event"] == START and event["text"] for event in self.events)

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
    """The run in a directory. Raises ConfigError if it holds none, or if a file is damaged."""
    files = open_run_files(workdir)
    config, records, damaged = read_files(files)
    return assemble(files, label or config.name, config=config, records=records, damaged=damaged)


def assemble(files: RunFiles, label: str, *, config: Config, records: list[dict], damaged: int = 0) -> History:
    """The history of a run whose config and log have been read. Raises ConfigError if its result is damaged."""
    path, newest, events = files.path, files.newest, read_events(files.path / EVENTS)
    if (path / RESULT).exists():
        result = dataclasses.asdict(read_result(path, read_result_text(path)))
        return History(files, label, config, records, "finished", result, "the end", damaged, events)
    status = "running" if files.is_running else _end(events)
    if newest is None:
        return History(files, label, config, records, status, {}, "", damaged, events)
    as_of = f"the newest checkpoint, epoch {newest.epoch:.2f}"
    return History(files, label, config, records, status, newest.metadata["progress"], as_of, damaged, events)


def _end(events: list[dict]) -> str:
    """How the last session of a run without a result ended, if no process holds the lock of the run.

    The lock tells of processes on this host only: some file systems do not share locks between hosts.
    """
    last = events[-1] if events else {}
    if last.get("event") in (STOPPED, FAILED):
        return last["event"]
    return "killed" if last.get("host") == socket.gethostname() else "unknown"


def read_all(workdirs: Sequence[str | os.PathLike]) -> list[History]:
    """Several runs, with their labels. Raises ConfigError as `labels_of` and `read`."""
    return [read(workdir, label) for workdir, label in zip(workdirs, labels_of(workdirs), strict=True)]


def labels_of(workdirs: Sequence[str | os.PathLike]) -> list[str]:
    """Labels of several runs: the names of their directories, or the paths if names occur twice. Raises as `check_workdirs`."""
    check_workdirs(workdirs)
    names = [Path(os.path.realpath(workdir)).name for workdir in workdirs]
    return names if len(set(names)) == len(names) else [str(workdir) for workdir in workdirs]


def check_workdirs(workdirs: Sequence[str | os.PathLike]) -> None:
    """Raise ConfigError if there is no directory, or one is given twice."""
    if not workdirs:
        raise ConfigError("WORKDIR", reason="missing", hint="give the directory of at least one run")
    if len({os.path.realpath(workdir) for workdir in workdirs}) < len(workdirs):
        raise ConfigError("WORKDIR", reason="a run is given twice", hint="give every run once")


def values(records: list[dict], name: str, scale: float = 1.0) -> list[float]:
    """A field of every record times `scale`; NaN where it is missing or null."""
    return [NAN if record.get(name) is None else scale * record[name] for record in records]
