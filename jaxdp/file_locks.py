"""Locks between processes: flock, and where the file system has none, a file that names the process that holds it."""

import errno
import fcntl
import itertools
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from jaxdp.files import read_regular, write_atomically

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of NFS, Lustre and FUSE, depending on how they are mounted
REFRESH_SECONDS, WATCH_SECONDS = 2.0, 60.0  # between two writes of a holder; without one for so long, it has ended


class NoLocksError(OSError):
    """A file on a file system without locks."""

    def __init__(self, number: int, path: str) -> None:
        super().__init__(number, f"{file_system(path)} has no locks", path)


def lock(file: IO[bytes] | int, operation: int, path: str | Path) -> None:
    """`fcntl.flock`. Raises NoLocksError, and BlockingIOError if another process holds a lock that excludes it."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise NoLocksError(error.errno, str(path)) from None
        raise


def file_system(path: str | Path) -> str:
    """The file system of a path as text, such as "the file system /data (nfs4)"."""
    folder, mounts = os.path.realpath(path), [("/", "unknown")]
    with suppress(OSError, ValueError):
        lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        mounts += [(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount), kind) for _, mount, kind, *_ in lines]
    inside = [(place, kind) for place, kind in mounts if os.path.commonpath([folder, place]) == place]
    place, kind = max(reversed(inside), key=lambda mount: len(mount[0]))  # of several mounts of a place, the last
    return f"the file system {place} ({kind})"


@contextmanager
def hold_record(path: Path) -> Iterator[bool]:
    """Hold a lock by a file PATH.TOKEN that names this process and is written again and again; False if another has one.

    Each process creates its own file before it looks for others, and changes no other's: of two that start together, at most
    one holds the lock. A holder that could not write for `WATCH_SECONDS` loses it to a process elsewhere without notice.
    """
    own, process, ended = path.with_name(f"{path.name}.{secrets.token_hex(8)}"), this_process(), threading.Event()

    def write(number: int) -> None:
        write_atomically(own, json.dumps({**process, "refreshed": number}))

    def refresh() -> None:
        for number in itertools.count(1):
            if ended.wait(REFRESH_SECONDS):
                return
            with suppress(OSError):  # of a file system that fails for a moment
                write(number)

    thread = threading.Thread(target=refresh, name="lock", daemon=True)
    write(0)
    thread.start()
    try:
        is_ours = not record_is_held(path, watch_seconds=WATCH_SECONDS, own=own)
        if is_ours:
            yield True
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            own.unlink()
    if not is_ours:
        yield False


def record_is_held(path: Path, *, watch_seconds: float = 0.0, own: Path | None = None) -> bool:
    """Whether a process that a file of `hold_record` names, other than `own`, runs. Files of those that have ended are removed.

    Of a process that cannot be seen from here, whether it writes in `watch_seconds`; without these it does not count.
    """
    records = {file: _read(file) for file in path.parent.glob(f"{path.name}.*") if file != own}
    runs = {file: _runs(record) for file, record in records.items()}
    unseen, ends = [file for file in runs if runs[file] is None], time.monotonic() + watch_seconds
    if any(runs.values()):
        return True
    while unseen and time.monotonic() < ends:
        time.sleep(watch_seconds / 20)
        if any(_read(file) not in (None, records[file]) for file in unseen):
            return True
    if own is not None:
        for file in records:
            with suppress(OSError):
                file.unlink()
    return False


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a file of `hold_record`; None if it cannot be read, or is something else."""
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads(read_regular(path, 10_000))
        return record if isinstance(record, dict) else None
    return None


def this_process() -> dict[str, Any]:
    """Facts that no other process has. Containers may share a host's name, and a process is visible in its own only."""
    facts = {"host": socket.gethostname(), "process": os.getpid(), "started": start_time(os.getpid())}
    with suppress(OSError):
        facts["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        facts["container"] = os.readlink("/proc/self/ns/pid")
    return facts


def _runs(record: dict[str, Any] | None) -> bool | None:
    """Whether the process that a record names runs; None if it cannot be seen from here."""
    here = this_process()
    if record is None or any(record.get(name) != here.get(name) for name in ("host", "boot", "container")):
        return None
    process: Any = record.get("process")
    started: int | None = None
    try:
        os.kill(process, 0)
        started = start_time(process)
    except PermissionError:  # of another user
        pass
    except (ProcessLookupError, TypeError, OverflowError):
        return False
    return started in (None, record.get("started"))


def start_time(process: int) -> int | None:
    """When a process of this host began, in clock ticks since the host did; 0 if it has ended, None if that cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    return None
