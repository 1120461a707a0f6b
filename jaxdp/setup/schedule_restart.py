"""`--schedule-from-now`: the schedule of a run that goes on begins anew, at the checkpoint from which it continues.

The epoch is a field of the config, `schedule.from_epoch`, so the rate follows from the samples seen in every session.
"""

from pathlib import Path
from typing import NamedTuple

from jaxdp.checkpoint.listing import read_manifests
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.config import Config
from jaxdp.errors import ConfigError
from jaxdp.files import CHECKPOINTS
from jaxdp.setup.run_dir import run_config
from jaxdp.validation import changes, from_json, to_json, validate, with_fields

FIELD = "schedule.from_epoch"


class Continued(NamedTuple):
    """What a run continues. samples: of the checkpoint, if any. saved: the config in its directory as JSON, if any."""

    samples: int | None
    saved: str | None


def read_continued(workdir: Path, origin: Manifest | None) -> Continued:
    """What the run in a directory continues: its newest checkpoint, or else `origin`."""
    manifest = next(read_manifests(workdir / CHECKPOINTS), None) or origin
    try:
        saved = to_json(run_config(workdir))
    except ConfigError:  # there is no run, or `prepare_run_dir` reports the error
        saved = None
    return Continued(manifest.samples if manifest else None, saved)


def restarted(config: Config, examples: int, *, run: Continued) -> Config:
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
