"""The start of a session: state and progress from the newest checkpoint, from another run, from weights, or from the seed."""

from collections.abc import Callable
from typing import NamedTuple

from jaxdp.checkpoint.manifest import CorruptCheckpoint, Manifest
from jaxdp.checkpoint.orbax_io import CheckpointMismatch, load_state
from jaxdp.checkpoint.progress import Progress
from jaxdp.errors import ConfigError
from jaxdp.network import InitialValues
from jaxdp.run_records import EVENTS, read_events
from jaxdp.training.clock import Clock
from jaxdp.training.run import Run
from jaxdp.training.state import TrainState, abstract_state, create_state, with_values
from jaxdp.validation import RESUME_SAFE_FIELDS, changes


class StartPoint(NamedTuple):
    """What a run without a checkpoint starts from: a checkpoint of another run, given values, or the seed.

    check: raises ConfigError for a checkpoint (or None) from which the run cannot continue. values: returns the given values,
    if any; raises ConfigError if they are required and missing.
    """

    origin: Manifest | None = None
    check: Callable[[Manifest | None], None] = lambda manifest: None
    values: Callable[[], InitialValues | None] = lambda: None


def restore_or_initialize(run: Run, start: StartPoint) -> None:
    """Set the state of a run before its next step, and its progress, phase and clock.

    Raises ConfigError if the run cannot start here.
    """
    run.processes.set_activity("load", detail="restoring the newest checkpoint, if there is one")
    restored = _restore(run, start.origin)
    start.check(restored)
    if restored is None:
        values, resume = start.values(), "starts over"
    else:
        run.progress = Progress(**restored.metadata["progress"])
        run.progress.sessions += 1
        if changes(restored.config, run.config, ignore=(*RESUME_SAFE_FIELDS, "stop")):
            run.progress.last_evaluation = None  # it was of another configuration
        if run.saved_samples is None or changes(restored.config, run.config):
            run.progress.stop_reason = None  # of another run, or of a config that has changed since
        run.stop_reason = run.progress.stop_reason
        run.datasets.train.bad_images.update(run.progress.bad_images)
        resume = f"continues from {restored.path}"
    run.restored, run.clock = restored, Clock(run.progress, run.started)
    run.phase = run.plan.phase_before(run.progress.samples)
    if run.progress.unfrozen and not run.plan.phases[run.plan.phase_at(run.progress.samples)].unfrozen:
        reason = f"the stages of the checkpoint at epoch {run.epoch:.4g} are unfrozen already"
        raise ConfigError(
            "finetune.unfreeze_epoch", run.config.finetune.unfreeze_epoch, reason=reason, hint="keep it unchanged"
        )
    if restored is None:
        run.state = _initial_state(run, values)
    run.processes.set_resume_hint(f"{run.resume_action} {resume}")
    earlier = run.processes.broadcast_object("sessions", _sessions(run) if run.is_rank0 else None)
    run.progress.sessions = max(run.progress.sessions, earlier + 1)  # some may have been killed before they saved


def _restore(run: Run, origin: Manifest | None) -> Manifest | None:
    """Restore the state of the run's newest valid checkpoint, or else of `origin`; returns the checkpoint, if any."""

    def abstract_state_of(manifest: Manifest) -> TrainState:
        mesh = run.compiler.mesh(run.plan.phase_before(manifest.samples))
        return abstract_state(manifest.config_of_state(run.config), run.model, mesh)

    try:
        restored = run.checkpoints.restore(abstract_state_of)
    except CheckpointMismatch as error:
        raise ConfigError("--workdir", str(run.workdir), reason=str(error), hint="use another directory") from None
    if restored is not None:
        run.state, origin = restored
        run.checkpoints.retention.continue_from(origin)
        run.saved_samples = origin.samples
    elif origin is not None:
        try:
            run.state = load_state(origin, abstract_state_of(origin))
        except (CorruptCheckpoint, CheckpointMismatch) as error:
            raise ConfigError("--resume", str(origin.path), reason=str(error)) from None
    return origin


def _sessions(run: Run) -> int:
    """The number of sessions of the run so far, by its events; 0 if unknown. Checkpoints do not know of killed sessions."""
    counts = (event.get("sessions") for event in read_events(run.workdir / EVENTS))
    return max((count for count in counts if isinstance(count, int)), default=0)


def _initial_state(run: Run, values: InitialValues | None) -> TrainState:
    """The state before the first step, from the seed and, if given, other values."""
    run.status("compiling")
    run.processes.set_activity("compile")
    run.compiler.prepare_train(run.phase)
    with run.clock.paused("compilation"):
        state = run.signals.run_in_thread(create_state, run.config, run.model, run.mesh)
    if values is not None:
        state = with_values(state, values, run.mesh)
        run.info(values.description)
    return state
