"""What the config of a continued run takes from its checkpoint: ended batch phases, and where a new schedule begins.

The epoch of `--schedule-from-now` is a field of the config, `schedule.from_epoch`, so the rate follows from the samples seen in
every session.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from jaxdp.checkpoint.listing import latest_valid, read_manifests
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.config import Config
from jaxdp.errors import ConfigError
from jaxdp.files import CHECKPOINTS
from jaxdp.setup.run_dir import run_config, trained_classes
from jaxdp.validation import changes, from_json, to_json, validate, with_fields

FIELD = "schedule.from_epoch"


class Continued(NamedTuple):
    """What a run continues. samples: of the checkpoint, if any. saved: the config in its directory as JSON, if any. ended:
    (global batch, end) of the batch phases that have ended before the checkpoint. classes: see `trained_classes`."""

    samples: int | None
    saved: str | None
    ended: list[tuple[int, float]]
    classes: list[str] | None


def read_continued(workdir: Path, origin: Manifest | None, *, verified: bool) -> Continued:
    """What the run in a directory continues: its newest checkpoint, or else `origin`. verified: the newest that is intact."""
    folder = workdir / CHECKPOINTS
    manifest = (latest_valid(folder) if verified else next(read_manifests(folder), None)) or origin
    try:
        saved = to_json(run_config(workdir))
    except ConfigError:  # there is no run, or `prepare_run_dir` reports the error
        saved = None
    if manifest is None:
        return Continued(None, saved, [], None)
    ends = [(phase.global_batch, phase.until_epoch) for phase in manifest.config.batch]
    ended = [(batch, end) for batch, end in ends if end is not None and end <= manifest.epoch]
    place = manifest.path.parent.parent if manifest.url is None else manifest.url.rsplit("/", 2)[0]
    return Continued(manifest.samples, saved, ended, trained_classes(place))


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
    same = with_fields(config, {FIELD: begun})
    if run.saved and 0 < begun <= run.samples / examples and not changes(saved, same):
        return same
    return validate(with_fields(config, {FIELD: run.samples / examples}))
