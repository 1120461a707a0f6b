"""Checkpoints of a training run: which one it continues from, when it saves, and the metadata it stores."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp.checkpoint.listing import read_manifests
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.manifest import CorruptCheckpoint, Manifest
from jaxdp.checkpoint.orbax_io import CheckpointMismatch, load_state
from jaxdp.checkpoint.progress import Progress
from jaxdp.config import RESUME_SAFE_FIELDS
from jaxdp.distributed.preemption import SignalHandler, Stopped
from jaxdp.errors import ConfigError, TrainingError
from jaxdp.loggers.console import Quiet, Screen
from jaxdp.planning import PlannedPhase
from jaxdp.schedules import interval_elapsed
from jaxdp.training import early_stopping, run_dir
from jaxdp.training.mirror import Mirror, MirrorFollower
from jaxdp.training.result import versions
from jaxdp.training.run_setup import RunSetup
from jaxdp.training.state import TrainState
from jaxdp.validation import changes, from_dict


class Restored(NamedTuple):
    """State and progress of a checkpoint that a run continues from."""

    state: TrainState
    progress: Progress
    manifest: Manifest


class RunCheckpoints:
    """Restores a run at its start and saves it while it trains. `manager` reads, writes and removes the checkpoints.

    mirror: uploads them, for a run at a URL.
    """

    def __init__(
        self,
        setup: RunSetup,
        workdir: Path,
        *,
        signals: SignalHandler,
        screen: Screen | Quiet,
        mirror: Mirror | MirrorFollower | None = None,
    ) -> None:
        self.setup, self.workdir, self.signals, self.group, self.screen = setup, workdir, signals, signals.group, screen
        folder = workdir / run_dir.CHECKPOINTS
        config, self.mirror = setup.config, mirror
        self.manager = CheckpointManager(
            folder, config.checkpoint, screen.info, group=self.group, uploader=mirror, metric=config.stop.metric
        )
        self.last_save = time.monotonic()
        self.saved_samples: int | None = None

    def restore(self, abstract_state_of: Callable[[int], TrainState], origin: Manifest | None) -> Restored | None:
        """The newest valid checkpoint of this run, or else `origin`, a checkpoint of another run; None if there is neither.

        abstract_state_of: shapes and shardings of the state at a number of samples. Raises ConfigError if the arrays differ.
        """
        try:
            restored = self.manager.restore(abstract_state_of)
        except CheckpointMismatch as error:
            raise ConfigError("--workdir", str(self.workdir), reason=str(error), hint="use another directory") from None
        if restored is not None:
            state, manifest = restored
            self.manager.retention.continue_from(manifest)
            self.saved_samples = manifest.samples
        elif origin is not None:
            manifest = origin
            run_dir.check_same_optimizer(origin, self.setup.config)
            try:
                state = load_state(origin, abstract_state_of(origin.samples))
            except (CorruptCheckpoint, CheckpointMismatch) as error:
                raise ConfigError("--resume", str(origin.path), reason=str(error)) from None
        else:
            return None
        progress = Progress(**manifest.metadata["progress"])
        progress.sessions += 1
        saved = from_dict(manifest.metadata["config"])
        if changes(saved, self.setup.config, ignore=(*RESUME_SAFE_FIELDS, "stop")):
            progress.last_evaluation = None  # it was of another configuration
        same_data = manifest.metadata.get("data") == self.setup.data_fingerprint
        early_stopping.adapt(progress, saved, self.setup.config, same_images=restored is not None and same_data)
        return Restored(state, progress, manifest)

    def is_due(self, phase: PlannedPhase, *, before: int, after: int) -> bool:
        """Whether to save after the step that took the run from `before` to `after` samples.

        True at the end of every phase but the last (the end of the run is saved after its evaluation), and when an interval of
        `config.checkpoint` elapsed. Raises TrainingError if another process has taken over a run at a URL.
        """
        if self.mirror is not None:
            self.mirror.check()
        config, plan = self.setup.config.checkpoint, self.setup.plan
        agreed = self.signals.take_agreed_save()  # before a new request: this save serves the previous one
        if after >= phase.end:
            return phase is not plan.phases[-1]
        overdue = config.every_minutes is not None and time.monotonic() - self.last_save >= 60 * config.every_minutes
        if overdue and not agreed and self.group.is_rank0:
            agreed = self.group.request("save")
        epochs = interval_elapsed(config.every_epochs, unit=plan.examples, before=before, after=after)
        return agreed or epochs or interval_elapsed(config.every_samples, unit=1, before=before, after=after)

    def save(self, state: TrainState, progress: Progress, *, placed: TrainState, sync_log: Callable[[], None]) -> None:
        """Start saving a state; all metrics up to it have been logged. Waits for the previous save.

        placed: the same state as the step has it on the devices, whose replicas are compared.
        sync_log: called on rank 0 before the checkpoint is complete.
        """
        self.group.set_activity("save", progress.steps, "waiting for the previous save")
        self.last_save, self.saved_samples = time.monotonic(), progress.samples
        evaluation = progress.last_evaluation
        metadata: dict[str, Any] = {
            "progress": dataclasses.asdict(progress),
            "evaluation": evaluation if evaluation and evaluation["samples"] == progress.samples else None,
            "epoch": progress.samples / self.setup.plan.examples,
            "config": dataclasses.asdict(self.setup.config),
            "versions": versions(),
            "data": self.setup.data_fingerprint,
            "per_worker_batch": {phase.index: [phase.global_batch, phase.per_worker_batch] for phase in self.setup.plan.phases},
        }
        self.manager.save(state, progress.samples, metadata, placed=placed, before_manifest=sync_log)

    def wait(self) -> None:
        """Wait for the save in progress. Raises TrainingError if it rejected the state."""
        self.manager.wait()
        self.manager.check()

    def result_evaluation(self, progress: Progress) -> dict[str, Any]:
        """The evaluation of the checkpoint that is the result of the run: with early stopping the best one, else the last.

        All processes call this at the end, when all checkpoints are saved. If the best one could not be saved, it is the last.
        """
        assert progress.last_evaluation is not None
        best, folder = progress.best or progress.last_evaluation, self.manager.folder
        names = [str(manifest.samples) for manifest in read_manifests(folder)] if self.group.is_rank0 else []
        if progress.best is None or self.group.broadcast_object("best checkpoint", str(best["samples"]) in names):
            return best
        self.screen.info(f"the best checkpoint, {folder / str(best['samples'])}, does not exist; the result is the last one")
        return progress.last_evaluation

    def latest(self) -> Manifest | None:
        """The newest checkpoint, after the save in progress; on rank 0 the newest one whose files are all intact.

        Only rank 0 verifies checksums: otherwise every process would read all files at once.
        """
        self.manager.wait()
        folder = self.manager.folder
        return self.manager.latest_valid() if self.group.is_rank0 else next(read_manifests(folder), None)

    def stop_exception(self, reason: str | None, progress: Progress | None) -> Stopped | TrainingError:
        """The exception that ends a run after a stop signal. progress: at the last step, which is saved; None before
        the first step."""
        if progress is None:
            latest = self.latest()
            resume = f"continues from {latest.path}" if latest else "starts over"
            return Stopped(f"stopped by {reason} before the first step of this session; {self.screen.resume_action} {resume}")
        epoch = progress.samples / self.setup.plan.examples
        message = f"stopped by {reason} after step {progress.steps} (epoch {epoch:.2f})"
        if save_error := self.manager.last_error:
            return TrainingError(f"{message}, which could not be saved ({save_error}); {self.describe_latest()}")
        return Stopped(f"{message}; {self.describe_latest()}")

    def describe_latest(self, advice: str = "{again} continues from it") -> str:
        """Path, epoch and accuracy of the `latest` checkpoint, and `advice`, in which {path} and {again} are replaced."""
        latest = self.latest()
        if latest is None:
            return "there is no checkpoint yet"
        accuracy = "" if latest.accuracy is None else f", accuracy {100 * latest.accuracy:.2f} %"
        epoch = latest.samples / self.setup.plan.examples
        advice = advice.format(path=latest.path, again=self.screen.resume_action)
        verified = "valid " if self.group.is_rank0 else ""
        return f"the last {verified}checkpoint is {latest.path} (epoch {epoch:.2f}{accuracy}); {advice}"
