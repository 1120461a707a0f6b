"""The files of a run that reports read: those in its directory, or copies of those at its URL."""

import os
import weakref
from dataclasses import dataclass
from pathlib import Path

from jaxdp.checkpoint.listing import checkpoint_paths, read_manifests
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.config import Storage
from jaxdp.files import CONFIG, expand_user, is_url
from jaxdp.records import EVENTS, LOG
from jaxdp.setup.run_dir import CHECKPOINTS, CLASSES, RESULT, in_use

FIELD = "WORKDIR"


@dataclass(frozen=True)
class RunFiles:
    """path: of the files. is_running: whether a process is training. workdir: the directory or URL, as given.

    samples: of the checkpoints. newest: manifest of the newest one.
    """

    workdir: str
    path: Path
    is_running: bool
    samples: list[int]
    newest: Manifest | None


def local_run_files(path: Path, *, is_running: bool) -> RunFiles:
    """The files of the run in a directory."""
    folder = path / CHECKPOINTS
    samples = [int(checkpoint.name) for checkpoint in checkpoint_paths(folder)]
    return RunFiles(str(path), path, is_running, samples, next(read_manifests(folder), None))


def open_run_files(workdir: str | os.PathLike) -> RunFiles:
    """The files of the run in a directory or at a URL, whose copies are removed with the object that is returned.

    Raises ConfigError for a URL that cannot be read.
    """
    url = expand_user(workdir, "WORKDIR")
    if not is_url(url):
        return local_run_files(Path(url), is_running=in_use(Path(url)))
    from jaxdp.cloud.local import temporary_directory
    from jaxdp.cloud.remote_run import download_run_files, list_manifests

    copy = temporary_directory(Storage())
    path = Path(copy.name)
    try:
        is_running = download_run_files(url, path, names=(CONFIG, LOG, RESULT, CLASSES, EVENTS), field=FIELD)
        _, names, manifests = list_manifests(url, FIELD)
    except BaseException:
        copy.cleanup()
        raise
    newest = next((manifests[name] for name in names if isinstance(manifests[name], Manifest)), None)
    files = RunFiles(url, path, is_running, [name.samples for name in names], newest)
    weakref.finalize(files, copy.cleanup)
    return files
