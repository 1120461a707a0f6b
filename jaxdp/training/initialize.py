"""The start of a session: state and progress from the newest checkpoint, from another run, from weights, or from the seed."""

from pathlib import Path
from typing import Any, NamedTuple

from jaxdp import schedules
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.checkpoint.progress import Progress
from jaxdp.distributed.preemption import SignalHandler
from jaxdp.loggers.console import Quiet, Screen
from jaxdp.loggers.events import EVENTS, RESUMING, read_events
from jaxdp.models.weights import Weights
from jaxdp.planning import Plan
from jaxdp.training import finetune, run_dir
from jaxdp.training.run_checkpoints import RunCheckpoints
from jaxdp.training.run_setup import RunSetup
from jaxdp.training.state import TrainState, abstract_state, create_state
from jaxdp.training.step_compiler import StepCompiler
from jaxdp.training.step_timer import StepTimer
from jaxdp.validation import changes, from_dict


class StartPoint(NamedTuple):
    """What a run without a checkpoint starts from: a checkpoint of another run, or weights, or else the seed.

    accept_changes: whether a checkpoint of a run on other data is accepted.
    """

    origin: Manifest | None = None
    weights: Weights | None = None
    accept_changes: bool = False


def restore_or_initialize(
    setup: RunSetup,
    workdir: Path,
    start: StartPoint,
    *,
    compiler: StepCompiler,
    checkpoints: RunCheckpoints,
    signals: SignalHandler,
    screen: Screen | Quiet,
    command_start: float,
) -> tuple[TrainState, StepTimer, list[dict[str, Any]]]:
    """The state before the next step, the timer with the progress of the run, and the records of the log at this position.

    Marks the directory as that of a running run and removes records of the log after the restored position. Raises ConfigError
    if the run cannot start here.
    """
    group, plan = signals.group, setup.plan

    def abstract_state_of(samples: int) -> TrainState:
        return abstract_state(setup.config, compiler.model, compiler.mesh(plan.phase_before(samples)))

    group.set_activity("load", detail="restoring the newest checkpoint, if there is one")
    restored = checkpoints.restore(abstract_state_of, start.origin)
    if restored is None:
        finetune.check_weights_exist(setup.config, start.weights)
    else:
        setup.check_fits(restored.manifest, start.accept_changes)
    if group.is_rank0:
        run_dir.mark_running(workdir, setup.config)
        run_dir.write_class_names(workdir, setup.datasets.classes)
    if restored is None:
        timer = StepTimer(Progress(), command_start)
        state = _initial_state(setup, start.weights, compiler=compiler, timer=timer, signals=signals, screen=screen)
        source = workdir
        group.set_resume_hint(f"{screen.resume_action} starts over")
    else:
        timer, state = StepTimer(restored.progress, command_start), restored.state
        source = restored.manifest.path.parent.parent
        group.set_resume_hint(f"{screen.resume_action} continues from {restored.manifest.path}")
        setup.datasets.add_bad_images(restored.progress.bad_images)
    progress, logged = timer.progress, list[dict[str, Any]]()
    earlier = group.broadcast_object("sessions", _sessions(workdir) if group.is_rank0 else None)
    progress.sessions = max(progress.sessions, earlier + 1)  # some may have been killed before they saved
    if group.is_rank0:
        logged, warning = run_dir.truncate_log(source, workdir, samples=progress.samples)
        if warning:
            screen.info(warning)
    if restored is not None:
        epoch = progress.samples / plan.examples
        screen.info(f"{RESUMING}{restored.manifest.location}: epoch {epoch:.2f}, step {progress.steps}")
        if changed := _changed_plan(restored.manifest, plan):
            screen.info(changed)
    return state, timer, logged


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


def _sessions(workdir: Path) -> int:
    """The number of sessions of the run so far, by its events; 0 if unknown. Checkpoints do not know of killed sessions."""
    counts = (event.get("sessions") for event in read_events(workdir / EVENTS))
    return max((count for count in counts if isinstance(count, int)), default=0)


def _initial_state(
    setup: RunSetup,
    weights: Weights | None,
    *,
    compiler: StepCompiler,
    timer: StepTimer,
    signals: SignalHandler,
    screen: Screen | Quiet,
) -> TrainState:
    """The state before the first step, from the seed and, if given, weights."""
    screen.status("compiling")
    signals.group.set_activity("compile")
    phase = setup.plan.phases[0]
    compiler.prepare_train(phase)
    mesh = compiler.mesh(phase)
    with timer.waiting_for_compiler():
        state = signals.run_in_thread(create_state, setup.config, compiler.model, mesh)
    if weights is not None:
        state = finetune.load_weights(setup.config, weights, state, mesh=mesh)
        screen.info(finetune.describe(setup.config, weights))
    return state
