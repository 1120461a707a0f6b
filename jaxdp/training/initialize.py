"""The start of a session: state and progress from the newest checkpoint, from another run, from weights, or from the seed."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxdp import schedules
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.models.weights import Weights
from jaxdp.optim import check_elementwise
from jaxdp.planning import Plan
from jaxdp.records import EVENTS, RESUMING, read_events
from jaxdp.training import checkpoints, finetune, run_dir
from jaxdp.training.autotune import check_registered_strategy, chosen_reductions
from jaxdp.training.clock import Clock
from jaxdp.training.run import Run
from jaxdp.training.state import TrainState, abstract_state, create_state
from jaxdp.training.step_compiler import StepCompiler, mesh_of
from jaxdp.validation import changes, from_dict


class StartPoint(NamedTuple):
    """What a run without a checkpoint starts from: a checkpoint of another run, or weights, or else the seed.

    accept_changes: whether a checkpoint of a run on other data is accepted.
    """

    origin: Manifest | None = None
    weights: Weights | None = None
    accept_changes: bool = False


def create_compiler(run: Run) -> None:
    """Choose the all-reduce strategies of a run, and set its compiler."""
    plan, reduce = run.plan, run.config.reduce
    run.processes.set_activity("compile", detail="choosing the all-reduce strategy")
    mesh_on_devices = partial(mesh_of, devices=run.devices)
    before_measuring = run.signals.pass_sync_point
    reductions = chosen_reductions(
        plan,
        run.model,
        run.workdir,
        info=run.info,
        group=run.processes,
        mesh_of=mesh_on_devices,
        before_measuring=before_measuring,
    )
    check_registered_strategy(plan, mesh_on_devices, before_measuring)
    if any(each.update == "sharded" for each in (reduce, *reductions.values())):
        check_elementwise(run.config.optimizer)
    run.compiler = StepCompiler.for_run(run.setup, run.model, reductions)
    run.resources.callback(run.compiler.close)


def restore_or_initialize(run: Run, start: StartPoint) -> None:
    """Set the state of a run before its next step, and its progress, phase, clock and last records of the log.

    Marks the directory as that of a running run and removes records of the log after the restored position. Raises ConfigError
    if the run cannot start here.
    """
    setup, group, plan = run.setup, run.processes, run.plan

    def abstract_state_of(samples: int) -> TrainState:
        return abstract_state(run.config, run.model, run.compiler.mesh(plan.phase_before(samples)))

    group.set_activity("load", detail="restoring the newest checkpoint, if there is one")
    restored = checkpoints.restore(run, abstract_state_of, start.origin)
    if restored is None:
        finetune.check_weights_exist(run.config, start.weights)
    else:
        setup.check_fits(restored.manifest, start.accept_changes)
        run.progress, run.state = restored.progress, restored.state
    run.clock, run.phase = Clock(run.progress, run.started), plan.phase_before(run.progress.samples)
    if run.is_rank0:
        run_dir.mark_running(run.workdir, run.config)
        run_dir.write_class_names(run.workdir, run.datasets.classes)
    if restored is None:
        source, resume = run.workdir, "starts over"
        run.state = _initial_state(run, start.weights)
    else:
        source, resume = restored.manifest.path.parent.parent, f"continues from {restored.manifest.path}"
        run.datasets.add_bad_images(run.progress.bad_images)
    group.set_resume_hint(f"{run.resume_action} {resume}")
    earlier = group.broadcast_object("sessions", _sessions(run.workdir) if run.is_rank0 else None)
    run.progress.sessions = max(run.progress.sessions, earlier + 1)  # some may have been killed before they saved
    if run.is_rank0:
        run.logged, warning = run_dir.truncate_log(source, run.workdir, samples=run.progress.samples)
        if warning:
            run.info(warning)
    if restored is not None:
        run.info(f"{RESUMING}{restored.manifest.location}: epoch {run.epoch:.2f}, step {run.progress.steps}")
        if changed := _changed_plan(restored.manifest, plan):
            run.info(changed)


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


def _initial_state(run: Run, weights: Weights | None) -> TrainState:
    """The state before the first step, from the seed and, if given, weights."""
    run.status("compiling")
    run.processes.set_activity("compile")
    run.compiler.prepare_train(run.phase)
    with run.clock.waiting_for_compiler():
        state = run.signals.run_in_thread(create_state, run.config, run.model, run.mesh)
    if weights is not None:
        state = finetune.load_weights(run.config, weights, state, mesh=run.mesh)
        run.info(finetune.describe(run.config, weights))
    return state
