"""A run as its directory tells it: config, log, result, and how long its parts took."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from jaxdp.config import Config
from jaxdp.report.reached import read_run
from jaxdp.training.result import read_result
from jaxdp.validation import to_json

NAN = float("nan")
# Parts of the time of a run, in order, each with what it is called. They do not overlap, and add up to the wall time.
PARTS = {
    "input": "waiting for images",
    "steps": "steps: computation and waiting for other processes",
    "exposed": "steps: exposed communication",
    "evaluation": "evaluation",
    "saving": "saving",
    "compilation": "waiting for compilation",
    "rest": "start and the rest",
}
STEPS_WITH_EXPOSED = "steps: computation, exposed communication and waiting for other processes"
REST_WITH_COMPILATION = "start, compilation and the rest"
COMMUNICATION = "communication.json"  # what jaxdp report --communication has measured


@dataclass(frozen=True)
class History:
    """A run. label: told apart from the other runs of a report. state: finished, running, or stopped (asked to, or killed).

    told: result.json of a finished run, else what the newest checkpoint knows (the fields of `Progress`), else {}; told_at says
    which.
    """

    path: Path
    label: str
    config: Config
    records: list[dict]
    state: str
    told: dict
    told_at: str

    @property
    def training(self) -> list[dict]:
        return [record for record in self.records if "loss" in record]

    @property
    def evaluations(self) -> list[dict]:
        return [record for record in self.records if record.get("eval_accuracy") is not None]

    def seconds(self) -> dict[str, float | None]:
        """Seconds by part of `PARTS`, None for one that was not measured; {} where nothing is known of the time."""
        told = self.told
        if not told or not told.get("wall_seconds"):
            return {}
        steps, exposed = told["training_seconds"] - told["input_seconds"], self.exposed()
        parts = {
            "input": told["input_seconds"],
            "steps": steps * (1 - (exposed or 0.0)),
            "exposed": None if exposed is None else steps * exposed,
            "evaluation": told["evaluation_seconds"],
            "saving": told["saving_seconds"],
            "compilation": told.get("compilation_seconds"),
        }
        return parts | {"rest": told["wall_seconds"] - sum(value or 0.0 for value in parts.values())}

    def exposed(self) -> float | None:
        """The share of the steps' time in which devices did nothing but communicate, as it was measured apart for this very
        config; None where it was not."""
        if self.state != "finished":
            return None
        if self.told["devices"] == 1:
            return 0.0
        try:
            measured = json.loads((self.path / COMMUNICATION).read_text())
            same = measured["config"] == json.loads(to_json(self.config))
            whole = sum(row["steps"] * row["step_seconds"] for row in measured["phases"])
            bare = sum(row["steps"] * row["without_reduction_seconds"] for row in measured["phases"])
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return min(1.0, max(0.0, 1 - bare / whole)) if same and whole > 0 else None

    def waiting(self) -> str:
        """What is known of the time in which devices waited for another process, which lies within the steps."""
        if self.state != "finished":
            return "not measured before the run's end (metrics.jsonl has it by line)"
        if self.told.get("processes", 1) == 1:
            return "none: one process"
        last = " of the last session" if self.told.get("sessions", 1) > 1 else ""
        return f"{100 * self.told['waiting_share']:.1f} % of the steps{last}"


def read(workdir, label: str | None = None) -> History:
    """The run in a directory. Raises ConfigError where there is none, or a file of it is damaged."""
    path = Path(workdir)
    config, records = read_run(path)
    if (path / "result.json").exists():
        text = (path / "result.json").read_text(errors="replace")
        told = dataclasses.asdict(read_result(path, text))
        if "compilation_seconds" not in json.loads(text):  # of an earlier release
            told["compilation_seconds"] = None
        return History(path, label or config.name, config, records, "finished", told, "the end")
    from jaxdp.training import seal
    from jaxdp.training.workdir import CHECKPOINTS, in_use

    state = "running" if in_use(path) else "stopped"
    newest = next(seal.all_sealed(path / CHECKPOINTS), None)
    if newest is None:
        return History(path, label or config.name, config, records, state, {}, "")
    at = f"the newest checkpoint, epoch {newest.told['epoch']:.2f}"
    return History(path, label or config.name, config, records, state, newest.told["progress"], at)


def read_all(workdirs) -> list[History]:
    """Several runs, with labels that tell them apart: their directories' names, or the whole paths where these are equal."""
    names = [Path(workdir).resolve().name for workdir in workdirs]
    labels = names if len(set(names)) == len(names) else [str(workdir) for workdir in workdirs]
    return [read(workdir, label) for workdir, label in zip(workdirs, labels, strict=True)]


def values(records: list[dict], name: str, scale: float = 1.0) -> list[float]:
    """A field of every record; not a number where it is missing or was not finite."""
    return [NAN if record.get(name) is None else scale * record[name] for record in records]
