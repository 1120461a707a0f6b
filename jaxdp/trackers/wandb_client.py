"""Weights & Biases: one run per run directory, resumed by its id. Files of the client lie in WORKDIR/wandb.

The number of a history row (`_step`) is the record's position. The server, or the files of offline sessions, have the last one.
The charts' x axis is `samples`.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxdp.errors import EXIT_STOPPED, first_line, printable
from jaxdp.files import RESULT
from jaxdp.trackers.run_files import (
    LAST,
    NO_POINT,
    Rejected,
    RunFacts,
    TrackerState,
    Unavailable,
    is_evaluation,
    picture_path,
    position,
    values,
)

AXES = ("samples", "step", "epoch", "wall_seconds")
INIT_SECONDS = 30.0
EXAMPLES = "examples/held_out"


class WandbClient:
    """A `jaxdp.trackers.sender.TrackerClient`. state: its target is the project."""

    def __init__(self, workdir: Path, state: TrackerState, warn: Callable[[str], None]) -> None:
        self.workdir, self.state = workdir, state
        self.run: Any = None
        self.place = ""

    def connect(self, name: str) -> int:
        import wandb

        if self.run is not None:  # its service has ended
            self.run = None
            wandb.teardown()
        settings = wandb.Settings(
            console="off", silent=True, save_code=False, init_timeout=INIT_SECONDS, x_stats_pid=os.getppid()
        )
        identity = self.state.identify()
        (self.workdir / "wandb").mkdir(exist_ok=True)  # otherwise the client writes elsewhere if it cannot create this folder
        try:
            run = wandb.init(
                project=self.state.target, id=identity, name=name, dir=str(self.workdir), resume="allow", settings=settings
            )
        except wandb.errors.Error as error:
            reason = printable(first_line(error).split(". ")[0].rstrip("."))  # its fix is in the hint
            is_refused = isinstance(error, (wandb.errors.UsageError, wandb.errors.AuthenticationError))
            if is_refused or re.search(r"\b40[0134]\b|permission denied|not logged in", str(error)):
                hint = "run `wandb login` and check the project and WANDB_ENTITY, or set WANDB_MODE=offline"
                raise Rejected(reason, hint) from None
            raise Unavailable(reason) from None
        if run.disabled:
            raise Rejected("W&B is disabled", "run `wandb enabled`, or omit it")
        self.run = run
        self.place = f"{Path(run.dir).parent} (offline; `wandb sync` uploads it)" if run.offline else str(run.url)
        run.define_metric("samples")
        run.define_metric("*", step_metric="samples")
        return self._last_offline(identity) if run.offline else run.step - 1

    def _last_offline(self, identity: str) -> int:
        """The position of the last row in the files of earlier sessions."""
        paths = sorted((self.workdir / "wandb").glob(f"*run-*-{identity}/run-{identity}.wandb"), reverse=True)
        return next((last for path in paths if (last := _last_row(path)) != NO_POINT), NO_POINT)

    def describe(self, facts: RunFacts) -> None:
        with _unavailable():
            self.run.config.update(facts.config, allow_val_change=True)
            self.run.summary.update(facts.about)

    def send(self, records: Sequence[dict[str, Any]]) -> None:
        import wandb

        with _unavailable():
            for record in records:
                grouped = {name: value for name, value in values(record).items() if name.partition("/")[2] not in AXES}
                row: dict[str, Any] = {name: record[name] for name in AXES if name in record} | grouped
                picture = picture_path(self.workdir, record["samples"])
                if is_evaluation(record) and picture.exists():
                    row[EXAMPLES] = wandb.Image(str(picture))
                self.run.log(row, step=position(record), commit=True)

    def finish(self, outcome: str, facts: RunFacts) -> None:
        import wandb

        with _unavailable():
            self.run.summary.update(facts.about)
            if outcome == "finished":
                last = 3 * facts.result["samples"] + LAST
                if facts.plot and self.run.step <= last:
                    row = {"samples": facts.result["samples"], "training": wandb.Image(str(facts.plot))}
                    self.run.log(row, step=last, commit=True)
                self.run.summary.update({f"result/{name}": value for name, value in facts.result.items()})
                self._add_artifact("result", self.workdir / RESULT)
                if facts.best is not None:
                    self._add_artifact("checkpoint", facts.best)
            if outcome == "stopped":
                self.run.mark_preempting()
            self.run.finish(exit_code={"finished": 0, "stopped": EXIT_STOPPED}.get(outcome, 1))

    def _add_artifact(self, kind: str, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"{kind}-{self.run.id}", type=kind)
        artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path))
        self.run.log_artifact(artifact)


@contextmanager
def _unavailable() -> Iterator[None]:
    """Turn an exception of the client, whose service may have ended, into `Unavailable`."""
    try:
        yield
    except Exception as error:
        raise Unavailable(f"{type(error).__name__}: {first_line(error)}") from error


def _last_row(path: Path) -> int:
    """The number of the last history row in a transaction log of W&B, as its own command reads it, complete or not."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    printed = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False).stdout
    rows = (line for line in printed.splitlines() if b'"history"' in line)
    steps = [entry["history"]["step"]["num"] for entry in map(json.loads, rows) if entry.get("type") == "history"]
    return max(steps, default=NO_POINT)
