"""The directory of one run: claimed by one process, holding one configuration, never mixed with another run's files."""

import fcntl
import itertools
import os
from contextlib import contextmanager
from pathlib import Path

from jaxdp.config import Config, ConfigError
from jaxdp.validation import changes, from_json, to_json


def write_atomically(path: Path, text: str) -> None:
    """The file has the old content or the new one at every moment."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


RUN_FILES = ("config.json", "metrics.jsonl", "result.json", "tensorboard")


def next_free(workdir: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3, ... that holds no file of a run."""
    names = itertools.chain([workdir], (workdir.with_name(f"{workdir.name}-{n}") for n in itertools.count(2)))
    return next(path for path in names if not any((path / name).exists() for name in RUN_FILES))


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


def settle(workdir: Path, config: Config) -> tuple[str | None, list[str]]:
    """Make a claimed directory this run's: (the text of result.json if the run is finished, remarks to show).

    Raises ConfigError where it holds a different run, or files of a run without its config.json. A run that had not finished
    starts again from its first step; what it had logged is kept beside the new files.
    """
    path, log, result = (workdir / name for name in ("config.json", "metrics.jsonl", "result.json"))
    refused = f"--workdir: {str(workdir)!r} is not allowed"
    if not path.exists():
        strangers = [name for name in RUN_FILES if (workdir / name).exists()]
        if strangers:
            raise ConfigError(f"{refused}; it holds {', '.join(strangers)} of a run without its config.json; give another one")
        write_atomically(path, to_json(config))
        return None, []
    try:
        old = from_json(path.read_text())
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{refused}; its config.json cannot be read ({error}); give another one") from None
    logged = log.exists() and log.stat().st_size > 0
    if not logged and not result.exists():  # nothing was done there yet
        write_atomically(path, to_json(config))
        return None, []
    difference = changes(old, config)
    if difference:
        raise ConfigError(
            f"{refused}; it holds a different run ({'; '.join(difference)}); "
            "give another --workdir, or --resume never for a new one beside it"
        )
    if result.exists():
        unused = changes(old, config, ignore=())
        remarks = [f"these changes have no effect on it: {'; '.join(unused)}"] if unused else []
        return result.read_text(errors="replace"), remarks
    kept = _set_aside(workdir)
    write_atomically(path, to_json(config))
    return None, [f"the run here had not finished and starts again from its first step; its log is kept as {kept}"]


def _set_aside(workdir: Path) -> str:
    """Move an unfinished run's log out of the way, under a name that tells what it is."""
    number = next(n for n in itertools.count(1) if not (workdir / f"unfinished-{n}").exists())
    kept = workdir / f"unfinished-{number}"
    kept.mkdir()
    for name in ("metrics.jsonl", "tensorboard"):
        if (workdir / name).exists():
            os.replace(workdir / name, kept / name)
    return f"{kept.name}/metrics.jsonl"
