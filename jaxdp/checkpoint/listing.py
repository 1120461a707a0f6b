"""The checkpoints in a folder: lists and chooses them, and renames corrupt ones."""

import contextlib
import itertools
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from jaxdp import metrics
from jaxdp.checkpoint.manifest import CheckpointError, Manifest, is_checkpoint_name, read_manifest, verify_files
from jaxdp.errors import ConfigError

UNFINISHED = "saving-"  # prefix of directories that are being written or removed
CHECKPOINT_NAMES = ("result", "newest", "best")  # of a checkpoint in a command, besides its number of samples


def checkpoint_paths(folder: Path) -> list[Path]:
    """Paths in `folder` with a checkpoint's name, newest first. Content is not checked: a path may not even be a directory."""
    paths = [path for path in folder.iterdir() if is_checkpoint_name(path.name)] if folder.is_dir() else []
    return sorted(paths, key=lambda path: int(path.name), reverse=True)


def read_manifests(folder: Path) -> Iterator[Manifest]:
    """The valid manifests in `folder`, newest first. The files they list are not checked; invalid manifests are skipped."""
    for path in checkpoint_paths(folder):
        with contextlib.suppress(CheckpointError):
            yield read_manifest(path)


def latest_valid(folder: Path, max_samples: int | None = None, *, below: str = "") -> Manifest | None:
    """The newest checkpoint of at most `max_samples` samples whose files (see `verify_files`) are intact, or None."""
    for manifest in read_manifests(folder):
        if max_samples is None or manifest.samples <= max_samples:
            with contextlib.suppress(CheckpointError):
                verify_files(manifest, below)
                return manifest
    return None


def by_metric(manifests: Iterable[Manifest], metric: str) -> list[Manifest]:
    """The checkpoints saved right after an evaluation, best first; ties are broken in favor of the newer one.

    metric: a name in `jaxdp.metrics.METRICS`. Checkpoints with a value that is not finite are omitted. Raises ConfigError for
    an unknown one.
    """
    metrics.check(metric)
    sign = metrics.METRICS[metric].sign
    values = [(manifest.evaluation.get(metric), manifest) for manifest in manifests]
    scored = [(sign * value, manifest) for value, manifest in values if value is not None and math.isfinite(value)]
    return [manifest for _, manifest in sorted(scored, key=lambda pair: (pair[0], pair[1].samples), reverse=True)]


def candidates(found: Mapping[int, Manifest | str], checkpoint: str, metric: str, *, field: str = "--checkpoint") -> list[int]:
    """Samples of the checkpoints that a name in CHECKPOINT_NAMES may mean, in order; it means the first valid one.

    "result": the best checkpoint that early stopping recorded in the newest one, else the newest. found: samples -> manifest or
    the reason why it cannot be read, newest first. metric: the run's `stop.metric`. Raises ConfigError that names `field` if
    "best" has no evaluation.
    """
    valid = [manifest for manifest in found.values() if isinstance(manifest, Manifest)]
    if checkpoint == "best":
        if (scored := by_metric(valid, metric)) or not valid:
            return [manifest.samples for manifest in scored]
        reason = "no checkpoint was saved right after an evaluation"
        raise ConfigError(field, "best", reason=reason, hint="use newest")
    best = valid[0].metadata["progress"].get("best") if valid and checkpoint == "result" else None
    first = [best["samples"]] if best else []
    return first + [samples for samples in found if samples not in first]


def named_checkpoints(manifests: list[Manifest], metric: str) -> dict[str, int]:
    """Name in CHECKPOINT_NAMES -> samples of the checkpoint that it means among `manifests`, valid ones, newest first.

    metric: the run's `stop.metric`. Names without a checkpoint are omitted.
    """
    found = {manifest.samples: manifest for manifest in manifests}
    orders = {name: candidates(found, name, metric) for name in ("result", "newest")}
    orders["best"] = [manifest.samples for manifest in by_metric(manifests, metric)]
    return {name: next(samples for samples in order if samples in found) for name, order in orders.items() if order}


def quarantine(path: Path, suffix: str = "corrupt") -> Path:
    """Rename a checkpoint to NAME.SUFFIX (NAME.SUFFIX-2, ...), so that it is no longer used. Returns the new path."""
    names = (path.with_name(f"{path.name}.{suffix}{'' if n == 1 else f'-{n}'}") for n in itertools.count(1))
    target = next(name for name in names if not os.path.lexists(name))
    path.rename(target)
    return target


def rename_for_removal(path: Path) -> Path:
    """Rename a checkpoint before its removal, so that the run's next session removes it if this process is interrupted."""
    target = path.with_name(f"{UNFINISHED}{path.name}-replaced")
    remove(target)
    path.rename(target)
    return target


def remove(path: Path) -> None:
    """Remove a directory with its content, or a link or pipe with this name, which is not opened. Errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
