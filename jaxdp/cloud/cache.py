"""Local copies of objects, of bounded total size, which the processes of a host share.

    DIRECTORY/lock            held while sizes change; bytes: total size of all copies, `users`: held by every process
    DIRECTORY/FOLDER/         the copies of the objects of one URL; `used`: a number, larger if used more recently
    DIRECTORY/FOLDER/in_use   held by the processes that use these copies, which are then not removed
    DIRECTORY/FOLDER/copies/  a file for each object; a file of prepared data has a second one with the suffix .tag

A copy is renamed to its place when it is complete. Every copy has the object's tag and a checksum.
"""

import atexit
import errno
import fcntl
import hashlib
import math
import os
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import google_crc32c

from jaxdp.cloud.location import ObjectInfo
from jaxdp.errors import ConfigError
from jaxdp.file_locks import NoLocksError, lock
from jaxdp.files import write_atomically

TRAILER = struct.Struct("<16sI")  # digest of the tag, CRC-32C of content and digest
FILE_BLOCK = 4096  # bytes that a file system allocates at a time
GRANTS = 256  # a process takes 1/GRANTS of the limit at a time, so that it seldom needs the lock
SPARE = 50  # 1/SPARE of the limit is removed beyond what is needed
FULL_SECONDS = 30.0  # after which a full cache is checked again: another process may have ended


class Room:
    """The space of all copies below `root`, counted by every process that uses it. path: the folder that this process uses."""

    def __init__(self, root: Path, path: Path, limit: int) -> None:
        self.root, self.path, self.limit = root, path, limit
        self._granted, self._thread_lock = 0, threading.Lock()
        self._full_since, self._counted = -math.inf, False
        self._users = os.open(root / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._in_use = -1
        with self._locked():
            self._open()

    def _open(self) -> None:
        lock(self._users, fcntl.LOCK_SH, self.root / "users")
        for name in ("copies", "partial"):  # an eviction may have removed them since
            self.path.joinpath(name).mkdir(parents=True, exist_ok=True)
        self._in_use = os.open(self.path / "in_use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if _try_exclusive(self._in_use):  # no process writes: unfinished files were left by killed processes
            for file in self.path.joinpath("partial").iterdir():
                file.unlink(missing_ok=True)
        lock(self._in_use, fcntl.LOCK_SH, self.path / "in_use")
        uses = [_number(folder / "used") for folder in self._folders()]
        write_atomically(self.path / "used", str(max(uses, default=0) + 1))
        self._make_room(0)

    def close(self) -> None:
        """Let other processes remove the copies in `path`."""
        if self._in_use < 0:
            return
        with suppress(OSError), self._locked():
            self._write_total(self._total() - self._granted)
        os.close(self._in_use)
        os.close(self._users)
        self._granted, self._in_use = 0, -1

    def take(self, size: int) -> bool:
        """Count `size` bytes more, if the limit allows it."""
        with self._thread_lock:
            if size > self._granted:
                if self._in_use < 0 or time.monotonic() - self._full_since < FULL_SECONDS:
                    return False
                with self._locked():
                    wanted = max(size, self.limit // GRANTS)
                    for grant in (wanted, size):
                        if self._make_room(grant):
                            self._write_total(self._total() + grant)
                            self._granted += grant
                            break
                    else:
                        self._full_since = time.monotonic()
                        return False
            self._granted -= size
            return True

    def give_back(self, size: int) -> None:
        """Count `size` bytes less."""
        with self._thread_lock:
            self._granted += size

    def _make_room(self, size: int) -> bool:
        """Remove unused copies until `size` more bytes fit. The lock is held."""
        if self._total() + size > self.limit:
            self._count_if_alone()
        if (excess := self._total() + size - self.limit) > 0:
            self._remove_unused(excess)
        return self._total() + size <= self.limit

    def _remove_unused(self, size: int) -> None:
        """Remove at least `size` bytes of unused copies, least recently used first."""
        size += self.limit // SPARE
        for folder in sorted(self._folders(), key=lambda folder: _number(folder / "used")):
            if size > 0 and folder != self.path:
                removed = _remove_copies(folder, size)
                size -= removed
                self._write_total(self._total() - removed)

    def _count_if_alone(self) -> None:
        """Correct the total, which killed processes leave too large, unless other processes also write."""
        if self._counted:
            return
        if _try_exclusive(self._users):
            self._counted = True
            places = (folder / name for folder in self._folders() for name in ("copies", "partial"))
            self._write_total(sum(size for place in places for _, size in _files(place)))
            self._granted = 0
        lock(self._users, fcntl.LOCK_SH, self.root / "users")

    def _folders(self) -> list[Path]:
        return [file.parent for file in self.root.glob("*/used")]

    def _total(self) -> int:
        return _number(self.root / "bytes")

    def _write_total(self, total: int) -> None:
        write_atomically(self.root / "bytes", str(max(0, total)))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            lock(descriptor, fcntl.LOCK_EX, self.root / "lock")
            yield
        finally:
            os.close(descriptor)


class Cache:
    """The copies of the objects at one URL, within the limit for all URLs. Threads and processes share it.

    notice: receives a line if copies can no longer be stored; the objects are then read from the URL every time.
    """

    def __init__(self, directory: Path, url: str, *, limit: int, notice: Callable[[str], Any]) -> None:
        """Raises ConfigError, naming storage.directory, if copies cannot be written there."""
        self.root, self.notice = directory, notice
        self.path = directory / hashlib.sha256(url.encode()).hexdigest()[:24]
        self._thread_lock, self._stored = threading.Lock(), True
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.room = Room(directory, self.path, limit)
            write_atomically(self.path / "url", url)
        except OSError as error:
            hint = "give a directory on a local disk" if isinstance(error, NoLocksError) else ""
            raise ConfigError("storage.directory", str(directory), reason=error.strerror or str(error), hint=hint) from None
        atexit.register(self.close)

    def close(self) -> None:
        """Let other processes remove these copies."""
        atexit.unregister(self.close)
        self.room.close()

    def read(self, name: str, info: ObjectInfo) -> bytes | None:
        """The content of an object if there is an intact copy of this version."""
        try:
            data = self._file(name).read_bytes()
        except OSError:
            return None
        content, trailer = data[: -TRAILER.size], data[-TRAILER.size :]
        return content if len(content) == info.size and trailer == _trailer(content, info) else None

    def write(self, name: str, info: ObjectInfo, data: bytes) -> None:
        """Keep a copy, unless there is no room for it."""
        size, partial = _allocated(len(data) + TRAILER.size), self._partial()
        try:
            if self._stored and self.room.take(size):
                partial.write_bytes(data + _trailer(data, info))
                self._move(partial, self._file(name))
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._stop_storing(error)

    def file(self, name: str, info: ObjectInfo, *, verify: bool = False) -> Path | None:
        """The file with the content of an object, if there is a complete copy of this version.

        verify: also read all of it, and compare its checksum.
        """
        path = self._file(name)
        try:
            tag, crc = path.with_suffix(".tag").read_text().split("\n")
            complete = tag == info.tag and path.stat().st_size == info.size
            return path if complete and not (verify and _crc_of_file(path) != int(crc)) else None
        except (OSError, ValueError):
            return None

    def begin_file(self, name: str, size: int) -> int | None:
        """The descriptor of an empty file for an object's content, with its space reserved; None if there is no room.

        Raises BlockingIOError if another process is writing it.
        """
        path = self._partial(name)
        with ExitStack() as stack:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, descriptor)
            try:
                is_here = _try_exclusive(descriptor) and os.path.samestat(os.fstat(descriptor), os.stat(path))
            except FileNotFoundError:
                is_here = False
            if not is_here:
                raise BlockingIOError(errno.EWOULDBLOCK, "written, or just finished, by another process", str(path))
            try:
                os.ftruncate(descriptor, 0)
                if self._stored and self.room.take(_allocated(size)):
                    if size:
                        os.posix_fallocate(descriptor, 0, size)
                    stack.pop_all()
                    return descriptor
            except OSError as error:
                self._stop_storing(error)
            path.unlink(missing_ok=True)
        return None

    def finish_file(self, descriptor: int, name: str, info: ObjectInfo, *, crc: int) -> Path | None:
        """Put a complete file in its place and close it; None, after a notice, if that fails. crc: CRC-32C of its content."""
        path = self._file(name)
        try:
            path.with_suffix(".tag").unlink(missing_ok=True)
            self._move(self._partial(name), path)
            write_atomically(path.with_suffix(".tag"), f"{info.tag}\n{crc}")
        except OSError as error:
            self._stop_storing(error)
            return None
        finally:
            os.close(descriptor)
        return path

    def abandon_file(self, descriptor: int, name: str, size: int) -> None:
        """Remove a file that was begun."""
        self._partial(name).unlink(missing_ok=True)
        os.close(descriptor)
        self.room.give_back(_allocated(size))

    def _file(self, name: str) -> Path:
        digest = hashlib.sha256(name.encode()).hexdigest()[:32]
        return self.path / "copies" / digest[:3] / digest[3:]

    def _partial(self, name: str = "") -> Path:
        """The file for the unfinished copy of an object; without a name, a new file."""
        return self.path / "partial" / (hashlib.sha256(name.encode()).hexdigest() if name else secrets.token_hex(12))

    def _move(self, partial: Path, path: Path) -> None:
        try:
            os.replace(partial, path)
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)
            os.replace(partial, path)

    def _stop_storing(self, error: OSError) -> None:
        with self._thread_lock:
            first, self._stored = self._stored, False
        if first:
            self.notice(f"storage.directory={str(self.root)!r}: {error.strerror}; images without a copy are read from the URL")


def _trailer(content: bytes, info: ObjectInfo) -> bytes:
    digest = hashlib.sha256(info.tag.encode()).digest()[:16]
    return TRAILER.pack(digest, google_crc32c.extend(google_crc32c.value(content), digest))


def _crc_of_file(path: Path) -> int:
    checksum = google_crc32c.Checksum()
    with open(path, "rb") as file:
        while piece := file.read(2**22):
            checksum.update(piece)
    return int.from_bytes(checksum.digest(), "big")


def _allocated(size: int) -> int:
    return -(-size // FILE_BLOCK) * FILE_BLOCK


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _try_exclusive(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """(path, size) of the files at any depth of a folder."""
    for top, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(top, name)
            with suppress(OSError):
                yield path, _allocated(os.stat(path).st_size)


def _remove_copies(folder: Path, size: int) -> int:
    """Remove `size` bytes of copies below a folder, unless a process uses it; returns how many were removed."""
    descriptor = os.open(folder / "in_use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    removed = 0
    try:
        if not _try_exclusive(descriptor):
            return 0
        for path, bytes_of_copy in _files(folder / "copies"):
            if removed >= size:
                return removed
            os.unlink(path)
            removed += bytes_of_copy
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
    return removed
