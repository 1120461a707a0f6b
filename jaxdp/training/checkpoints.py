"""Checkpoints of a run: which one it continues from, when it saves, what it stores, and what it says about them."""

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxdp.checkpoint.listing import read_manifests
from jaxdp.checkpoint.manifest import CorruptCheckpoint, Manifest
from jaxdp.checkpoint.orbax_io import CheckpointMismatch, load_state
from jaxdp.checkpoint.progress import Progress
from jaxdp.config import RESUME_SAFE_FIELDS
from jaxdp.distributed.preemption import Stopped
from jaxdp.errors import ConfigError, TrainingError
from jaxdp.schedules import interval_elapsed
from jaxdp.training import early_stopping, run_dir
from jaxdp.training.callback import Callback
from jaxdp.training.result import progress_now, versions
from jaxdp.training.state import TrainState
from jaxdp.validation import changes, from_dict

if TYPE_CHECKING:
    import jax

    from jaxdp.training.run import Run

MOST_MINUTES = 30.0  # between checkpoints: what a failure loses at most of a long epoch


class Restored(NamedTuple):
    """State and progress of a checkpoint that a run continues from."""

    state: TrainState
    progress: Progress
    manifest: Manifest


class CheckpointInterval(Callback):
    """Saves when an interval of `config.checkpoint` has elapsed, by epochs or time, or when the processes ask for it.

    The loop itself saves at the end of each phase and of the run.
    """

    def on_start(self, run: "Run") -> None:
        self.seen = run.progress.samples

    def before_step(self, run: "Run", batch: "dict[str, jax.Array]") -> None:
        config, before, after = run.config.checkpoint, self.seen, run.progress.samples
        self.seen = after
        agreed = run.signals.take_agreed_save()  # before a new request: this save serves the previous one
        overdue = time.monotonic() - run.saved_at >= 60 * MOST_MINUTES
        if overdue and not agreed and run.is_rank0:
            agreed = run.processes.request_save()
        by_epochs = interval_elapsed(config.every_epochs, unit=run.plan.examples, before=before, after=after)
        if (agreed or by_epochs) and run.saved_samples != after:
            run.save()


def restore(run: "Run", abstract_state_of: Callable[[int], TrainState], origin: Manifest | None) -> Restored | None:
    """The newest valid checkpoint of this run, or else `origin`, a checkpoint of another run; None if there is neither.

    abstract_state_of: shapes and shardings of the state at a number of samples. Raises ConfigError if the arrays differ.
    """
    try:
        restored = run.checkpoints.restore(abstract_state_of)
    except CheckpointMismatch as error:
        raise ConfigError("--workdir", str(run.workdir), reason=str(error), hint="use another directory") from None
    if restored is not None:
        state, manifest = restored
        run.checkpoints.retention.continue_from(manifest)
        run.saved_samples = manifest.samples
    elif origin is not None:
        manifest = origin
        run_dir.check_same_optimizer(origin, run.config)
        try:
            state = load_state(origin, abstract_state_of(origin.samples))
        except (CorruptCheckpoint, CheckpointMismatch) as error:
            raise ConfigError("--resume", str(origin.path), reason=str(error)) from None
    else:
        return None
    progress = Progress(**manifest.metadata["progress"])
    progress.sessions += 1
    saved = from_dict(manifest.metadata["config"])
    if changes(saved, run.config, ignore=(*RESUME_SAFE_FIELDS, "stop")):
        progress.last_evaluation = None  # it was of another configuration
    same_data = manifest.metadata.get("data") == run.setup.data_fingerprint
    early_stopping.adapt(progress, saved, run.config, same_images=restored is not None and same_data)
    return Restored(state, progress, manifest)


def metadata(run: "Run") -> dict[str, Any]:
    """What a checkpoint stores beside the arrays."""
    progress = progress_now(run)
    evaluation = progress.last_evaluation
    return {
        "progress": dataclasses.asdict(progress),
        "evaluation": evaluation if evaluation and evaluation["samples"] == progress.samples else None,
        "epoch": run.epoch,
        "config": dataclasses.asdict(run.config),
        "versions": versions(),
        "data": run.setup.data_fingerprint,
        "per_worker_batch": {phase.index: [phase.global_batch, phase.per_worker_batch] for phase in run.plan.phases},
    }


def wait(run: "Run") -> None:
    """Wait for the save in progress. Raises TrainingError if it rejected the state."""
    run.checkpoints.wait()
    run.checkpoints.check()


def result_evaluation(run: "Run") -> dict[str, Any]:
    """The evaluation of the checkpoint that is the result of the run: with early stopping the best one, else the last.

    All processes call this at the end, when all checkpoints are saved. If the best one could not be saved, it is the last.
    """
    progress, folder = run.progress, run.checkpoints.folder
    assert progress.last_evaluation is not None
    best = progress.best or progress.last_evaluation
    names = [str(manifest.samples) for manifest in read_manifests(folder)] if run.is_rank0 else []
    if progress.best is None or run.processes.broadcast_object("best checkpoint", str(best["samples"]) in names):
        return best
    run.info(f"the best checkpoint, {folder / str(best['samples'])}, does not exist; the result is the last one")
    return progress.last_evaluation


def latest(run: "Run") -> Manifest | None:
    """The newest checkpoint, after the save in progress; on rank 0 the newest one whose files are all intact.

    Only rank 0 verifies checksums: otherwise every process would read all files at once.
    """
    run.checkpoints.wait()
    return run.checkpoints.latest_valid() if run.is_rank0 else next(read_manifests(run.checkpoints.folder), None)


def stop_exception(run: "Run", *, saved: bool) -> Stopped | TrainingError:
    """The exception that ends a run after a stop signal. saved: whether a step has run, the last of which is saved."""
    reason = run.signals.stop_reason
    if not saved:
        newest = latest(run)
        resume = f"continues from {newest.path}" if newest else "starts over"
        return Stopped(f"stopped by {reason} before the first step of this session; {run.resume_action} {resume}")
    message = f"stopped by {reason} after step {run.progress.steps} (epoch {run.epoch:.2f})"
    if save_error := run.checkpoints.last_error:
        return TrainingError(f"{message}, which could not be saved ({save_error}); {describe_latest(run)}")
    return Stopped(f"{message}; {describe_latest(run)}")


def describe_latest(run: "Run", advice: str = "{again} continues from it") -> str:
    """Path, epoch and accuracy of the `latest` checkpoint, and `advice`, in which {path} and {again} are replaced."""
    newest = latest(run)
    if newest is None:
        return "there is no checkpoint yet"
    accuracy = "" if newest.accuracy is None else f", accuracy {100 * newest.accuracy:.2f} %"
    epoch = newest.samples / run.plan.examples
    advice = advice.format(path=newest.path, again=run.resume_action)
    verified = "valid " if run.is_rank0 else ""
    return f"the last {verified}checkpoint is {newest.path} (epoch {epoch:.2f}{accuracy}); {advice}"
