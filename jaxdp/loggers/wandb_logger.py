"""Weights & Biases: one run per run directory, resumed by its id. The client's files are in `wandb` of the run directory.

The number of a history row (`_step`) is the record's position. The charts' x axis is `samples`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdp.errors import EXIT_STOPPED
from jaxdp.loggers.tracker import CHECKPOINT_SECONDS, NO_POSITION, STOP_SECONDS, Ending, Record, Tracker

AXES = ("samples", "step", "epoch", "wall_seconds")


class WandbLogger(Tracker):
    """target: the project."""

    name = "wandb"
    settings = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}  # noqa: RUF012 # the latter waits 10 s at the exit
    run: Any = None

    def open(self) -> int:
        import wandb

        (self.workdir / "wandb").mkdir(exist_ok=True)  # otherwise the client writes elsewhere if it cannot create this folder
        if self.run is not None:
            raise RuntimeError("W&B's service has ended")
        settings = wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            init_timeout=30.0,
            finish_timeout=STOP_SECONDS - 2.0,
            finish_timeout_raises=True,
        )
        self.run = run = wandb.init(
            project=self.target,
            id=self.state["id"],
            name=self.run_name,
            dir=str(self.workdir),
            resume="allow",
            settings=settings,
        )
        self.place = f"{Path(run.dir).parent} (offline; `wandb sync` uploads it)" if run.offline else str(run.url)
        run.define_metric("samples")
        run.define_metric("*", step_metric="samples")
        run.config.update(self.config, allow_val_change=True)
        run.summary.update(self.about)
        return self.state.get("last", NO_POSITION) if run.offline else run.step - 1

    def send(self, records: Sequence[Record]) -> None:
        import wandb

        if self.run.offline:  # nothing else knows it when the run is resumed; written first, so that no row is doubled
            self.state = self.write_state(self.state | {"last": records[-1].position})
        for record in records:
            grouped = {name: value for name, value in record.numbers.items() if name.partition("/")[2] not in AXES}
            row: dict[str, Any] = {name: record.values[name] for name in AXES if name in record.values} | grouped
            if record.picture is not None:
                row["examples/held_out"] = wandb.Image(record.picture())
            self.run.log(row, step=record.position, commit=True)

    def close(self, ending: Ending) -> None:
        import wandb

        self.run.summary.update(self.about | {f"result/{name}": value for name, value in ending.result.items()})
        if ending.plot is not None:
            row = {"samples": ending.result["samples"], "training": wandb.Image(str(ending.plot))}
            self.run.log(row, step=3 * ending.result["samples"] + 2, commit=True)
        try:
            if ending.checkpoint is not None:
                artifact = wandb.Artifact(f"checkpoint-{self.run.id}", type="checkpoint")
                artifact.add_dir(str(ending.checkpoint))
                sent = self.run.log_artifact(artifact)
                if not self.run.offline:
                    sent.wait(round(CHECKPOINT_SECONDS))
            if ending.outcome == "stopped":
                self.run.mark_preempting()
            self.run.finish(exit_code={"finished": 0, "stopped": EXIT_STOPPED}.get(ending.outcome, 1))
        except Exception as error:
            rest = f"`wandb sync {Path(self.run.dir).parent}` sends the rest"
            self._show(f"not everything was sent ({type(error).__name__}); {rest}")
