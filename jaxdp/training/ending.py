"""The end of a run: its result, errors that end it, and the checkpoint from which it can be resumed."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxdp import metrics
from jaxdp.checkpoint.listing import read_manifests
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.checkpoint.progress import Progress
from jaxdp.distributed.signal_handler import Stopped
from jaxdp.errors import TrainingError
from jaxdp.optim import loss_scale
from jaxdp.training.result import TrainResult, versions
from jaxdp.training.run import Run

LOWER_THE_RATE = "lower schedule.learning_rate or lengthen schedule.warmup_epochs, in a new --workdir or with --resume never"


def check_skipped(run: Run) -> None:
    """Raise TrainingError if a run skipped all of its steps."""
    steps, scaling = run.progress.steps, run.config.optimizer.loss_scale
    if steps and run.progress.skipped_steps == steps:
        scales = "" if scaling == "none" else f" at loss scales of {loss_scale.MINIMUM:g} to {loss_scale.INITIAL:g}"
        if isinstance(scaling, float):
            scales = f" at a loss scale of {scaling:g}"
        hint = "use --model.dtype bfloat16" if scales else LOWER_THE_RATE
        raise TrainingError(f"all {steps} steps were skipped because no gradient was finite{scales}: {hint}")


def check_evaluation(record: Mapping[str, Any]) -> None:
    """Raise TrainingError if the held-out loss after the last step is not finite."""
    if not math.isfinite(record[metrics.LOSS]):
        raise TrainingError(
            f"the held-out loss is {record[metrics.LOSS]} after the last step ({record['step']}, samples {record['samples']}): "
            f"the parameters are no longer finite; {LOWER_THE_RATE}"
        )


def result_evaluation(run: Run) -> dict[str, Any]:
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


def collect_result(run: Run, evaluation: dict[str, Any]) -> TrainResult:
    """The result of a run that has ended. All processes call this. evaluation: of the checkpoint that is the result."""
    group, plan, progress = run.processes, run.plan, progress_now(run)
    by_process = group.all_gather_object("bad images", progress.bad_images, while_waiting=lambda: None)
    bad_images = {name: reason for images in by_process for name, reason in images.items()}
    stop_reason = run.stop_reason if progress.samples < plan.total_samples else None
    progress = dataclasses.replace(progress, bad_images=bad_images, stop_reason=stop_reason)
    assert progress.first_step_seconds is not None
    report, phase = group.straggler_report(whole_run=True), plan.phase_before(progress.samples)
    has_best = run.config.stop.patience is not None
    shared = {field.name for field in dataclasses.fields(TrainResult)} & {field.name for field in dataclasses.fields(progress)}
    strategies = [run.compiler.shown_strategy(each) for each in plan.phases if each.first_sample <= phase.first_sample]
    values = metrics.values(evaluation, run.config.task)
    return TrainResult(
        loss=values.pop("loss"),
        metrics=values,
        eval_examples=evaluation[metrics.COUNT],
        epochs=run.epoch,
        seconds_to_first_step=progress.first_step_seconds,
        images_per_second=progress.samples / progress.training_seconds,
        devices=phase.devices,
        device_kind=run.devices[0].device_kind,
        mesh=phase.shape,
        versions=versions(),
        workdir=run.location,
        strategy=", ".join(dict.fromkeys(strategies)),
        processes=group.num_processes,
        hosts=len(set(group.host_numbers)),
        waiting_share=report.get("waiting_share", 0.0),
        slowest=report.get("slowest", []),
        save_error=run.checkpoints.last_error,
        best_samples=evaluation["samples"] if has_best else None,
        best_epoch=evaluation["epoch"] if has_best else None,
        stopped_early=stop_reason is not None,
        **{name: getattr(progress, name) for name in shared},
    )


def progress_now(run: Run) -> Progress:
    """The progress of a run with its times and bad images up to now."""
    return dataclasses.replace(run.progress, wall_seconds=run.clock.wall_seconds, bad_images=run.datasets.bad_images)


def latest(run: Run) -> Manifest | None:
    """The newest checkpoint, after the save in progress; on rank 0 the newest one whose files are all intact.

    Only rank 0 verifies checksums: otherwise every process would read all files at once.
    """
    run.checkpoints.wait()
    return run.checkpoints.latest_valid() if run.is_rank0 else next(read_manifests(run.checkpoints.folder), None)


def stop_exception(run: Run, *, saved: bool) -> Stopped | TrainingError:
    """The exception that ends a run after a stop signal. saved: whether a step has run; the last one is then saved."""
    reason = run.signals.stop_reason
    if not saved:
        newest = latest(run)
        resume = f"continues from {newest.path}" if newest else "starts over"
        return Stopped(f"stopped by {reason} before the first step of this session; {run.resume_action} {resume}")
    message = f"stopped by {reason} after step {run.progress.steps} (epoch {run.epoch:.2f})"
    if save_error := run.checkpoints.last_error:
        return TrainingError(f"{message}, which could not be saved ({save_error}); {describe_latest(run)}")
    return Stopped(f"{message}; {describe_latest(run)}")


def describe_latest(run: Run, advice: str = "{again} continues from it") -> str:
    """Path, epoch and accuracy of the `latest` checkpoint, and `advice` with {path} and {again} replaced."""
    newest = latest(run)
    if newest is None:
        return "there is no checkpoint yet"
    accuracy = "".join(f", {text}" for text in metrics.words(newest.evaluation)[:1])
    epoch = newest.samples / run.plan.examples
    advice = advice.format(path=newest.path, again=run.resume_action)
    verified = "valid " if run.is_rank0 else ""
    return f"the last {verified}checkpoint is {newest.path} (epoch {epoch:.2f}{accuracy}); {advice}"
