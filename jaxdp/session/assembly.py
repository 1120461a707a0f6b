"""The run that is trained: the compiler of its steps, its checkpoints, callbacks and log, and its end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from jaxdp.callbacks.build import callbacks_of
from jaxdp.callbacks.early_stopping import too_few_evaluations
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.config import Finetune
from jaxdp.distributed import runtime
from jaxdp.distributed.launchers import core_binding_warning, unused_tasks_warning
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.distributed.signal_handler import Stopped
from jaxdp.files import CHECKPOINTS, RESULT, write_atomically
from jaxdp.loggers.events import EventLog
from jaxdp.loggers.plan_table import start_table
from jaxdp.planning import small_worker_warning
from jaxdp.run_records import MESSAGE, to_json
from jaxdp.session.directory import RunDirectory, show_and_check
from jaxdp.session.preparation import Preparation
from jaxdp.session.processes import Session, stops_before_training
from jaxdp.setup.prepare import changed_batches_warning, make_compiler, out_of_memory_as_config_error
from jaxdp.setup.strategy_check import check_reduction
from jaxdp.training.loop import saves_at_the_end
from jaxdp.training.run import Run


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
        show_and_check(session, run.result)


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
    callbacks = callbacks_of(
        plan.config,
        job.callbacks,
        processes=group.num_processes,
        is_rank0=group.is_rank0,
        screen=screen,
        events=events,
        mirror=session.mirror,
    )
    return Run(
        make_compiler(plan, prepared.devices, prepared.datasets),
        prepared.datasets,
        session.workdir,
        data_fingerprint=prepared.data_fingerprint,
        location=session.location,
        signals=session.signals,
        checkpoints=checkpoints,
        callbacks=callbacks,
        info=info,
        status=screen.status,
        resume_action=screen.resume_action,
        started=job.started,
    )


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
    return [warning for warning in warnings if warning]
