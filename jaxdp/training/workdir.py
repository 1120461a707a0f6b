"""The directory of one run: claimed by one process, holding one configuration, never mixed with another run's files."""

import fcntl
import itertools
import json
import os
from contextlib import contextmanager
from pathlib import Path

from jaxdp.config import Config, ConfigError, changes, from_json, to_json


def write_atomically(path: Path, text: str) -> None:
    """The file has the old content or the new one at every moment."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def next_free(workdir: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3, ... that holds no run."""
    names = itertools.chain([workdir], (workdir.with_name(f"{workdir.name}-{n}") for n in itertools.count(2)))
    return next(path for path in names if not (path / "config.json").exists())


@contextmanager
def claimed(workdir: Path):
    """Hold the directory against a second process. Raises ConfigError where it cannot be made or is in use."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(workdir / ".lock", "w")
    except OSError as error:
        raise ConfigError(f"--workdir: {str(workdir)!r} is not allowed; {error.strerror}; give another one") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--workdir: {str(workdir)!r} is not allowed; another process is training in it; give another one"
            ) from None
        yield workdir


def settle(workdir: Path, config: Config) -> tuple[dict | None, str | None]:
    """Make a claimed directory this run's: (the result if the run is finished, a remark to show).

    Raises ConfigError where it holds a different run. An unfinished run of the same configuration starts again from its
    first step; what it had logged is kept beside the new files.
    """
    path = workdir / "config.json"
    remark = None
    if path.exists():
        try:
            difference = changes(from_json(path.read_text()), config)
        except ConfigError as error:
            raise ConfigError(
                f"--workdir: {str(workdir)!r} is not allowed; its config.json cannot be read ({error}); give another one"
            ) from None
        if difference:
            raise ConfigError(
                f"--workdir: {str(workdir)!r} is not allowed; it holds a different run ({'; '.join(difference)}); "
                "give another --workdir, or --resume never for a new one beside it"
            )
        result = workdir / "result.json"
        if result.exists():
            return json.loads(result.read_text()), None
        kept = _set_aside(workdir)
        if kept:
            remark = f"the run here had not finished and starts again from its first step; its log is kept as {kept}"
    write_atomically(path, to_json(config))
    return None, remark


def _set_aside(workdir: Path) -> str | None:
    """Move an unfinished run's log out of the way, under a name that tells what it is."""
    log = workdir / "metrics.jsonl"
    if not log.exists() or not log.stat().st_size:
        return None
    number = next(n for n in itertools.count(1) if not (workdir / f"unfinished-{n}").exists())
    kept = workdir / f"unfinished-{number}"
    kept.mkdir()
    for name in ("metrics.jsonl", "tensorboard"):
        if (workdir / name).exists():
            os.replace(workdir / name, kept / name)
    return f"{kept.name}/metrics.jsonl"
