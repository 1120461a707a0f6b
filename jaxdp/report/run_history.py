"""A run read from its directory: config, log, result, and how its wall time divides into parts."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxdp.checkpoint.listing import read_manifests
from jaxdp.config import Config
from jaxdp.errors import ConfigError
from jaxdp.files import read_text
from jaxdp.report.summary import read_run
from jaxdp.training.result import read_result
from jaxdp.training.run_dir import CHECKPOINTS, RESULT, in_use, read_result_text
from jaxdp.validation import to_json

NAN = float("nan")
# Disjoint parts of the wall time, in the order in which they are shown, with their labels.
PARTS = {
    "input": "waiting for images",
    "steps": "steps: computation and waiting for other processes",
    "exposed": "steps: exposed communication",
    "evaluation": "evaluation",
    "saving": "saving checkpoints",
    "compilation": "waiting for compilation",
    "rest": "startup and everything else",
}
STEPS_WITH_EXPOSED = "steps: computation, exposed communication and waiting for other processes"
COMMUNICATION = "communication.json"  # written by jaxdp report --communication


@dataclass(frozen=True)
class History:
    """A run as its directory records it.

    label: name of the run in a report, unique among its runs. records: lines of the log. status: finished, running, or stopped
    (on request, or killed). result: result.json if finished, else the `Progress` of the newest checkpoint; {} without one.
    as_of: point of the run that `result` describes, for people.
    """

    path: Path
    label: str
    config: Config
    records: list[dict]
    status: str
    result: dict
    as_of: str

    @property
    def training(self) -> list[dict]:
        """Records of training steps."""
        return [record for record in self.records if "loss" in record]

    @property
    def evaluations(self) -> list[dict]:
        """Records of evaluations."""
        return [record for record in self.records if record.get("eval_accuracy") is not None]

    def seconds(self) -> dict[str, float | None]:
        """Seconds of every part of `PARTS`, None for one that was not measured; {} without a result."""
        result = self.result
        if not result or not result["wall_seconds"]:
            return {}
        steps, exposed = result["training_seconds"] - result["input_seconds"], self.exposed_share()
        parts = {
            "input": result["input_seconds"],
            "steps": steps * (1 - (exposed or 0.0)),
            "exposed": None if exposed is None else steps * exposed,
            "evaluation": result["evaluation_seconds"],
            "saving": result["saving_seconds"],
            "compilation": result["compilation_seconds"],
        }
        return parts | {"rest": result["wall_seconds"] - sum(value or 0.0 for value in parts.values())}

    def exposed_share(self) -> float | None:
        """Share of the steps' time in which devices only communicated, in [0, 1]; None if not measured for this config."""
        if self.status != "finished":
            return None
        if self.result["devices"] == 1:
            return 0.0
        try:
            measured = json.loads(read_text(self.path / COMMUNICATION))
            same_config = measured["config"] == json.loads(to_json(self.config))
            with_reduction = sum(row["steps"] * row["step_seconds"] for row in measured["phases"])
            without = sum(row["steps"] * row["without_reduction_seconds"] for row in measured["phases"])
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return min(1.0, max(0.0, 1 - without / with_reduction)) if same_config and with_reduction > 0 else None

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
    path = Path(workdir)
    config, records = read_run(path)
    return assemble(path, label or config.name, config=config, records=records, running=in_use(path))


def assemble(path: Path, label: str, *, config: Config, records: list[dict], running: bool) -> History:
    """The history of a run whose config and log have been read. running: whether it trains, unless it has a result.

    Raises ConfigError if the result is damaged.
    """
    if (path / RESULT).exists():
        result = dataclasses.asdict(read_result(path, read_result_text(path)))
        return History(path, label, config, records, "finished", result, "the end")
    status = "running" if running else "stopped"
    newest = next(read_manifests(path / CHECKPOINTS), None)
    if newest is None:
        return History(path, label, config, records, status, {}, "")
    as_of = f"the newest checkpoint, epoch {newest.epoch:.2f}"
    return History(path, label, config, records, status, newest.metadata["progress"], as_of)


def read_all(workdirs: Sequence[str | os.PathLike]) -> list[History]:
    """Several runs, labeled by the names of their directories, or by the paths if names occur twice."""
    return [read(workdir, label) for workdir, label in zip(workdirs, labels(workdirs), strict=True)]


def labels(workdirs: Sequence[str | os.PathLike]) -> list[str]:
    """A name for each of several runs: that of its directory, or its path if names occur twice."""
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
