"""What a run continues: the checkpoint of `--resume PATH`, and what the config takes from the checkpoint of the run.

The config takes ended batch phases and, with `--schedule-from-now`, where a new schedule begins. That epoch is a field of the
config, `schedule.from_epoch`, so the rate follows from the samples seen in every session.
"""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from jaxdp.checkpoint.listing import latest_valid, read_manifests
from jaxdp.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, read_manifest
from jaxdp.config import Config
from jaxdp.errors import ConfigError
from jaxdp.files import CHECKPOINTS, is_url
from jaxdp.session.job import Session
from jaxdp.setup.run_dir import run_config, trained_classes
from jaxdp.validation import changes, from_json, to_json, validate, with_fields


@contextmanager
def open_origin(session: Session) -> Iterator[Manifest | None]:
    """The checkpoint that --resume names, if any. One at a URL is downloaded until the context ends.

    All processes call this. Rank 0 chooses the checkpoint at a URL, because a run may still save there. Raises ConfigError.
    """
    session.group.set_activity("start", detail="reading what the run starts from")
    path = str(session.resume)
    with _downloaded(session, path) if is_url(path) and session.group.is_rank0 else nullcontext() as chosen:
        url = session.group.broadcast_object("checkpoint to resume from", chosen and chosen.url)
        if path in ("auto", "never"):
            yield None
        elif not is_url(path):
            yield _read_origin(Path(path), session.workdir)
        elif chosen is not None:
            yield chosen
        else:
            with _downloaded(session, url or path) as origin:
                yield origin


@contextmanager
def _downloaded(session: Session, url: str) -> Iterator[Manifest]:
    from jaxdp.cloud.local import temporary_directory
    from jaxdp.cloud.remote_run import download_checkpoint

    with temporary_directory(session.job.config.storage) as folder:
        yield session.signals.run_in_thread(download_checkpoint, url, "--resume", Path(folder))


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


class Continued(NamedTuple):
    """What a run continues. samples: of the checkpoint, if any. saved: the config in its directory as JSON, if any. ended:
    (global batch, end) of the batch phases that have ended before the checkpoint. classes: see `trained_classes`."""

    samples: int | None
    saved: str | None
    ended: list[tuple[int, float]]
    classes: list[str] | None


def read_continued(session: Session, origin: Manifest | None) -> Continued:
    """What the run of a session continues: its newest checkpoint, or else `origin`. All processes call this."""
    found = _found(session, origin) if session.group.is_rank0 else None
    return Continued(*session.group.broadcast_object("what the run continues", found))


def _found(session: Session, origin: Manifest | None) -> Continued:
    folder = session.workdir / CHECKPOINTS
    is_intact = session.job.schedule_from_now  # a new schedule begins at a checkpoint that can be restored
    manifest = (latest_valid(folder) if is_intact else next(read_manifests(folder), None)) or origin
    try:
        saved = to_json(run_config(session.workdir))
    except ConfigError:  # there is no run, or `prepare_run_dir` reports the error
        saved = None
    if manifest is None:
        return Continued(None, saved, [], None)
    ends = [(phase.global_batch, phase.until_epoch) for phase in manifest.config.batch]
    ended = [(batch, end) for batch, end in ends if end is not None and end <= manifest.epoch]
    place = manifest.path.parent.parent if manifest.url is None else manifest.url.rsplit("/", 2)[0]
    return Continued(manifest.samples, saved, ended, trained_classes(place))


def adjusted(config: Config, examples: int, *, run: Continued, schedule_from_now: bool) -> Config:
    """The config with what a run takes from the checkpoint that it continues. examples: number of training images."""
    config = with_ended_phases(config, run.ended)
    return with_new_schedule(config, examples, run=run) if schedule_from_now else config


def with_ended_phases(config: Config, ended: list[tuple[int, float]]) -> Config:
    """The config with the ends of phases that have ended, which --epochs would move: they are the past of the run.

    ended: see `Continued`. From the first phase with a different batch on, the config's are not the run's. Raises ConfigError
    if a phase would end before one that has ended.
    """
    batch = [*config.batch]
    for index, (global_batch, end) in enumerate(ended[: len(batch) - 1]):
        if batch[index].global_batch != global_batch:
            break
        batch[index] = dataclasses.replace(batch[index], until_epoch=end)
        next_end = batch[index + 1].until_epoch or config.epochs
        if next_end <= end:
            reason = f"batch.{index} has ended at epoch {end:g}, and batch.{index + 1} would end at epoch {next_end:.4g}"
            hint = f"give more epochs, or --batch.{index + 1}.until-epoch"
            raise ConfigError("epochs", config.epochs, reason=reason, hint=hint)
    return config if tuple(batch) == config.batch else validate(dataclasses.replace(config, batch=tuple(batch)))


def kept_ends(config: Config, kept: Config) -> list[str]:
    """A line about each phase whose end `with_ended_phases` has kept."""
    return [
        f"batch.{index} has ended before the checkpoint: it keeps its end, epoch {after.until_epoch:.4g}"
        for index, (before, after) in enumerate(zip(config.batch, kept.batch, strict=True))
        if before.until_epoch != after.until_epoch
    ]


def with_new_schedule(config: Config, examples: int, *, run: Continued) -> Config:
    """The config with a schedule that begins at the checkpoint. examples: number of training images.

    A run whose schedule has begun anew with this very config, and was interrupted since, keeps that epoch: the same command
    resumes it. Raises ConfigError without a checkpoint, and if the schedule does not fit into the epochs that remain.
    """
    if run.samples is None:
        reason = "there is no checkpoint to continue from"
        raise ConfigError("--schedule-from-now", True, reason=reason, hint="omit it")
    saved = from_json(run.saved) if run.saved else config
    begun = saved.schedule.from_epoch
    same = with_fields(config, {"schedule.from_epoch": begun})
    if run.saved and 0 < begun <= run.samples / examples and not changes(saved, same):
        return same
    return validate(with_fields(config, {"schedule.from_epoch": run.samples / examples}))
