"""Preparation before the run directory is opened: JAX, data, plan and start values, the same on all processes."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxdp.checkpoint.listing import read_manifests
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.config import Config
from jaxdp.data.datasets import Datasets
from jaxdp.errors import ConfigError
from jaxdp.files import CHECKPOINTS
from jaxdp.loggers.tracker import check_packages
from jaxdp.models import finetune
from jaxdp.planning import Plan
from jaxdp.session.job import Session
from jaxdp.session.origin import adjusted, kept_ends, read_continued
from jaxdp.setup import consistency, run_dir
from jaxdp.setup.prepare import SavedBatches, check_fits, data_fingerprint
from jaxdp.setup.prepare import prepare as open_data_and_plan
from jaxdp.sizes import model_summary
from jaxdp.training.restore import StartPoint
from jaxdp.validation import changes


class Preparation(NamedTuple):
    """What a run is made of. start: what it starts from if its directory has no checkpoint. summary: see `model_summary`.

    newest: the checkpoint that the run continues, on rank 0. saved_batches: the batches with which the run began, if it has
    begun. remarks: lines to show after the table at the start.
    """

    plan: Plan
    devices: list[jax.Device]
    datasets: Datasets
    data_fingerprint: dict[str, str]
    start: StartPoint
    summary: dict[str, Any]
    newest: Manifest | None
    saved_batches: SavedBatches | None
    remarks: Sequence[str]


def prepare(session: Session, origin: Manifest | None) -> Preparation:
    """Start JAX, open the data, make the plan and read given weights; check that all processes have the same.

    Checks everything that can be checked before the run has a directory. All processes call this. origin: the checkpoint of
    another run from which this one starts. Raises ConfigError if the run cannot start.
    """
    job, group, signals = session.job, session.group, session.signals
    check_packages(job.config)
    digest = group.broadcast_object("weights", _saved_digest(session, origin) if group.is_rank0 else None)
    config, weights = signals.run_in_thread(finetune.read_weights, job.config, digest, session.given)
    flags = {"schedule_from_now": job.schedule_from_now}
    consistency.check(group, lambda: consistency.fingerprint(config, session.resume, job.accept_changes, **flags))
    if session.resume == "never":
        session.workdir = Path(group.broadcast_object("directory", str(run_dir.next_free(session.workdir))))

    newest = origin or next(read_manifests(session.workdir / CHECKPOINTS), None) if group.is_rank0 else None
    saved_batches = group.broadcast_object("saved batches", newest and newest.metadata.get("per_worker_batch"))
    signals.raise_if_stop_agreed()  # before JAX waits for all processes, without handling signals
    group.set_activity("load", detail="starting JAX and opening the data")
    run = read_continued(session, origin)
    plan, devices, datasets = open_data_and_plan(
        config,
        datasets=job.datasets,
        group=group,
        saved_batches=saved_batches,
        trained=run.classes,
        adjust=partial(adjusted, run=run, schedule_from_now=job.schedule_from_now),
        run=signals.run_in_thread,
    )
    fingerprint = signals.run_in_thread(data_fingerprint, config, datasets)
    consistency.check(group, lambda: fingerprint)
    kept, config = kept_ends(config, plan.config), plan.config
    if origin is not None:
        if not job.accept_changes:
            _check_same_config(origin, config)
        run_dir.check_same_optimizer(origin, config)
    summary = model_summary(config)  # refuses a model that cannot be trained
    initial_values = cache(partial(finetune.initial_values, config, weights))
    if weights is not None:
        initial_values()  # refuses values of another model
    check = partial(check_fits, plan=plan, data_fingerprint=fingerprint, accept_changes=job.accept_changes)
    return Preparation(
        plan,
        devices,
        datasets,
        data_fingerprint=fingerprint,
        start=StartPoint(origin, check, initial_values),
        summary=summary,
        newest=newest,
        saved_batches=saved_batches,
        remarks=[*kept, *finetune.missing_file_warnings(config, weights)],
    )


def _saved_digest(session: Session, origin: Manifest | None) -> str | None:
    """The digest of the given parameters, as stored by the run to be resumed; None for a new run, and for another file."""
    if session.resume == "never":
        return None
    try:
        saved = (origin.config if origin else run_dir.run_config(session.workdir)).finetune
    except ConfigError:  # there is no run, or `prepare_run_dir` reports the error
        return None
    return saved.digest if saved.weights == session.job.config.finetune.weights else None


def _check_same_config(origin: Manifest, config: Config) -> None:
    if differences := changes(origin.config, config):
        raise ConfigError(
            "--resume",
            str(origin.path),
            reason=f"it is of a different run ({'; '.join(differences)})",
            hint="use --accept-changes to continue with these changes",
        )
