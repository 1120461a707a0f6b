"""The job of a training run (what to train, where and how), and its processes: joined, with one handler of stop signals."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxdp.config import Config
from jaxdp.distributed import runtime, watchdog
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.distributed.signal_handler import ForcedStop, SignalHandler, Stopped, StopTraining, stopped_before_training
from jaxdp.distributed.status import Failure
from jaxdp.errors import ConfigError, TrainingError
from jaxdp.files import expand_user, is_url
from jaxdp.loggers.console import Screen
from jaxdp.loggers.notebook import default_screen
from jaxdp.models import finetune
from jaxdp.models.weights import NamedTensors
from jaxdp.setup import run_dir
from jaxdp.training.callback import Callback
from jaxdp.validation import check_type, validate, with_choices
from jaxdp.xla import jax_options

if TYPE_CHECKING:
    from jaxdp.cloud.mirror import Mirror, MirrorFollower


@dataclass(frozen=True)
class Job:
    """What to train. The first eight fields are the arguments of `jaxdp.train`; a command adds the rest.

    screen: where progress is shown (None: inline in a notebook, else on stdout). started: `time.monotonic()` at the start of
    the command, for the reported times. signals: a `SignalHandler` that the caller has entered (None: the run enters one);
    without that it receives no signals. notes: lines to show after the table at the start. cluster, coordinator, processes,
    rank: how the processes of the run start; see `jaxdp.distributed.launchers.detect`.
    """

    config: Config
    workdir: str | Path | None = None
    _: KW_ONLY
    resume: str | Path = "auto"
    accept_changes: bool = False
    schedule_from_now: bool = False
    datasets: tuple[Any, Any] | None = None
    callbacks: Sequence[Callback] = ()
    initial_params: Any = None
    screen: Screen | None = None
    started: float = field(default_factory=time.monotonic)
    signals: SignalHandler | None = None
    notes: Sequence[str] = ()
    cluster: str = "auto"
    coordinator: str | None = None
    processes: int | None = None
    rank: int | None = None


def _checked(job: Job) -> tuple[Job, NamedTensors | None]:
    """(the job with a valid configuration and a screen, the tensors of its `initial_params`). Raises ConfigError."""
    check_type(job.config)
    config = job.config if job.datasets is None else with_choices(job.config, {"data.source": "given"})
    given = None
    if job.initial_params is not None:
        given = finetune.from_tree(config, job.initial_params)
        config = finetune.with_digest(config, given.digest)
    resume, screen = expand_user(job.resume, "--resume"), job.screen or default_screen()
    return replace(job, config=validate(config), callbacks=_callbacks(job.callbacks), resume=resume, screen=screen), given


def _callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    found: list[Any] = [*callbacks] if isinstance(callbacks, (list, tuple)) else [callbacks]
    for each in found:
        if not isinstance(each, Callback):
            raise ConfigError("callbacks", each, reason="not a callback", hint="derive it from jaxdp.Callback")
    return found


@dataclass
class Session:
    """One job, while its processes are joined.

    job: checked. given: the tensors of its `initial_params`. screen: shows nothing except on rank 0. notes: lines to show after
    the table at the start. workdir, resume: of the job; for a run at a URL, of its local copy. mirror: uploads the local copy
    of a run at a URL.
    """

    job: Job
    given: NamedTensors | None
    group: ProcessGroup
    signals: SignalHandler
    screen: Screen
    notes: Sequence[str]
    workdir: Path
    resume: str | Path
    mirror: "Mirror | MirrorFollower | None" = None

    @property
    def location(self) -> str:
        """The URL or directory of the run, as its user knows it."""
        return str(self.workdir if self.mirror is None else self.mirror.remote.location)


@contextmanager
def join_processes(job: Job) -> Iterator[Session]:
    """Check the job and join the processes of its run; an error in the context ends all of them.

    Raises ConfigError for an invalid job, TrainingError if another process has failed, and Stopped after a stop signal.
    """
    job, given = _checked(job)
    assert job.screen is not None
    screen, again = job.screen, job.screen.resume_action
    screen.outlast_reader()
    handler = nullcontext(job.signals) if job.signals else SignalHandler(partial(_force_stop, again))
    with (
        jax_options.jaxdp_jax_config() as set_aside,
        watchdog.watch(watchdog.limits_from(job.config.guard)),
        handler as signals,
        stops_before_training(signals, again),
    ):
        workdir = run_dir.local_workdir(job.workdir, job.config)
        group = _join(job, signals, workdir)
        session = Session(
            job,
            given,
            group=group,
            signals=signals,
            screen=screen if group.is_rank0 else Screen(quiet=True),
            notes=[*job.notes, jax_options.describe(set_aside)] if set_aside else job.notes,
            workdir=workdir,
            resume=job.resume,
        )
        try:
            with _local_copy(session) if is_url(job.workdir) else nullcontext():
                yield session
            if job.signals is None and (reason := _late_stop_reason(group, signals)):  # a command ignores it
                message = f"stopped by {reason} after the run in {session.location} had finished"
                raise Stopped(f"{message}; {again} loads its result and continues the program")
        except (Stopped, StopTraining):
            raise
        except BaseException as error:
            group.fail(Failure.of(error))
            raise
        finally:
            screen.end()


def _join(job: Job, signals: SignalHandler, workdir: Path) -> ProcessGroup:
    assert job.screen is not None
    url, again = _url(job), job.screen.resume_action
    open_board = None
    if url is not None:
        from jaxdp.cloud.remote_run import RemoteBoard

        open_board = partial(RemoteBoard, url)
    group = runtime.join(
        job.cluster,
        guard=job.config.guard,
        while_waiting=signals.raise_if_signaled,
        directory=workdir,
        open_board=open_board,
        coordinator=job.coordinator,
        processes=job.processes,
        rank=job.rank,
    )
    if group.failure is not None:
        raise TrainingError("the processes of this run have failed before; start all of them again")
    signals.group = group
    group.attach(before_exit=job.screen.end, while_waiting=signals.raise_if_stop_agreed)
    group.set_resume_hint(f"{again} continues from the last checkpoint, if there is one")
    return group


def _url(job: Job) -> str | None:
    return str(job.workdir).strip().rstrip("/") if is_url(job.workdir) else None


@contextmanager
def _local_copy(session: Session) -> Iterator[None]:
    """Let the session train in a local copy of its run at a URL; the copy is uploaded."""
    from jaxdp.cloud.remote_workdir import open_remote_workdir

    url, storage, signals, info = _url(session.job), session.job.config.storage, session.signals, session.screen.info
    assert url is not None
    session.group.set_activity("start", detail=f"opening {url}")
    start_new = session.resume == "never"
    lock = partial(run_dir.lock_run_dir, info=info)
    with open_remote_workdir(url, storage, start_new=start_new, signals=signals, lock=lock, info=info) as mirror:
        session.workdir, session.mirror = mirror.workdir, mirror
        session.resume = "auto" if start_new else session.resume
        yield


@contextmanager
def stops_before_training(signals: SignalHandler, resume_action: str) -> Iterator[None]:
    """Raise `Stopped` for a stop before the run could save."""
    try:
        yield
    except StopTraining:
        raise stopped_before_training(signals.stop_reason, resume_action) from None


def _force_stop(again: str) -> NoReturn:
    raise ForcedStop(f"stopped immediately by a second signal; {again} continues from the last checkpoint, if there is one")


def _late_stop_reason(group: ProcessGroup, signals: SignalHandler) -> str | None:
    """The signal that has asked a process to stop after the last step of the run, the same on all processes; else None."""
    reasons = group.all_gather_object("the end of the run", signals.stop_reason, while_waiting=lambda: None)
    rank, reason = next(((rank, reason) for rank, reason in enumerate(reasons) if reason), (group.rank, None))
    return reason if reason is None or rank == group.rank else f"{reason} (rank {rank} on {group.hosts[rank]})"
