"""The checkpoint of another run from which a run starts: `--resume PATH`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from jaxdp.checkpoint.listing import latest_valid
from jaxdp.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, read_manifest
from jaxdp.errors import ConfigError
from jaxdp.files import CHECKPOINTS, is_url
from jaxdp.session.processes import Session


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
