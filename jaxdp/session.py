"""`jaxdp.train`: joins the processes, checks the configuration, data and directory of a run, and trains it."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from jaxdp.attached import callbacks_of
from jaxdp.callbacks.early_stopping import too_few_evaluations
from jaxdp.checkpoint.listing import Retention, latest_valid, read_manifests
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, read_manifest
from jaxdp.config import Config, Finetune
from jaxdp.data.datasets import Datasets
from jaxdp.distributed import runtime, supervisor
from jaxdp.distributed.launchers import core_binding_warning, unused_tasks_warning
from jaxdp.distributed.preemption import ForcedStop, SignalHandler, Stopped, StopTraining, stopped_before_training
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.distributed.status import Failure
from jaxdp.errors import ConfigError, TrainingError
from jaxdp.files import CHECKPOINTS, expand_user, is_url
from jaxdp.loggers.console import Quiet, Screen
from jaxdp.loggers.events import EventLog
from jaxdp.loggers.notebook import default_screen
from jaxdp.loggers.plan_table import start_table
from jaxdp.loggers.summary import show_result
from jaxdp.models import finetune
from jaxdp.models.weights import NamedTensors
from jaxdp.planning import Plan, small_worker_warning
from jaxdp.records import MESSAGE
from jaxdp.setup import consistency, continued, run_dir
from jaxdp.setup.prepare import (
    SavedBatches,
    changed_batches_warning,
    check_fits,
    data_fingerprint,
    make_compiler,
    out_of_memory_as_config_error,
    prepare,
)
from jaxdp.setup.strategy_check import check_reduction
from jaxdp.sizes import model_summary
from jaxdp.trackers.tracker import Trackers, check_packages, trackers_of
from jaxdp.training.callback import Callback
from jaxdp.training.loop import fit
from jaxdp.training.result import TrainResult
from jaxdp.training.run import Run
from jaxdp.training.start import StartPoint
from jaxdp.validation import changes, check_type, validate, with_choices
from jaxdp.xla import jax_options

if TYPE_CHECKING:
    from jaxdp.cloud.mirror import Mirror, MirrorFollower


def train(
    config: Config,
    workdir: str | Path | None = None,
    *,
    resume: str | Path = "auto",
    accept_changes: bool = False,
    schedule_from_now: bool = False,
    datasets: tuple[Any, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    initial_params: Any = None,
) -> TrainResult:
    """Train `config` in `workdir` and return the result; resume from the newest valid checkpoint if the directory has one.

    A finished run in the directory is not repeated: its result is returned.

    config: what to train. workdir: the run directory, or a URL in object storage (default: runs/NAME). resume: "auto"; "never",
    to start a new run in NAME-2, NAME-3, ... if the directory holds one; or the path or URL of a checkpoint or of another run,
    to continue from in this directory. accept_changes: resume although the configuration or the data differ from the
    checkpoint's. schedule_from_now: begin the learning-rate schedule anew at the checkpoint, for the epochs that remain; it is
    `schedule.from_epoch` of the run from then on. datasets: (training, evaluation) in place of the config's source; each a
    pair of arrays (images uint8 [N, H, W] or [N, H, W, 1 or 3], labels [N]) or an object with `__len__`, `__getitem__` ->
    (uint8 pixels or encoded bytes, label) and, unless `config.model.classes` says it, `classes`, a number or a list of names;
    fields that only the config's source uses are reset. callbacks: objects of subclasses of `jaxdp.Callback`. initial_params:
    what the run starts from, in place of a file `finetune.weights`: {"params": ..., "batch_stats": ...} of arrays, as
    `jaxdp.load_params` returns it.

    Shows the run in the notebook's cell, else on stdout. Error messages name flags of the command line; here they are
    arguments: `--resume never` is resume="never".

    Raises ConfigError if the run cannot start or does not fit into memory, OSError if object storage does not answer before
    that, TrainingError if it cannot continue, and Stopped after a stop signal (SIGTERM, SIGINT, ...), when the run is
    saved; a program that does not catch it exits with code 75.
    If another process of the run fails, this process prints which one and exits.
    """
    return run_session(
        config,
        workdir,
        resume=resume,
        accept_changes=accept_changes,
        schedule_from_now=schedule_from_now,
        datasets=datasets,
        callbacks=callbacks,
        initial_params=initial_params,
        command=Command(),
    )


@dataclasses.dataclass(frozen=True)
class Command:
    """What a program that runs a command adds to `train`.

    screen: where progress is shown (None: inline in a notebook, else on stdout). started: `time.monotonic()` at the start of
    the command, for the reported times. signals: a `SignalHandler` that the caller enters; one that is not entered receives no
    signals. notes: lines to show after the table at the start. cluster, coordinator, processes, rank: how the processes of the
    run start, as `jaxdp.distributed.launchers.detect` takes them.
    """

    screen: Screen | Quiet | None = None
    started: float = dataclasses.field(default_factory=time.monotonic)
    signals: SignalHandler | None = None
    notes: Sequence[str] = ()
    cluster: str = "auto"
    coordinator: str | None = None
    processes: int | None = None
    rank: int | None = None


def run_session(
    config: Config,
    workdir: str | Path | None,
    *,
    command: Command,
    resume: str | Path = "auto",
    accept_changes: bool = False,
    schedule_from_now: bool = False,
    datasets: tuple[Any, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    initial_params: Any = None,
) -> TrainResult:
    """`train`, for a command or a program."""
    screen, signals = command.screen or default_screen(), command.signals
    screen.outlast_reader()
    resume = expand_user(resume, "--resume")
    check_type(config)
    if datasets is not None:
        config = with_choices(config, {"data.source": "given"})
    given = None
    if initial_params is not None:
        given = finetune.from_tree(config, initial_params)
        config = finetune.with_digest(config, given.digest)
    config, callbacks = validate(config), _checked(callbacks)
    url, open_board = None, None
    if is_url(workdir):
        from jaxdp.cloud.remote_run import Folder

        url = str(workdir).strip().rstrip("/")
        open_board = partial(Folder, url)
    path = run_dir.local_workdir(workdir, config)
    is_command = signals is not None  # a command ignores a signal that arrives after the last evaluation
    handler = nullcontext(signals) if signals else SignalHandler(partial(_force_stop, screen.resume_action))
    with (
        jax_options.own_options() as set_aside,
        supervisor.watch(supervisor.limits_from(config.guard)),
        handler as signals,
        _stops_before_training(signals, screen.resume_action),
    ):
        group = runtime.join(
            command.cluster,
            guard=config.guard,
            while_waiting=signals.raise_if_signaled,
            directory=path,
            open_board=open_board,
            coordinator=command.coordinator,
            processes=command.processes,
            rank=command.rank,
        )
        if group.failure is not None:
            raise TrainingError("the processes of this run have failed before; start all of them again")
        signals.group = group
        group.attach(before_exit=screen.end, while_waiting=signals.raise_if_stop_agreed)
        group.set_resume_hint(f"{screen.resume_action} continues from the last checkpoint, if there is one")
        session = _Session(
            config,
            path,
            resume=resume,
            accept_changes=accept_changes,
            schedule_from_now=schedule_from_now,
            datasets=datasets,
            callbacks=callbacks,
            given=given,
            screen=screen if group.is_rank0 else Quiet(),
            started=command.started,
            signals=signals,
            notes=[*command.notes, jax_options.describe(set_aside)] if set_aside else command.notes,
        )
        try:
            result = session.run() if url is None else session.run_at_url(url)
            if not is_command and (reason := _late_stop_reason(group, signals)):
                message = f"stopped by {reason} after the run in {result.workdir} had finished"
                raise Stopped(f"{message}; {screen.resume_action} loads its result and continues the program")
            return result
        except (Stopped, StopTraining):
            raise
        except BaseException as error:
            group.fail(Failure.of(error))
            raise
        finally:
            screen.end()


def _late_stop_reason(group: ProcessGroup, signals: SignalHandler) -> str | None:
    """The signal that has asked a process to stop after the last step of the run, the same on all processes; else None."""
    reasons = group.all_gather_object("the end of the run", signals.stop_reason, while_waiting=lambda: None)
    rank, reason = next(((rank, reason) for rank, reason in enumerate(reasons) if reason), (group.rank, None))
    return reason if reason is None or rank == group.rank else f"{reason} (rank {rank} on {group.hosts[rank]})"


def _checked(callbacks: Sequence[Callback]) -> list[Callback]:
    found: list[Any] = [*callbacks] if isinstance(callbacks, (list, tuple)) else [callbacks]
    for each in found:
        if not isinstance(each, Callback):
            raise ConfigError("callbacks", each, reason="not a callback", hint="derive it from jaxdp.Callback")
    return found


@contextmanager
def _stops_before_training(signals: SignalHandler, resume_action: str) -> Iterator[None]:
    """Raise `Stopped` for a stop that reaches the caller before the trainer could save."""
    try:
        yield
    except StopTraining:
        raise stopped_before_training(signals.stop_reason, resume_action) from None


def _force_stop(again: str) -> NoReturn:
    raise ForcedStop(f"stopped immediately by a second signal; {again} continues from the last checkpoint, if there is one")


@dataclasses.dataclass(frozen=True)
class _Session:
    """One call of `train`, after the processes have joined. The fields are the arguments of `train`.

    given: the tensors of `initial_params`.
    """

    config: Config
    workdir: Path
    _: dataclasses.KW_ONLY
    resume: str | Path
    accept_changes: bool
    schedule_from_now: bool
    datasets: tuple[Any, Any] | None
    callbacks: Sequence[Callback]
    given: NamedTensors | None
    screen: Screen | Quiet
    started: float
    signals: SignalHandler
    notes: Sequence[str]
    mirror: "Mirror | MirrorFollower | None" = None  # of a run at a URL

    def run_at_url(self, url: str) -> TrainResult:
        """Train in the local copy of a run at a URL."""
        from jaxdp.cloud.remote_workdir import open_remote_workdir

        self.signals.group.set_activity("start", detail=f"opening {url}")
        storage, start_new = self.config.storage, self.resume == "never"
        info = self.screen.info
        lock = partial(run_dir.lock_run_dir, info=info)
        with open_remote_workdir(url, storage, start_new=start_new, signals=self.signals, lock=lock, info=info) as mirror:
            resume = "auto" if start_new else self.resume
            session = dataclasses.replace(self, workdir=mirror.workdir, resume=resume, mirror=mirror)
            return session.run()

    def run(self) -> TrainResult:
        """Check everything that can be checked before compiling, then train. All processes pass the same barriers."""
        with ExitStack() as stack:
            self.signals.group.set_activity("start", detail="reading what the run starts from")
            return self._run(self._open_origin(stack))

    def _open_origin(self, stack: ExitStack) -> Manifest | None:
        """The checkpoint that --resume names, if any, which is downloaded from a URL until `stack` is closed.

        All processes call this. Rank 0 chooses the checkpoint at a URL, where a run may go on meanwhile.
        """
        group, chosen = self.signals.group, None
        if group.is_rank0 and is_url(self.resume):
            chosen = self._download_origin(str(self.resume), stack)
        url = group.broadcast_object("checkpoint to resume from", chosen and chosen.url)
        if self.resume in ("auto", "never"):
            return None
        if not is_url(self.resume):
            return _read_origin(Path(self.resume), self.workdir)
        return chosen or self._download_origin(url or str(self.resume), stack)

    def _download_origin(self, url: str, stack: ExitStack) -> Manifest:
        from jaxdp.cloud.local import temporary_directory
        from jaxdp.cloud.remote_run import download_checkpoint

        folder = Path(stack.enter_context(temporary_directory(self.config.storage)))
        return self.signals.run_in_thread(download_checkpoint, url, "--resume", folder)

    def _run(self, origin: Manifest | None) -> TrainResult:
        group, signals, accept_changes = self.signals.group, self.signals, self.accept_changes
        check_packages(self.config)
        digest = group.broadcast_object("weights", self._saved_digest(origin) if group.is_rank0 else None)
        config, weights = signals.run_in_thread(finetune.read_weights, self.config, digest, self.given)
        flags = {"schedule_from_now": self.schedule_from_now}
        consistency.check(group, lambda: consistency.fingerprint(config, self.resume, accept_changes, **flags))
        path = self.workdir
        if self.resume == "never":
            path = Path(group.broadcast_object("directory", str(run_dir.next_free(path))))

        manifest = origin or next(read_manifests(path / CHECKPOINTS), None) if group.is_rank0 else None
        saved_batches = group.broadcast_object("saved batches", manifest and manifest.metadata.get("per_worker_batch"))
        signals.raise_if_stop_agreed()  # before JAX waits for all processes, without handling signals
        group.set_activity("load", detail="starting JAX and opening the data")
        run = self._continued(path, origin)
        plan, devices, datasets = prepare(
            config,
            datasets=self.datasets,
            group=group,
            saved_batches=saved_batches,
            trained=run.classes,
            adjust=self._adjustment(run),
            run=signals.run_in_thread,
        )
        fingerprint = signals.run_in_thread(data_fingerprint, config, datasets)
        consistency.check(group, lambda: fingerprint)
        kept, config = continued.kept_ends(config, plan.config), plan.config
        check = partial(check_fits, plan=plan, data_fingerprint=fingerprint, accept_changes=accept_changes)
        if origin is not None:
            if not accept_changes:
                _check_same_config(origin, config)
            run_dir.check_same_optimizer(origin, config)
        summary = model_summary(config)  # refuses a model that cannot be trained, before the run has a directory
        initial_values = cache(partial(finetune.initial_values, config, weights))
        if weights is not None:
            initial_values()  # refuses values of another model, before the run has a directory

        trackers = trackers_of(config) if group.is_rank0 else Trackers([])
        with run_dir.lock_run_dir(path, self.screen.info) if group.is_rank0 else nullcontext():
            prepared = run_dir.prepare_run_dir(path, config, accept_changes) if group.is_rank0 else None
            result_text, remarks = group.broadcast_object("prepared directory", prepared)
            remarks += [*kept, *finetune.missing_file_warnings(config, weights)]
            if self.mirror is None:
                consistency.check_shared_directory(group, path)
            if result_text is None:
                with trackers.ended():
                    return self._train(
                        plan,
                        path,
                        summary=summary,
                        devices=devices,
                        datasets=datasets,
                        data_fingerprint=fingerprint,
                        saved_batches=saved_batches,
                        start=StartPoint(origin, check, initial_values),
                        trackers=trackers,
                        remarks=remarks,
                    )
            if manifest is not None and origin is None:
                check(manifest)
            result = self._show_finished(path, config, result_text, manifest=manifest, remarks=remarks)
            trackers.send_finished(path, self._location(path), info=self.screen.info, while_waiting=self._waiting)
            return result

    def _waiting(self) -> str | None:
        """Say that the run makes progress; returns why it is to stop, if it is."""
        self.signals.group.status.record_progress()
        return self.signals.stop_reason

    def _continued(self, path: Path, origin: Manifest | None) -> continued.Continued:
        """What the run continues. All processes call this."""
        group, verified = self.signals.group, self.schedule_from_now
        found = continued.read_continued(path, origin, verified=verified) if group.is_rank0 else None
        return continued.Continued(*group.broadcast_object("what the run continues", found))

    def _adjustment(self, run: continued.Continued) -> Callable[[Config, int], Config]:
        """What a run takes from the checkpoint that it continues, a function of (config, images)."""

        def adjusted(config: Config, examples: int) -> Config:
            config = continued.with_ended_phases(config, run.ended)
            return continued.with_new_schedule(config, examples, run=run) if self.schedule_from_now else config

        return adjusted

    def _show_finished(
        self, path: Path, config: Config, result_text: str, *, manifest: Manifest | None, remarks: list[str]
    ) -> TrainResult:
        """Show the result of the finished run in `path`. manifest: its newest checkpoint, on rank 0."""
        if self.mirror is not None:
            retention = Retention(config.checkpoint.keep, config.stop.metric)
            if manifest is not None:
                retention.continue_from(manifest)
            self.mirror.begin(retention, self.screen.info)
        result = run_dir.read_result(self._location(path), result_text)
        for remark in [f"{path} holds this run, finished; to start a new one, use --resume never", *remarks]:
            self.screen.info(remark)
        return _show_and_check(self.screen, result, path)

    def _train(
        self,
        plan: Plan,
        path: Path,
        *,
        summary: dict[str, Any],
        devices: list[jax.Device],
        datasets: Datasets,
        data_fingerprint: dict[str, str],
        saved_batches: SavedBatches | None,
        start: StartPoint,
        trackers: Trackers,
        remarks: list[str],
    ) -> TrainResult:
        """Train in the locked directory `path`. summary: see `model_summary`. remarks: to show after the table at the start."""
        group, config, screen, signals = self.signals.group, plan.config, self.screen, self.signals
        screen.table(start_table(plan, runtime.describe(devices, group), summary))
        events = EventLog(path if group.is_rank0 else None)
        with events.session(Stopped), _stops_before_training(signals, screen.resume_action):
            info = events.recorded(screen.info)
            screen.when_lost(partial(events.write, MESSAGE))
            warnings = _warnings(plan, group, saved_batches=saved_batches, has_batch_norm=bool(summary["statistics"]))
            for remark in [*self.notes, *remarks, *datasets.warnings, *warnings]:
                info(remark)
            check_reduction(plan, devices, signals)
            checkpoints = CheckpointManager(
                path / CHECKPOINTS, config.checkpoint, info, group=group, uploader=self.mirror, metric=config.stop.metric
            )
            callbacks = callbacks_of(
                config,
                self.callbacks,
                processes=group.num_processes,
                is_rank0=group.is_rank0,
                screen=screen,
                events=events,
                trackers=trackers,
                mirror=self.mirror,
            )
            run = Run(
                make_compiler(plan, devices, datasets),
                datasets,
                path,
                data_fingerprint=data_fingerprint,
                location=self._location(path),
                signals=signals,
                checkpoints=checkpoints,
                callbacks=callbacks,
                info=info,
                status=screen.status,
                resume_action=screen.resume_action,
                started=self.started,
            )
            events.position = run.position
            with out_of_memory_as_config_error(run):
                result = fit(run, start)
        group.set_activity("finish")
        # Everything is saved: ignore stop requests.
        group.all_gather_object("the end of the run", None, while_waiting=lambda: None)
        return _show_and_check(screen, result, path)

    def _location(self, path: Path) -> str:
        """Where the run is, for its user: its URL or directory."""
        return str(path if self.mirror is None else self.mirror.remote.location)

    def _saved_digest(self, origin: Manifest | None) -> str | None:
        """The digest of the given parameters that the run to be resumed stored; None for a new run, and for another file."""
        if self.resume == "never":
            return None
        try:
            saved = (origin.config if origin else run_dir.run_config(self.workdir)).finetune
        except ConfigError:  # there is no run, or `prepare_run_dir` reports the error
            return None
        return saved.digest if saved.weights == self.config.finetune.weights else None


def _show_and_check(screen: Screen | Quiet, result: TrainResult, path: Path) -> TrainResult:
    """Show the finished run in `path`. Raises TrainingError if none of its checkpoints could be saved: its weights are lost."""
    show_result(screen, result, path)
    if result.save_error is None:
        return result
    latest = latest_valid(path / CHECKPOINTS)
    if latest is None:
        raise TrainingError(
            f"no checkpoint could be saved ({result.save_error}), so the trained weights are lost; make {path} "
            "writable with enough space, and train again with --resume never"
        )
    screen.info(f"the last checkpoint could not be saved ({result.save_error}); the newest is {latest.path}")
    return result


def _warnings(plan: Plan, group: ProcessGroup, *, saved_batches: SavedBatches | None, has_batch_norm: bool) -> list[str]:
    warnings: list[str | None] = []
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
    warnings.append(changed_batches_warning(plan, saved_batches or {}))
    return [warning for warning in warnings if warning]


def _read_origin(path: Path, workdir: Path) -> Manifest:
    """The checkpoint that --resume PATH names: PATH itself, or the newest valid one in PATH/checkpoints."""
    real_path, real_workdir = Path(os.path.realpath(path)), Path(os.path.realpath(workdir))
    if real_path == real_workdir or real_workdir in real_path.parents:
        raise ConfigError(
            "--resume",
            str(path),
            reason="it belongs to the directory of this run",
            hint="use a new --workdir to continue from it",
        )
    if not path.exists():
        raise ConfigError(
            "--resume", str(path), reason="not found", hint="use the directory of a run or one of its checkpoints"
        )
    try:
        manifest = read_manifest(real_path) if (path / MANIFEST).exists() else None
    except CorruptCheckpoint as error:
        raise ConfigError("--resume", str(path), reason=str(error), hint="use another checkpoint") from None
    manifest = manifest or latest_valid(path / CHECKPOINTS)
    if manifest is None:
        hint = "use auto, never, the directory of a run or one of its checkpoints"
        raise ConfigError("--resume", str(path), reason="it holds no valid checkpoint", hint=hint)
    return manifest


def _check_same_config(origin: Manifest, config: Config) -> None:
    if differences := changes(origin.config, config):
        raise ConfigError(
            "--resume",
            str(origin.path),
            reason=f"it is of a different run ({'; '.join(differences)})",
            hint="use --accept-changes to continue with these changes",
        )
