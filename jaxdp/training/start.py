"""The start of a session: state and progress from the newest checkpoint, from another run, from weights, or from the seed."""

from collections.abc import Callable
from typing import NamedTuple

from jaxdp import schedules
from jaxdp.checkpoint.manifest import CorruptCheckpoint, Manifest
from jaxdp.checkpoint.orbax_io import CheckpointMismatch, load_state
from jaxdp.checkpoint.progress import Progress
from jaxdp.config import RESUME_SAFE_FIELDS, Config
from jaxdp.errors import ConfigError
from jaxdp.network import InitialValues
from jaxdp.planning import Plan
from jaxdp.records import EVENTS, RESUMING, read_events
from jaxdp.training.clock import Clock
from jaxdp.training.run import Run
from jaxdp.training.state import TrainState, abstract_state, create_state, with_values
from jaxdp.validation import changes, from_dict


class StartPoint(NamedTuple):
    """What a run without a checkpoint starts from: a checkpoint of another run, or given values, or else the seed.

    accept_changes: whether a checkpoint of a run on other data is accepted. values: returns the given values, if any; raises
    ConfigError if they are needed and missing.
    """

    origin: Manifest | None = None
    accept_changes: bool = False
    values: Callable[[], InitialValues | None] = lambda: None


def restore_or_initialize(run: Run, start: StartPoint) -> None:
    """Set the state of a run before its next step, and its progress, phase and clock.

    Raises ConfigError if the run cannot start here.
    """
    run.processes.set_activity("load", detail="restoring the newest checkpoint, if there is one")
    restored = _restore(run, start.origin)
    if restored is None:
        values, resume = start.values(), "starts over"
    else:
        check_fits(restored, run.plan, run.data_fingerprint, accept_changes=start.accept_changes)
        _continue(run, restored)
        resume = f"continues from {restored.path}"
    run.restored, run.clock = restored, Clock(run.progress, run.started)
    run.phase = run.plan.phase_before(run.progress.samples)
    if restored is None:
        run.state = _initial_state(run, values)
    run.processes.set_resume_hint(f"{run.resume_action} {resume}")
    earlier = run.processes.broadcast_object("sessions", _sessions(run) if run.is_rank0 else None)
    run.progress.sessions = max(run.progress.sessions, earlier + 1)  # some may have been killed before they saved
    if restored is not None:
        run.info(f"{RESUMING}{restored.location}: epoch {run.epoch:.2f}, step {run.progress.steps}")
        if changed := _changed_plan(restored, run.plan):
            run.info(changed)


def _restore(run: Run, origin: Manifest | None) -> Manifest | None:
    """Set the state to that of the run's newest valid checkpoint, or else of `origin`; returns the checkpoint, if any."""

    def abstract_state_of(samples: int) -> TrainState:
        return abstract_state(run.config, run.model, run.compiler.mesh(run.plan.phase_before(samples)))

    try:
        restored = run.checkpoints.restore(abstract_state_of)
    except CheckpointMismatch as error:
        raise ConfigError("--workdir", str(run.workdir), reason=str(error), hint="use another directory") from None
    if restored is not None:
        run.state, manifest = restored
        run.checkpoints.retention.continue_from(manifest)
        run.saved_samples = manifest.samples
        return manifest
    if origin is not None:
        try:
            run.state = load_state(origin, abstract_state_of(origin.samples))
        except (CorruptCheckpoint, CheckpointMismatch) as error:
            raise ConfigError("--resume", str(origin.path), reason=str(error)) from None
    return origin


def check_fits(manifest: Manifest, plan: Plan, data_fingerprint: dict[str, str], *, accept_changes: bool) -> None:
    """Raise ConfigError if a checkpoint is of other data, unless accepted, or of a position after the end of the run."""
    saved, current = manifest.metadata.get("data"), data_fingerprint
    if saved not in (None, current) and not accept_changes:
        different = [f"{name}: {saved.get(name)} -> {current[name]}" for name in current if saved.get(name) != current[name]]
        raise ConfigError(
            "data",
            reason=f"{manifest.path} is of a run on other data ({'; '.join(different)})",
            hint="restore the data, start over with --resume never, or resume on the new data with --accept-changes",
        )
    if manifest.samples > plan.total_samples:
        reason, hint = f"{manifest.path} is at epoch {manifest.epoch:g} already", "use more epochs, or another --workdir"
        raise ConfigError("epochs", plan.config.epochs, reason=reason, hint=hint)


def _continue(run: Run, manifest: Manifest) -> None:
    """Take the progress of a checkpoint, without what is not that of this configuration, data and directory."""
    progress, saved = Progress(**manifest.metadata["progress"]), from_dict(manifest.metadata["config"])
    progress.sessions += 1
    if changes(saved, run.config, ignore=(*RESUME_SAFE_FIELDS, "stop")):
        progress.last_evaluation = None  # it was of another configuration
    same_data = manifest.metadata.get("data") == run.data_fingerprint
    is_own = manifest.path.parent == run.checkpoints.folder
    _adapt_early_stopping(progress, saved, run.config, same_images=is_own and same_data)
    run.progress = progress
    run.datasets.add_bad_images(progress.bad_images)


def _adapt_early_stopping(progress: Progress, saved: Config, config: Config, *, same_images: bool) -> None:
    """Adapt what a checkpoint knows of the evaluations to the configuration that continues from it.

    A change of `stop.patience` and `stop.min_delta` only keeps it all. Another change starts the count of evaluations without
    improvement anew, and another metric or other data also the search for the best one. same_images: whether the checkpoints
    of those evaluations are in the directory of this run, and the data are the same.
    """
    names = {line.partition(":")[0] for line in changes(saved, config)}
    if config.stop.patience is None or not same_images or any(name.startswith(("data.", "stop.metric")) for name in names):
        progress.best, progress.improved, progress.not_improved = None, None, 0
    elif changes(saved, config, ignore=(*RESUME_SAFE_FIELDS, "stop")):
        progress.not_improved = 0


def _changed_plan(manifest: Manifest, plan: Plan) -> str | None:
    """What a run that continues from a checkpoint with another plan changes, in one line; None if nothing or at its end."""
    saved, config, samples = from_dict(manifest.metadata["config"]), plan.config, manifest.samples
    names = {line.partition(":")[0].partition(".")[0] for line in changes(saved, config)}
    if samples >= plan.total_samples or names.isdisjoint({"epochs", "batch", "schedule"}):
        return None
    spans = schedules.phase_steps(saved.batch, saved.epochs, round(samples / manifest.epoch))
    index = max(index for index, (first, steps) in enumerate(spans) if steps and first <= samples)
    batch = saved.batch[index].global_batch
    rate = schedules.learning_rate(saved.schedule, manifest.epoch, epochs=saved.epochs, global_batch=batch)
    values = {
        "learning rate": (f"{rate:.4g}", f"{plan.learning_rate(samples):.4g}"),
        "batch": (f"{batch}", f"{plan.phases[plan.phase_at(samples)].global_batch}"),
    }
    changed = [f"{name} {old} -> {new}" for name, (old, new) in values.items() if old != new]
    what = f"it changes {', '.join(changed)}" if changed else "learning rate and batch stay the same here"
    return f"the plan above holds from epoch {samples / plan.examples:.2f} on, not for the epochs before; {what}"


def _sessions(run: Run) -> int:
    """The number of sessions of the run so far, by its events; 0 if unknown. Checkpoints do not know of killed sessions."""
    counts = (event.get("sessions") for event in read_events(run.workdir / EVENTS))
    return max((count for count in counts if isinstance(count, int)), default=0)


def _initial_state(run: Run, values: InitialValues | None) -> TrainState:
    """The state before the first step, from the seed and, if given, other values."""
    run.status("compiling")
    run.processes.set_activity("compile")
    run.compiler.prepare_train(run.phase)
    with run.clock.waiting_for_compiler():
        state = run.signals.run_in_thread(create_state, run.config, run.model, run.mesh)
    if values is not None:
        state = with_values(state, values, run.mesh)
        run.info(values.description)
    return state
