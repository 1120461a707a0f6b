"""What a session finds and leaves in the directory of the run and at its URL: files, checkpoints, uploads."""

import time
from typing import TYPE_CHECKING

import jax

from jaxdp import planning, schedules
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.errors import ConfigError
from jaxdp.planning import Plan, interval_elapsed
from jaxdp.run_records import RESUMING
from jaxdp.schedules import SCHEDULES
from jaxdp.setup import run_dir
from jaxdp.training.callback import Callback
from jaxdp.training.run import Run
from jaxdp.validation import changes

if TYPE_CHECKING:
    from jaxdp.cloud.mirror import Mirror, MirrorFollower


class RunFiles(Callback):
    """Marks the run's directory as running, removes the log's records after the restored position, and shows where the run
    continues.

    All this happens at the start, so a session that cannot start leaves the files of a run unchanged. Attached on rank 0.
    """

    def on_start(self, run: Run) -> None:
        kept = run.restored and run_dir.kept_records(run.restored, evaluates_again=run.progress.evaluates_now)
        records, warnings = kept or ([], [])
        run_dir.mark_running(run.workdir, run.config)
        run_dir.write_class_names(run.workdir, run.datasets.classes)
        run_dir.write_log(run.workdir, records)
        run.logged = [record for record in records if record["samples"] == run.progress.samples]
        run.progress.records = max(run.progress.records, len(records))
        for warning in warnings:
            run.info(warning)
        if run.restored is not None:
            run.info(f"{RESUMING}{run.restored.location}: epoch {run.epoch:.2f}, step {run.progress.steps}")
            if changed := changed_plan(run.restored, run.plan):
                run.info(changed)


class Uploads(Callback):
    """Starts the uploads of a run at a URL, and ends the run if another process has taken it over."""

    def __init__(self, mirror: "Mirror | MirrorFollower") -> None:
        self.mirror = mirror

    def on_start(self, run: Run) -> None:
        self.mirror.begin(run.checkpoints.retention, run.info)

    def before_step(self, run: Run, batch: dict[str, jax.Array]) -> None:
        self.mirror.check()


class CheckpointInterval(Callback):
    """Saves when an interval of `config.checkpoint` has elapsed, by epochs or time, or when the processes ask for it.

    The loop itself saves at the end of each phase and of the run.
    """

    def on_start(self, run: Run) -> None:
        self.seen = run.progress.samples
        self.asked_at: float | None = None  # `run.saved_at` when all processes were last asked to save

    def before_step(self, run: Run, batch: dict[str, jax.Array]) -> None:
        config, before, after = run.config.checkpoint, self.seen, run.progress.samples
        self.seen = after
        agreed = run.processes.take_agreed_save()  # before a new request: this save serves the previous one
        overdue = config.every_minutes is not None and time.monotonic() - run.saved_at >= 60 * config.every_minutes
        if overdue and not agreed and run.is_rank0 and self.asked_at != run.saved_at:
            self.asked_at = run.saved_at  # the answer comes two steps later
            agreed = run.processes.request_save()
        by_epochs = interval_elapsed(config.every_epochs, unit=run.plan.examples, before=before, after=after)
        if (agreed or by_epochs) and run.saved_samples != after:
            run.save()


def changed_plan(manifest: Manifest, plan: Plan) -> str | None:
    """One line on what changes in a run that continues from a checkpoint with a new plan; None if nothing, or at its end."""
    saved, config, samples = manifest.config, plan.config, manifest.samples
    names = {line.partition(":")[0].partition(".")[0] for line in changes(saved, config)}
    if samples >= plan.total_samples or names.isdisjoint({"epochs", "batch", "schedule"}):
        return None
    examples = round(samples / manifest.epoch) if samples else plan.examples
    spans = planning.phase_steps(saved.batch, saved.epochs, examples)
    index = max(index for index, (first, steps) in enumerate(spans) if steps and first <= samples)
    batch = saved.batch[index].global_batch
    try:
        rate = f"{schedules.learning_rate(saved.schedule, manifest.epoch, epochs=saved.epochs, global_batch=batch):.4g}"
    except ConfigError:  # a registered schedule that is missing, or that ends with its run
        rate = "unknown"
    values = {
        "learning rate": (rate, f"{plan.learning_rate(samples):.4g}"),
        "batch": (f"{batch}", f"{plan.phases[plan.phase_at(samples)].global_batch}"),
    }
    changed = [f"{name} {old} -> {new}" for name, (old, new) in values.items() if old != new]
    what = f"it changes {', '.join(changed)}" if changed else "learning rate and batch stay the same here"
    epoch = f"epoch {samples / plan.examples:.2f}"
    if samples == plan.schedule_start:
        ends = f" and ends with the run at epoch {config.epochs:g}" if config.schedule.name not in SCHEDULES.registered else ""
        return f"the schedule starts anew at {epoch}{ends}; {what}"
    choice = "--schedule-from-now starts the schedule anew there instead"
    return f"the plan above holds from {epoch} on, not for the epochs before; {what}; {choice}"
