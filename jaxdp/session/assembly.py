"""The directory of a run, locked for its session, and the run: its step compiler, checkpoints, callbacks, log and end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from jaxdp.callbacks.audit import Audit
from jaxdp.callbacks.checks import StepChecks
from jaxdp.callbacks.early_stopping import EarlyStopping, too_few_evaluations
from jaxdp.callbacks.run_files import CheckpointInterval, RunFiles, Uploads
from jaxdp.checkpoint.listing import latest_valid
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.retention import Retention
from jaxdp.config import Config, Finetune
from jaxdp.distributed import runtime
from jaxdp.distributed.launchers import core_binding_warning, unused_tasks_warning
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.distributed.signal_handler import Stopped
from jaxdp.errors import TrainingError
from jaxdp.files import CHECKPOINTS, RESULT, write_atomically
from jaxdp.loggers.default import Console, MetricsFile, TrainingPlot
from jaxdp.loggers.events import EventLog
from jaxdp.loggers.mlflow_logger import MlflowLogger
from jaxdp.loggers.plan_table import start_table
from jaxdp.loggers.profile import Profile
from jaxdp.loggers.summary import show_result
from jaxdp.loggers.tensorboard import TensorBoard
from jaxdp.loggers.wandb_logger import WandbLogger
from jaxdp.loggers.warnings import InputAdvice, StragglerWarnings
from jaxdp.parallel.torus import describe_layout
from jaxdp.planning import small_worker_warning
from jaxdp.run_records import MESSAGE, to_json
from jaxdp.session.job import Session, stops_before_training
from jaxdp.session.preparation import Preparation
from jaxdp.setup import consistency, run_dir
from jaxdp.setup.prepare import changed_batches_warning, make_compiler, out_of_memory_as_config_error
from jaxdp.setup.strategy_check import check_reduction
from jaxdp.training.callback import Callback, Callbacks
from jaxdp.training.loop import saves_at_the_end
from jaxdp.training.result import TrainResult
from jaxdp.training.run import Run
from jaxdp.training.step_compiler import mesh_of


class RunDirectory(NamedTuple):
    """The directory of a session. result: of a finished run. remarks: lines to show after the table at the start."""

    result: TrainResult | None
    remarks: Sequence[str]


@contextmanager
def open_directory(session: Session, prepared: Preparation) -> Iterator[RunDirectory]:
    """Lock the run directory and check the run that it holds; a finished run is shown.

    Raises ConfigError if the directory cannot be used, and TrainingError if no checkpoint of a finished run could be saved.
    """
    group, path, config = session.group, session.workdir, prepared.plan.config
    with run_dir.lock_run_dir(path, session.screen.info) if group.is_rank0 else nullcontext():
        accept_changes = session.job.accept_changes
        found = run_dir.prepare_run_dir(path, config, accept_changes) if group.is_rank0 else None
        result_text, remarks = group.broadcast_object("prepared directory", found)
        remarks += prepared.remarks
        if session.mirror is None:
            consistency.check_shared_directory(group, path)
        result = None
        if result_text is not None:
            result = _finished(session, prepared, result_text, remarks=remarks)
        yield RunDirectory(result, remarks)


def _finished(session: Session, prepared: Preparation, result_text: str, *, remarks: Sequence[str]) -> TrainResult:
    """Show the finished run of the directory, and return its result."""
    path, config, newest, origin = session.workdir, prepared.plan.config, prepared.newest, prepared.start.origin
    if newest is not None and origin is None:
        prepared.start.check(newest)
    if session.mirror is not None:
        retention = Retention(config.checkpoint.keep, config.deciding_metric)
        if newest is not None:
            retention.continue_from(newest)
        session.mirror.begin(retention, session.screen.info)
    result = run_dir.read_result(session.location, result_text)
    for remark in [f"{path} holds this run, finished; to start a new one, use --resume never", *remarks]:
        session.screen.info(remark)
    _show_and_check(session, result)
    return result


def _show_and_check(session: Session, result: TrainResult) -> None:
    """Show a finished run. Raises TrainingError if none of its checkpoints could be saved: its weights are lost."""
    path = session.workdir
    show_result(session.screen, result, path)
    if result.save_error is None:
        return
    latest = latest_valid(path / CHECKPOINTS)
    if latest is None:
        raise TrainingError(
            f"no checkpoint could be saved ({result.save_error}), so the trained weights are lost; make {path} "
            "writable with enough space, and train again with --resume never"
        )
    session.screen.info(f"the last checkpoint could not be saved ({result.save_error}); the newest is {latest.path}")


@contextmanager
def open_run(session: Session, prepared: Preparation, directory: RunDirectory) -> Iterator[Run]:
    """The run in the open directory: mesh, model and step, checkpoints, callbacks and log.

    The end of the context writes result.json and shows the result. A stop signal or an error first saves the last step. Raises
    ConfigError if the run does not fit into memory, TrainingError if it cannot continue, and Stopped after a stop signal.
    """
    group, screen, signals = session.group, session.screen, session.signals
    screen.table(start_table(prepared.plan, runtime.describe(prepared.devices, group), prepared.summary))
    events = EventLog(session.workdir if group.is_rank0 else None)
    with events.session(Stopped), stops_before_training(signals, screen.resume_action):
        screen.when_lost(partial(events.write, MESSAGE))
        info = events.recorded(screen.info)
        for remark in [*session.notes, *directory.remarks, *prepared.datasets.warnings, *_warnings(prepared, group)]:
            info(remark)
        check_reduction(prepared.plan, prepared.devices, signals)
        run = _make_run(session, prepared, directory, events=events, info=info)
        events.position = run.position
        with out_of_memory_as_config_error(run):
            with saves_at_the_end(run):
                signals.raise_if_stop_agreed()
                yield run
            group.set_activity("finish", detail="writing the result")
            if run.result is not None and run.is_rank0:
                write_atomically(run.workdir / RESULT, to_json(run.result.to_dict(), indent=2) + "\n")
    group.set_activity("finish")
    # Everything is saved: ignore stop requests.
    group.all_gather_object("the end of the run", None, while_waiting=lambda: None)
    if run.result is not None:
        _show_and_check(session, run.result)


def _make_run(
    session: Session, prepared: Preparation, directory: RunDirectory, *, events: EventLog, info: Callable[[str], Any]
) -> Run:
    job, plan, group, screen = session.job, prepared.plan, session.group, session.screen
    checkpoints = CheckpointManager(
        session.workdir / CHECKPOINTS,
        plan.config.checkpoint,
        info,
        group=group,
        uploader=session.mirror,
        metric=plan.config.deciding_metric,
    )
    return Run(
        make_compiler(plan, prepared.devices, prepared.datasets),
        prepared.datasets,
        session.workdir,
        data_fingerprint=prepared.data_fingerprint,
        location=session.location,
        signals=session.signals,
        checkpoints=checkpoints,
        callbacks=_callbacks(session, plan.config, events),
        info=info,
        status=screen.status,
        resume_action=screen.resume_action,
        started=job.started,
    )


def _callbacks(session: Session, config: Config, events: EventLog) -> Callbacks:
    """The callbacks of a run, in the order of their calls."""
    guard, logging, is_rank0 = config.guard, config.logging, session.group.is_rank0
    own: list[Callback | None] = [
        RunFiles() if is_rank0 else None,
        StepChecks(),
        Uploads(session.mirror) if session.mirror else None,
        StragglerWarnings() if session.group.num_processes > 1 else None,
        InputAdvice() if is_rank0 else None,
        Audit(guard.audit_every_steps) if guard.audit_every_steps else None,
        EarlyStopping(),
        CheckpointInterval(),
        Profile(logging.profiled_steps) if logging.profiled_steps and is_rank0 else None,
    ]
    loggers: list[Callback | None] = [
        WandbLogger(logging.wandb) if logging.wandb else None,  # they send the plot
        MlflowLogger(logging.mlflow) if logging.mlflow else None,
        TrainingPlot(),  # drawn when the log is closed: `on_end` is called in the reverse order
        MetricsFile(),
        TensorBoard() if logging.tensorboard else None,
        events,
        Console(session.screen),
    ]
    present = [callback for callback in loggers if callback] if is_rank0 else []
    return Callbacks([callback for callback in own if callback], session.job.callbacks, present)


def _warnings(prepared: Preparation, group: ProcessGroup) -> list[str]:
    warnings: list[str | None] = []
    plan, has_batch_norm = prepared.plan, bool(prepared.summary["statistics"])
    if plan.config.finetune != Finetune() and plan.config.finetune.digest is None:
        warnings.append("warning: fine-tuning from random weights, because finetune.weights is not given")
    warnings += [unused_tasks_warning(), core_binding_warning()]
    mesh = plan.config.mesh
    is_uneven = runtime.uniform_host_count(group) < len(set(group.host_numbers))
    if is_uneven and not (mesh.vertical or mesh.horizontal):
        warnings.append(
            "the hosts have different numbers of processes, so horizontal rings of the mesh cross hosts; start equally many "
            "processes on every host, or set mesh.vertical and mesh.horizontal"
        )
    warnings += [too_few_evaluations(plan), small_worker_warning(plan, has_batch_norm=has_batch_norm)]
    warnings.append(changed_batches_warning(plan, prepared.saved_batches or {}))
    warnings += dict.fromkeys(describe_layout(mesh_of(phase, prepared.devices), prepared.devices) for phase in plan.phases)
    return [warning for warning in warnings if warning]
