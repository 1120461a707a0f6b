"""Locks between processes: flock, and where the file system has none, a file that names the process that holds it."""

import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from jaxdp.files import read_regular, write_atomically

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of NFS, Lustre and FUSE, depending on how they are mounted
REFRESH_SECONDS, WATCH_SECONDS = 2.0, 20.0  # between two writes of a holder; without one for so long, it has ended


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
    """The file system of a path in words, such as "the file system /data (nfs4)"."""
    folder, mounts = os.path.realpath(path), [("/", "unknown")]
    with suppress(OSError, ValueError):
        lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        mounts += [(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount), kind) for _, mount, kind, *_ in lines]
    inside = [(place, kind) for place, kind in mounts if os.path.commonpath([folder, place]) == place]
    place, kind = max(reversed(inside), key=lambda mount: len(mount[0]))  # of several mounts of a place, the last
    return f"the file system {place} ({kind})"


@contextmanager
def hold_record(path: Path) -> Iterator[bool]:
    """Hold a lock by a file that names this process and is written again and again; False if another process holds it."""
    own: dict[str, Any] = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "started": _start_time(os.getpid()),
        "refreshed": 0,
    }
    if record_is_held(path, watch_seconds=WATCH_SECONDS):
        yield False
        return
    write_atomically(path, json.dumps(own))
    time.sleep(REFRESH_SECONDS / 10)  # of two processes that start together, the last to write holds it
    if _read(path) != own:
        yield False
        return
    ended = threading.Event()

    def refresh() -> None:
        while not ended.wait(REFRESH_SECONDS):
            own["refreshed"] += 1
            with suppress(OSError):  # of a file system that fails for a moment
                write_atomically(path, json.dumps(own))

    thread = threading.Thread(target=refresh, name="lock", daemon=True)
    thread.start()
    try:
        yield True
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


def record_is_held(path: Path, *, watch_seconds: float = 0.0) -> bool:
    """Whether the process that a file of `hold_record` names runs: on another host, whether it writes in `watch_seconds`."""
    record = _read(path)
    if record and record.get("host") == socket.gethostname():
        started = _start_time(record.get("process"))
        return started is not None and started == record.get("started")
    ends = time.monotonic() + watch_seconds
    while record and time.monotonic() < ends:
        time.sleep(watch_seconds / 20)
        if (now := _read(path)) != record:
            return now is not None
    return False


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a file of `hold_record`; None if there is none, or something else."""
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads(read_regular(path, 10_000))
        return record if isinstance(record, dict) else None
    return None


def _start_time(process: Any) -> int | None:
    """When a process of this host began, in clock ticks since the host did; None if there is none."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{int(process)}/stat").read_text().rpartition(")")[2].split()[19])
    return None
