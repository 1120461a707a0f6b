"""The directory of a run: locked for this session, and the result of a run that is finished."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from jaxdp.checkpoint.listing import latest_valid
from jaxdp.checkpoint.retention import Retention
from jaxdp.errors import TrainingError
from jaxdp.files import CHECKPOINTS
from jaxdp.loggers.summary import show_result
from jaxdp.session.job import Session
from jaxdp.session.preparation import Preparation
from jaxdp.setup import consistency, run_dir
from jaxdp.training.result import TrainResult


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
        retention = Retention(config.checkpoint.keep, config.stop.metric)
        if newest is not None:
            retention.continue_from(newest)
        session.mirror.begin(retention, session.screen.info)
    result = run_dir.read_result(session.location, result_text)
    for remark in [f"{path} holds this run, finished; to start a new one, use --resume never", *remarks]:
        session.screen.info(remark)
    show_and_check(session, result)
    return result


def show_and_check(session: Session, result: TrainResult) -> None:
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
