"""Reading a run at a URL: its files, its checkpoints and their state, without its lease."""

import sys
from pathlib import Path
from typing import Any

from jaxdp.checkpoint.listing import CHECKPOINT_NAMES, by_metric
from jaxdp.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest
from jaxdp.config import Stop
from jaxdp.errors import ConfigError
from jaxdp.files import CHECKPOINTS, CONFIG
from jaxdp.storage.location import ObjectNotFoundError, storage_errors
from jaxdp.storage.patience import open_patiently
from jaxdp.storage.remote_run import RemoteName, RemoteRun


def read_run_file(url: str, name: str, field: str = "--workdir") -> bytes | None:
    """A file of the run at a URL, None if it does not exist. Raises ConfigError."""
    with storage_errors(url, field):
        try:
            return open_patiently(url, field).read_intact(name)
        except ObjectNotFoundError:
            return None


def download_run_files(url: str, folder: Path, *, names: tuple[str, ...], field: str) -> bool:
    """Download the files of the run at a URL that exist; returns whether a process has not ended it. Raises ConfigError."""
    with storage_errors(url, field):
        remote = RemoteRun(open_patiently(url, field))
        lease = remote.newest_lease()
        files = remote.files(lease)
        for name in names:
            if name in files:
                remote.download_file(name, folder)
        return lease is not None and not lease.released


def list_manifests(url: str, field: str = "--workdir") -> tuple[RemoteRun, list[RemoteName], dict[RemoteName, Any]]:
    """(run, complete checkpoints, newest first, and of each its manifest or the error as text). Raises ConfigError."""
    with storage_errors(url, field):
        remote = RemoteRun(open_patiently(url, field))
        names = remote.checkpoints(remote.newest_lease())
        manifests: dict[RemoteName, Any] = {}
        for name in names:
            try:
                manifests[name] = remote.read_manifest(name)
            except CorruptCheckpoint as error:
                manifests[name] = str(error)
            except ObjectNotFoundError:  # removed meanwhile by a training process
                pass
        return remote, [name for name in names if name in manifests], manifests


def download_checkpoint(
    url: str, field: str, folder: Path, *, checkpoint: str = "newest", metric: str = Stop.metric
) -> Manifest:
    """Download a checkpoint of the run at a URL, with the log of the run, to `folder`/checkpoints and verify it.

    url: of the run, or of one of its checkpoints, by its name or its number of samples. checkpoint: result (the newest, or with
    early stopping the best that the newest one knows), newest, best (by `metric`), or its number of samples; names skip corrupt
    ones and report them on stderr. Raises ConfigError if there is no such checkpoint.
    """
    run, _, last = url.rstrip("/").rpartition(f"/{CHECKPOINTS}/")
    named = RemoteName.parse(last) if run else None
    remote, names, manifests = list_manifests(run if named else url, field)
    if not names and CONFIG not in remote.location.top_sizes():
        raise ConfigError(field, url, reason=f"it holds no run (no {CONFIG})")
    errors: list[str] = []
    for name in _chosen(names, manifests, checkpoint=checkpoint, named=named, metric=metric):
        error = manifests[name] if isinstance(manifests[name], str) else ""
        if not error:
            with storage_errors(url, field):
                try:
                    manifest = remote.download_checkpoint(name, folder / CHECKPOINTS)
                    remote.download_log(name, folder)
                except CorruptCheckpoint as corrupt:
                    error = str(corrupt)
                    if not named and not remote.location.sizes(name.path(MANIFEST)):  # removed meanwhile: newer ones are there
                        return download_checkpoint(url, field, folder, checkpoint=checkpoint, metric=metric)
        if not error:
            if errors:
                message = f"jaxdp: using {manifest.location} instead of the {checkpoint} checkpoint: {'; '.join(errors)}"
                print(message, file=sys.stderr, flush=True)
            return manifest
        if named or checkpoint not in CHECKPOINT_NAMES:
            raise ConfigError("--checkpoint", str(name.samples), reason=error, hint="use another checkpoint")
        errors.append(error)
    if named or checkpoint not in CHECKPOINT_NAMES:
        available = ", ".join(str(name.samples) for name in names) or "none"
        wanted = str(named) if named else checkpoint
        raise ConfigError(
            "--checkpoint",
            wanted,
            reason="checkpoint not found",
            hint=f"use {', '.join(CHECKPOINT_NAMES)}, or one of: {available}",
        )
    raise ConfigError(field, url, reason="no valid checkpoint found", hint="list them with `jaxdp checkpoints`")


def _chosen(
    names: list[RemoteName], manifests: dict[RemoteName, Any], *, checkpoint: str, named: RemoteName | None, metric: str
) -> list[RemoteName]:
    """The checkpoints to try, in order."""
    if named:
        return [name for name in names if name == named or (not named.lease and name.samples == named.samples)]
    if checkpoint == "newest":
        return names
    if checkpoint == "result":
        newest = next((manifests[name] for name in names if isinstance(manifests[name], Manifest)), None)
        best = newest and newest.metadata["progress"].get("best")
        return [name for name in names if best and name.samples == best["samples"]] + names
    if checkpoint != "best":
        return [name for name in names if str(name.samples) == checkpoint]
    valid = {manifest.samples: name for name, manifest in manifests.items() if not isinstance(manifest, str)}
    scored = by_metric([manifests[name] for name in valid.values()], metric)
    if valid and not scored:
        reason = "no checkpoint was saved right after an evaluation"
        raise ConfigError("--checkpoint", "best", reason=reason, hint="use newest")
    return [valid[manifest.samples] for manifest in scored]
