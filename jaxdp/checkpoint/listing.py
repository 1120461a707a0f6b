"""The checkpoints in a folder: listing, choosing, and renaming corrupt ones."""

import contextlib
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from jaxdp.checkpoint.manifest import (
    CorruptCheckpoint,
    Manifest,
    UnreadableCheckpoint,
    is_checkpoint_name,
    read_manifest,
    verify_files,
)
from jaxdp.choices import STOP_METRICS

CHECKPOINT_NAMES = ("result", "newest", "best")  # by which a command takes a checkpoint, besides its number of samples


def checkpoint_paths(folder: Path) -> list[Path]:
    """What has a checkpoint's name in `folder`, newest first. Its content is not checked: it may be no directory at all."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if is_checkpoint_name(path.name)]
    return sorted(paths, key=lambda path: int(path.name), reverse=True)


def read_manifests(folder: Path) -> Iterator[Manifest]:
    """The valid manifests in `folder`, newest first. The files they list are not checked; invalid manifests are skipped."""
    for path in checkpoint_paths(folder):
        with contextlib.suppress(CorruptCheckpoint, UnreadableCheckpoint):
            yield read_manifest(path)


def is_valid(manifest: Manifest, below: str = "") -> bool:
    """Whether every file of a checkpoint whose name begins with `below` matches its manifest. Reads these files."""
    try:
        verify_files(replace(manifest, files={name: file for name, file in manifest.files.items() if name.startswith(below)}))
    except (CorruptCheckpoint, UnreadableCheckpoint):
        return False
    return True


def latest_valid(folder: Path, max_samples: int | None = None, *, below: str = "") -> Manifest | None:
    """The newest checkpoint of at most `max_samples` samples that `is_valid`; None if there is none."""
    candidates = (m for m in read_manifests(folder) if max_samples is None or m.samples <= max_samples)
    return next((manifest for manifest in candidates if is_valid(manifest, below)), None)


def by_metric(manifests: Iterable[Manifest], metric: str) -> list[Manifest]:
    """The checkpoints saved right after an evaluation, best first; ties are broken in favor of the newer one.

    metric: a name in `jaxdp.choices.STOP_METRICS`. Checkpoints whose value is not finite are left out.
    """
    sign = STOP_METRICS[metric].sign
    values = [(manifest.metric(metric), manifest) for manifest in manifests]
    scored = [(sign * value, manifest) for value, manifest in values if value is not None and math.isfinite(value)]
    return [manifest for _, manifest in sorted(scored, key=lambda pair: (pair[0], pair[1].samples), reverse=True)]


def quarantine(path: Path, suffix: str = "corrupt") -> Path:
    """Rename a checkpoint to NAME.SUFFIX (NAME.SUFFIX-2, ...), so that it is no longer used. Returns the new path."""
    names = (path.with_name(f"{path.name}.{suffix}{'' if n == 1 else f'-{n}'}") for n in range(1, 10_000))
    target = next(name for name in names if not os.path.lexists(name))
    path.rename(target)
    return target


def remove(path: Path) -> None:
    """Remove a directory with its content, or whatever else has this name: a link, or a pipe, which is not opened. Errors are
    ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
