"""The directory of one run: claimed by one process, holding one configuration, never mixed with another run's files."""

import errno
import fcntl
import itertools
import json
import os
from contextlib import contextmanager
from pathlib import Path

from jaxdp.config import Config, ConfigError
from jaxdp.training.metrics import LOG, read_log
from jaxdp.training.metrics import to_json as to_json_line
from jaxdp.validation import changes, from_json, to_json


def write_atomically(path: Path, text: str) -> None:
    """The file has the old content or the new one at every moment."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


CHECKPOINTS, CONFIG, CLASSES, LOCK = "checkpoints", "config.json", "classes.json", ".lock"
RUN_FILES = (CONFIG, "metrics.jsonl", "result.json", "tensorboard", CHECKPOINTS)


def next_free(workdir: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3, ... that holds no file of a run."""
    names = itertools.chain([workdir], (workdir.with_name(f"{workdir.name}-{n}") for n in itertools.count(2)))
    return next(path for path in names if not any((path / name).exists() for name in RUN_FILES))


@contextmanager
def claimed(workdir: Path):
    """Hold the directory against a second process. Raises ConfigError where it cannot be made or is in use."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(workdir / LOCK, "w")
    except OSError as error:
        if (workdir / "result.json").exists() and error.errno in (errno.EROFS, errno.EACCES):
            yield workdir  # a finished run, which is only looked at
            return
        raise ConfigError(f"--workdir: {str(workdir)!r} is not allowed; {error.strerror}; give another one") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--workdir: {str(workdir)!r} is not allowed; another process is training in it; give another one"
            ) from None
        yield workdir


def in_use(workdir: Path) -> bool:
    """Whether a process on this machine is training in the directory."""
    try:
        with open(workdir / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def settle(workdir: Path, config: Config, accept_changes: bool = False) -> tuple[str | None, list[str]]:
    """Make a claimed directory this run's: (the text of result.json if the run is finished, remarks to show).

    A directory that holds a run is left as it is until that can go on (see `adopt`). Raises ConfigError where it holds a
    different run, unless its changes are accepted, or files of a run without its config.json.
    """
    path, result = workdir / CONFIG, workdir / "result.json"
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
    log, saved = workdir / LOG, workdir / CHECKPOINTS
    begun = result.exists() or (log.exists() and log.stat().st_size > 0) or (saved.exists() and any(saved.iterdir()))
    difference, every_change = changes(old, config), changes(old, config, ignore=())
    if difference and begun and not accept_changes:
        raise ConfigError(
            f"{refused}; it holds a different run ({'; '.join(difference)}); give another --workdir, --resume never for a new "
            "one beside it, or --accept-changes to go on with them"
        )
    if result.exists() and not difference:
        remarks = [f"these changes have no effect on it: {'; '.join(every_change)}"] if every_change else []
        return result.read_text(errors="replace"), remarks
    return None, [f"going on with changes: {'; '.join(every_change)}"] if every_change and begun else []


def run_config(workdir) -> Config:
    """The config of the run in a directory. Raises ConfigError where there is none."""
    refused = f"--workdir: {str(workdir)!r} is not allowed"
    try:
        return from_json((Path(workdir) / CONFIG).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{refused}; it holds no run (no {CONFIG})") from None
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{refused}; its {CONFIG} cannot be read ({error})") from None


def keep_class_names(workdir: Path, names) -> None:
    """Write down what the run's classes are called, where its data tell."""
    if names:
        write_atomically(workdir / CLASSES, json.dumps(list(names), indent=1, ensure_ascii=False) + "\n")
    else:
        (workdir / CLASSES).unlink(missing_ok=True)


def class_names(workdir, count: int) -> list[str]:
    """The names of a run's `count` classes; their numbers for those that have none. Raises ConfigError for a damaged file."""
    path, names = Path(workdir) / CLASSES, []
    if path.exists():
        try:
            names = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            names = None
        if not isinstance(names, list) or len(names) > count or not all(isinstance(name, str) for name in names):
            refused = f"--workdir: {str(workdir)!r} is not allowed"
            raise ConfigError(f"{refused}; its {CLASSES} is no list of at most {count} names; mend or remove it")
    return names + [str(number) for number in range(len(names), count)]


def adopt(workdir: Path, config: Config) -> None:
    """The run in the directory goes on, with this configuration: it is no longer finished."""
    path, text = workdir / CONFIG, to_json(config)
    (workdir / "result.json").unlink(missing_ok=True)
    if path.read_text() != text:
        write_atomically(path, text)


def cut_log(source: Path, workdir: Path, samples: int, evaluated: bool) -> str | None:
    """Leave in `workdir`'s metrics.jsonl what `source`'s says up to `samples` samples: what comes after will be written again.

    evaluated: whether an evaluation at just these samples is among what is kept. Returns a remark where lines are damaged.
    """
    log = source / LOG
    there = samples > 0 and log.exists()
    records = read_log(log) if there else []
    lost = log.read_bytes().count(b"\n") - len(records) if there else 0
    kept = [
        record
        for record in records
        if record["samples"] < samples or (record["samples"] == samples and (evaluated or "loss" in record))
    ]
    write_atomically(workdir / LOG, "".join(to_json_line(record) + "\n" for record in kept))
    if lost > 0:
        return f"{lost} line{'s' * (lost > 1)} of {log} could not be read and {'are' if lost > 1 else 'is'} left out"
    return None
