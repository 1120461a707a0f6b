"""The checkpoints of a run, in a directory or at a URL: lists, chooses and deletes them."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxdp import metrics
from jaxdp.checkpoint.listing import (
    CHECKPOINT_NAMES,
    candidates,
    checkpoint_paths,
    named_checkpoints,
    remove,
    rename_for_removal,
)
from jaxdp.checkpoint.manifest import MANIFEST, CheckpointError, CorruptCheckpoint, Manifest, read_manifest, verify_files
from jaxdp.checkpoint.orbax_io import verify_checkpoint
from jaxdp.choices import TASKS
from jaxdp.config import Config, Storage
from jaxdp.errors import ConfigError, print_safe
from jaxdp.files import CHECKPOINTS, expand_user, is_url
from jaxdp.setup.run_dir import lock_run_dir, run_config


def list_checkpoints(workdir: str | Path) -> list[dict[str, Any]]:
    """All checkpoints of a run, oldest first: path, samples, epoch, steps, bytes, the metrics, error (None if valid), and
    names.

    names: names of `choose_checkpoint` that mean it, such as "best". Reads and verifies every byte of every checkpoint. Raises
    ConfigError if `workdir` holds no run.
    """
    workdir = expand_user(workdir, "--workdir")
    metric = _deciding_metric(run_config(workdir))
    pairs = _list_remote(workdir) if is_url(workdir) else _list_local(Path(workdir))
    newest_first = [manifest for row, manifest in reversed(pairs) if manifest and row["error"] is None]
    samples_of = named_checkpoints(newest_first, metric)
    return [row | {"names": [name for name in samples_of if samples_of[name] == row["samples"]]} for row, _ in pairs]


def delete_all_but(workdir: str | Path, names: Sequence[str]) -> list[int]:
    """Delete all checkpoints of a run, corrupt ones too, except those that `names` mean. Returns the samples of each.

    names: as of `choose_checkpoint`; each must be valid. Raises ConfigError if one is not, while a process trains in the
    directory, for a URL, and if a checkpoint cannot be deleted.
    """
    path = Path(expand_user(workdir, "--workdir"))
    if is_url(workdir):
        raise ConfigError("--keep", ",".join(names), reason="checkpoints at a URL are not deleted", hint="delete them there")
    run_config(path)
    with lock_run_dir(path):
        kept = {choose_checkpoint(path, name, "--keep").samples for name in names}
        expired = [found for found in checkpoint_paths(path / CHECKPOINTS) if int(found.name) not in kept]
        try:
            for found in expired:
                remove(rename_for_removal(found))
        except OSError as error:
            raise ConfigError("--workdir", str(workdir), reason=f"{found.name} cannot be deleted: {error.strerror}") from None
    return [int(found.name) for found in expired]


def _list_local(workdir: Path) -> list[tuple[dict[str, Any], Manifest | None]]:
    """Rows of `list_checkpoints`, without names, and valid manifests."""
    rows = []
    for path in reversed(checkpoint_paths(workdir / CHECKPOINTS)):
        manifest, error = None, None
        try:
            manifest = read_manifest(path)
            verify_checkpoint(manifest)
        except CheckpointError as raised:
            if not os.path.lexists(path):  # removed meanwhile by a running training process
                continue
            error = str(raised)
        rows.append((_row(str(path), int(path.name), manifest, error=error), manifest))
    return rows


def _list_remote(url: str) -> list[tuple[dict[str, Any], Manifest | None]]:
    """`_list_local` for a run at a URL; downloads every checkpoint, one at a time."""
    from jaxdp.cloud.local import temporary_directory
    from jaxdp.cloud.location import ObjectNotFoundError, storage_errors
    from jaxdp.cloud.remote_run import list_manifests

    rows = []
    remote, manifests = list_manifests(url)
    for name, found in reversed(manifests.items()):
        manifest, error = (None, found) if isinstance(found, str) else (found, None)
        if manifest is not None:
            with temporary_directory(Storage()) as folder, storage_errors(url, "--workdir"):
                try:
                    verify_checkpoint(remote.download_checkpoint(name, Path(folder)))
                except CheckpointError as raised:
                    error = str(raised)
                except ObjectNotFoundError as raised:
                    if not remote.location.sizes(name.path(MANIFEST)):
                        continue  # removed meanwhile by a training process
                    error = f"{raised.filename} is missing"
        rows.append((_row(remote.url_of(name), name.samples, manifest, error=error), manifest))
    return rows


def _row(path: str, samples: int, manifest: Manifest | None, *, error: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = dict.fromkeys(("epoch", "steps", "bytes"))
    if manifest is not None:
        steps = manifest.metadata["progress"]["steps"]
        facts = {"epoch": manifest.epoch, "steps": steps, "bytes": manifest.num_bytes}
        facts |= metrics.values(manifest.evaluation, manifest.metadata["config"].get("task", Config.task))
    return {"path": path, "samples": samples, **facts, "error": error}


def choose_checkpoint(workdir: str | Path, checkpoint: str = "result", field: str = "--checkpoint") -> Manifest:
    """The checkpoint named "result", "newest", "best" (by `stop.metric`), or by its number of samples.

    "result": what result.json describes, the newest, or with early stopping the best that the newest one knows. Names skip
    invalid checkpoints and report them on stderr. Raises ConfigError, of `field`, if there is no such checkpoint.
    """
    folder = Path(expand_user(workdir, "--workdir")) / CHECKPOINTS
    if checkpoint not in CHECKPOINT_NAMES:
        return _checkpoint_at(folder, checkpoint, field)
    found = _read_all(folder)
    metric = _deciding_metric(run_config(workdir)) if checkpoint == "best" else ""
    errors = [one for one in found.values() if isinstance(one, str) and checkpoint == "best"]  # it could be one of these
    for samples in candidates(found, checkpoint, metric, field=field):
        path = folder / str(samples)
        manifest = found.get(samples, f"{path} is missing")
        try:
            if isinstance(manifest, str):
                raise CheckpointError(manifest)
            verify_files(manifest)
        except CheckpointError as error:
            if samples not in found or os.path.lexists(path):  # not removed meanwhile by a running training process
                errors.append(str(error))
            continue
        if errors:
            message = f"jaxdp: using {path} instead of the {checkpoint} checkpoint: {'; '.join(errors)}"
            print_safe(message, sys.stderr)
        return manifest
    if not errors:
        run_config(workdir)  # raises ConfigError if there is no run
    raise ConfigError("--workdir", str(workdir), reason="no valid checkpoint found", hint="list them with `jaxdp checkpoints`")


def _deciding_metric(config: Config) -> str:
    """The metric that chooses the best checkpoint. Raises ConfigError if it is the first one of an unregistered task."""
    if not config.stop.metric:
        TASKS.check(config.task)
    return config.deciding_metric


def _read_all(folder: Path) -> dict[int, Manifest | str]:
    """Samples -> manifest, or why it cannot be read, newest first."""
    found: dict[int, Manifest | str] = {}
    for path in checkpoint_paths(folder):
        try:
            found[int(path.name)] = read_manifest(path)
        except CheckpointError as error:
            if os.path.lexists(path):  # not removed meanwhile by a running training process
                found[int(path.name)] = str(error)
    return found


def _checkpoint_at(folder: Path, samples: str, field: str) -> Manifest:
    names = [path.name for path in checkpoint_paths(folder)]
    if samples not in names:
        available = ", ".join(names) or "none"
        raise ConfigError(
            field,
            samples,
            reason="checkpoint not found",
            hint=f"use {', '.join(CHECKPOINT_NAMES)}, or one of: {available}",
        )
    try:
        return read_manifest(folder / samples)
    except CorruptCheckpoint as error:
        raise ConfigError(field, samples, reason=str(error), hint="use another checkpoint") from None


@contextmanager
def open_checkpoint(workdir: str | Path, checkpoint: str = "result") -> Iterator[Manifest]:
    """The checkpoint of `choose_checkpoint` for a run in a directory or at a URL, from which it is copied for the context."""
    if not is_url(workdir):
        yield choose_checkpoint(workdir, checkpoint)
        return
    from jaxdp.cloud.local import temporary_directory
    from jaxdp.cloud.remote_run import download_checkpoint

    config = run_config(workdir)
    with temporary_directory(config.storage) as folder:
        place, metric = Path(folder), _deciding_metric(config) if checkpoint == "best" else config.deciding_metric
        yield download_checkpoint(str(workdir), "--workdir", place, checkpoint=checkpoint, metric=metric)
