"""The directory of a run: locked by one process, with one configuration, never mixed with files of another run."""

import dataclasses
import errno
import fcntl
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from jaxdp import file_locks
from jaxdp.checkpoint.listing import read_manifests
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.config import Config
from jaxdp.errors import ConfigError, StorageError, plural
from jaxdp.files import (
    CHECKPOINTS,
    CONFIG,
    RESULT,
    RUNS,
    expand_user,
    is_url,
    no_directory_reason,
    open_regular,
    read_regular,
    read_text,
    write_atomically,
)
from jaxdp.metrics import is_evaluation
from jaxdp.run_records import LOG, scan_log
from jaxdp.run_records import to_json as record_to_json
from jaxdp.training.result import TrainResult
from jaxdp.validation import changes, from_json, to_json

CLASSES = "classes.json"
LOCK, RECORD = ".lock", ".in_use"  # the latter, with a suffix, on a file system without locks
RUN_FILES = (CONFIG, LOG, RESULT, "tensorboard", CHECKPOINTS)

PathLike = str | Path
FIELD = "--workdir"


def _error(workdir: PathLike, reason: str, hint: str = "") -> ConfigError:
    return ConfigError(FIELD, str(workdir), reason=reason, hint=hint)


def resolve_workdir(workdir: PathLike | None, config: Config) -> Path:
    """The run directory: `workdir`, by default runs/NAME."""
    if workdir == "":
        raise _error("", "must not be empty")
    path = Path(RUNS) / config.name if workdir is None else Path(expand_user(workdir, FIELD))
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:  # Orbax would fail to save there
        raise _error(ascii(str(path)), "must be UTF-8, with the directories above it", "use a different directory") from None
    return path


def local_workdir(workdir: PathLike | None, config: Config) -> Path:
    """The run directory, or the local copy of a run at a URL."""
    if not is_url(workdir):
        return resolve_workdir(workdir, config)
    from jaxdp.cloud.local import run_copy

    return run_copy(config.storage, str(workdir).strip().rstrip("/"))


def next_free(workdir: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3, ... without files of a run."""
    names = itertools.chain([workdir], (workdir.with_name(f"{workdir.name}-{n}") for n in itertools.count(2)))
    return next(path for path in names if not any((path / name).exists() for name in RUN_FILES))


@contextmanager
def lock_run_dir(workdir: Path, info: Callable[[str], Any] = lambda line: None) -> Iterator[Path]:
    """Create the directory and lock it for this process. Raises ConfigError if it cannot be created or is locked.

    info: receives a line if the file system has no locks.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _error(workdir, no_directory_reason(workdir, error), "use another directory") from None
    with ExitStack() as stack:
        try:
            is_ours = _lock_for_training(stack.enter_context(open_regular(workdir / LOCK, "ab")), workdir)
        except file_locks.NoLocksError as error:
            info(f"{error.strerror}: {workdir / RECORD}.* shows other processes that this run is in progress")
            is_ours = stack.enter_context(file_locks.hold_record(workdir / RECORD))
        except OSError as error:
            if not ((workdir / RESULT).exists() and error.errno in (errno.EROFS, errno.EACCES)):  # else it is only read
                hint = "remove it, or use another directory" if os.path.lexists(workdir / LOCK) else "use another directory"
                raise _error(workdir, f"{workdir / LOCK}: {error.strerror}", hint) from None
            is_ours = True
        if not is_ours:
            raise _error(workdir, "another process is training in it", "use another directory")
        yield workdir


def _lock_for_training(lock: IO[bytes], workdir: Path) -> bool:
    """Lock the file; False if another process is training. `in_use`, which may hold it for a moment, does not stop a run."""
    for _ in range(100):
        with suppress(BlockingIOError):
            file_locks.lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, workdir / LOCK)
            return True
        if in_use(workdir):
            return False
        time.sleep(random.uniform(0.001, 0.01))
    return False


def in_use(workdir: Path) -> bool:
    """Whether a process on this machine is training in the directory."""
    try:
        with open_regular(workdir / LOCK) as lock:  # for reading: NFS gives no shared lock to a file opened for writing
            file_locks.lock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB, workdir / LOCK)
    except BlockingIOError:
        return True
    except file_locks.NoLocksError:
        return file_locks.record_is_held(workdir / RECORD)
    except OSError:
        return False
    return False


def prepare_run_dir(workdir: Path, config: Config, accept_changes: bool = False) -> tuple[str | None, list[str]]:
    """Write config.json into a locked directory, or check the run that it holds.

    Returns the text of result.json if the run is finished, else None, and remarks to show. Files of an existing run are not
    changed (see `mark_running`). Raises ConfigError if the directory holds a different run, unless changes are accepted, or
    files of a run without its config.json.
    """
    path = workdir / CONFIG
    if not path.exists():
        other_files = [name for name in RUN_FILES if (workdir / name).exists()]
        if other_files:
            raise _error(workdir, f"it holds {', '.join(other_files)} of a run, but no {CONFIG}", "use another directory")
        write_atomically(path, to_json(config))
        return None, []
    try:
        saved = from_json(read_text(path))
    except (ConfigError, ValueError, OSError) as error:
        raise _error(workdir, f"its {CONFIG} cannot be read ({_reason(error)})", "use another directory") from None
    log, checkpoints, is_finished = workdir / LOG, workdir / CHECKPOINTS, (workdir / RESULT).exists()
    has_log, has_checkpoint = log.exists() and log.stat().st_size > 0, checkpoints.exists() and any(checkpoints.iterdir())
    has_started = is_finished or has_log or has_checkpoint
    differences, all_changes = changes(saved, config), changes(saved, config, ignore=())
    in_schedule = any(line.startswith(("epochs:", "batch.", "schedule.")) for line in differences)
    if differences and has_started and not accept_changes:
        raise _error(
            workdir,
            f"it holds a different run ({'; '.join(differences)})",
            "use another --workdir, --resume never for a new run beside it, or --accept-changes to resume with these changes"
            + ", and --schedule-from-now to begin the schedule anew" * in_schedule,
        )
    manifest = next(read_manifests(checkpoints), None)
    if manifest is not None:
        check_same_optimizer(manifest, config)
    if is_finished and not differences:
        remarks = [f"these changes have no effect on the finished run: {'; '.join(all_changes)}"] if all_changes else []
        return read_result_text(workdir), remarks + _log_remarks(workdir, manifest)
    return None, [f"resuming with changes: {'; '.join(all_changes)}"] if all_changes and has_started else []


def check_same_optimizer(manifest: Manifest, config: Config) -> None:
    """Raise ConfigError if a checkpoint is of another optimizer, or start of the average, whose state cannot be continued."""
    optimizer = manifest.config.optimizer
    saved = optimizer.name
    if saved != config.optimizer.name:
        reason = f"the optimizer of {manifest.path} is {saved}, whose state {config.optimizer.name} cannot continue from"
        hint = f"use --optimizer.name {saved}, or start a new run with --resume never"
        raise ConfigError("optimizer.name", config.optimizer.name, reason=reason, hint=hint)
    saved_start = optimizer.average_start
    if config.optimizer.average_decay is not None and saved_start != config.optimizer.average_start:
        reason = f"the average of {manifest.path} began as {saved_start}, and its steps have other weights"
        hint = f"use --optimizer.average-start {saved_start}, or start a new run with --resume never"
        raise ConfigError("optimizer.average_start", config.optimizer.average_start, reason=reason, hint=hint)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def read_result_text(workdir: Path) -> str:
    """result.json of a finished run. Raises ConfigError if it cannot be read."""
    try:
        return read_regular(workdir / RESULT).decode(errors="replace")
    except OSError as error:
        raise _error(workdir, f"its {RESULT} cannot be read ({error.strerror})", "repair or delete that file") from None


def read_result(path: Path | str, text: str) -> TrainResult:
    """The result of a finished run, from the text of its result.json. Raises ConfigError if it is damaged.

    path: of the run, a directory or a URL.
    """
    try:
        return dataclasses.replace(TrainResult.from_dict(json.loads(text)), workdir=str(path))
    except (ValueError, AttributeError):
        hint = "delete that file to resume from the last checkpoint, or use another directory"
        raise _error(path, f"its {RESULT} is damaged", hint) from None


def run_config(workdir: PathLike) -> Config:
    """The config of the run in a directory or at a URL. Raises ConfigError if there is none."""
    workdir = expand_user(workdir, FIELD)
    try:
        text = read_run_text(workdir, CONFIG)
        if text is None:
            raise _error(workdir, f"it holds no run (no {CONFIG})")
        return from_json(text)
    except StorageError:
        raise
    except (ValueError, OSError) as error:
        if isinstance(error, ConfigError) and error.field == FIELD:
            raise
        raise _error(workdir, f"its {CONFIG} cannot be read ({_reason(error)})") from None


def read_run_text(workdir: PathLike, name: str) -> str | None:
    """The text of a file of a run, None if it does not exist."""
    if is_url(workdir):
        from jaxdp.cloud.remote_run import read_run_file

        content = read_run_file(str(workdir), name, FIELD)
        return None if content is None else content.decode()
    try:
        return read_text(Path(expand_user(workdir, FIELD)) / name)
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_class_names(workdir: Path, names: Sequence[str]) -> None:
    """Write the names of the classes by label: an empty list if they have numbers."""
    write_atomically(workdir / CLASSES, json.dumps(list(names), indent=1, ensure_ascii=False) + "\n")


def trained_classes(workdir: PathLike) -> list[str] | None:
    """The names with which `write_class_names` was called in a run; None if it has no such file.

    Raises ConfigError if the file is damaged.
    """
    names: Any = None
    try:
        text = read_run_text(workdir, CLASSES)
        if text is None:
            return None
        names = json.loads(text)
    except (ConfigError, StorageError):  # of the URL
        raise
    except (ValueError, OSError):
        pass
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _error(workdir, f"its {CLASSES} is not a list of names", "repair or delete that file")
    return names


def class_names(workdir: PathLike, count: int) -> list[str]:
    """The names of the `count` classes of a run; `class NUMBER` for classes without a name.

    Raises ConfigError if the file with the names is damaged.
    """
    names = trained_classes(workdir) or []
    if len(names) > count:
        raise _error(workdir, f"its {CLASSES} has more than {count} names", "repair or delete that file")
    return names + [f"class {number}" for number in range(len(names), count)]


def mark_running(workdir: Path, config: Config) -> None:
    """Write the configuration of this session and delete the result of an earlier one."""
    path, text = workdir / CONFIG, to_json(config)
    (workdir / RESULT).unlink(missing_ok=True)
    if read_text(path) != text:
        write_atomically(path, text)


def read_records(
    workdir: Path, accept: Callable[[dict[str, Any]], bool] = lambda record: True
) -> tuple[list[dict[str, Any]], int]:
    """(records, number of damaged lines) of a run's log, as `scan_log`; none without a log.

    Raises ConfigError if it cannot be read.
    """
    try:
        return scan_log(workdir / LOG, accept)
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise _error(workdir, f"its {LOG} cannot be read ({error.strerror})", "repair or delete that file") from None


def lost_records(manifest: Manifest | None, found: int, damaged: int) -> int:
    """How many records a log has lost, beside its damaged lines. manifest: of the newest checkpoint of its run.

    found, damaged: numbers of its intact and damaged lines. A checkpoint after a step, or a result, follows a record.
    """
    written = manifest.metadata["progress"].get("records", 0) if manifest else 0
    least = 0 if manifest and manifest.samples == 0 else 1
    return max(0, max(least, written) - found - damaged)


def _log_warnings(log: Path, damaged: int, lost: int) -> list[str]:
    dropped = f"left out {plural(damaged, 'damaged line')} of {log}"
    lacks = f"{log} lacks {plural(lost, 'record', ',')} that the run had written by its checkpoint"
    return [dropped] * (damaged > 0) + [lacks] * (lost > 0)


def _log_remarks(workdir: Path, manifest: Manifest | None) -> list[str]:
    """What is wrong with the log of a finished run. manifest: of its newest checkpoint."""
    try:
        records, damaged = read_records(workdir)
    except ConfigError as error:
        return [f"{workdir}: {error.reason}"]
    return _log_warnings(workdir / LOG, damaged, lost_records(manifest, len(records), damaged))


def kept_records(manifest: Manifest, *, evaluates_again: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """(records up to a checkpoint, warnings) of the log beside it. Raises ConfigError if the log cannot be read.

    evaluates_again: the run repeats the evaluation at the checkpoint, whose record is left out: a callback may differ.
    """
    samples, source = manifest.samples, manifest.path.parent.parent
    records, damaged = read_records(source)
    until = [record for record in records if record["samples"] <= samples]
    warnings = _log_warnings(source / LOG, damaged, lost_records(manifest, len(until), damaged))
    last = samples - evaluates_again  # of an evaluation
    return [record for record in until if not is_evaluation(record) or record["samples"] <= last], warnings


def write_log(workdir: Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace the log of a run."""
    write_atomically(workdir / LOG, "".join(record_to_json(record) + "\n" for record in records))
