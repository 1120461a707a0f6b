"""Uploads a run to its URL in the background: each complete checkpoint, manifest last, and the files of the run directory.

Rank 0 decides what is uploaded, and each process uploads the part of a checkpoint that it has written.
"""

import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxdp.checkpoint.listing import UNFINISHED, checkpoint_paths, remove
from jaxdp.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    CorruptCheckpoint,
    Manifest,
    parse_manifest,
    read_manifest,
    state_files,
)
from jaxdp.checkpoint.retention import Retention
from jaxdp.cloud.lease import Lease, LeaseLost
from jaxdp.cloud.remote_run import FOLDERS, RemoteName, RemoteRun
from jaxdp.cloud.retry import Patience
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import StorageError, TrainingError, first_line, plural
from jaxdp.files import CHECKPOINTS, CONFIG, LARGEST, LOG, RESULT, read_regular

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between two attempts
DRAIN_SECONDS = 600.0  # without any success, after which the end of a run no longer waits for uploads
PROFILE = "profile"
ESSENTIAL = (".", CONFIG, LOG, RESULT)  # needed to continue a run: the directory and these files in it


class Mirror:
    """Rank 0's part: uploads what is new, removes expired checkpoints, and reports interruptions.

    remote: the run at the URL. workdir: its local copy. lease: held by this process. retention: set by `begin`. bytes_uploaded,
    checkpoints_uploaded: in this session.
    """

    def __init__(
        self,
        remote: RemoteRun,
        workdir: Path,
        lease: Lease,
        *,
        group: ProcessGroup,
        complete_here: bool,
        every_seconds: float,
    ) -> None:
        self.remote, self.workdir, self.lease, self.group = remote, workdir, lease, group
        self.complete_here, self.every_seconds = complete_here, every_seconds
        self.bytes_uploaded = self.checkpoints_uploaded = 0
        self._pending: set[int] = set()
        self._rejected: tuple[int, str] | None = None  # (samples after which checkpoints are rejected, reason)
        self._manifests: dict[RemoteName, Manifest] = {}
        self._files: dict[str, tuple[int, int, int]] = {}  # name -> inode, bytes and time of the files as they were uploaded
        self._unreadable: dict[str, str] = {}  # name of a file or folder of the run directory -> why it cannot be read
        self._incomplete: list[RemoteName] = []  # checkpoints whose uploads have failed
        self._saves = 0
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._closing = self._abandoned = False
        self._failing_since: float | None = None
        self._last_success = time.monotonic()
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def begin(self, retention: Retention, info: Callable[[str], Any]) -> None:
        """Start uploading; `retention` decides which checkpoints are kept. info: shows a line."""
        self.retention, self.info = retention, info
        self._thread.start()

    def enqueue(self, samples: int) -> None:
        """Upload the checkpoint of `samples` samples, which is complete on the local disk; broadcast which ones are kept."""
        self._add_pending(samples)
        kept = [int(path.name) for path in checkpoint_paths(self.workdir / CHECKPOINTS)]
        self.group.broadcast_object("kept checkpoints", kept)

    def _add_pending(self, samples: int) -> None:
        with self._lock:
            self._pending.add(samples)
        self._wake.set()

    def reject(self, *, after: int, reason: str) -> None:
        """Mark the checkpoints of more than `after` samples at the URL as not to be used."""
        with self._lock:
            self._rejected = after, reason
            self._pending = {samples for samples in self._pending if samples <= after}
        self._wake.set()

    def check(self) -> None:
        """Raise TrainingError if another process has taken over the run."""
        try:
            self.lease.check()
        except LeaseLost as error:
            raise TrainingError(
                f"{self.remote.location} was taken over by {error}, because this process could not renew its lease in time; "
                "it continues there"
            ) from None

    def close(self, while_waiting: Callable[[], Any]) -> None:
        """Upload what is left and release the lease. while_waiting: called several times a second; may raise.

        Raises TrainingError if that is not possible.
        """
        began = self._last_success = time.monotonic()
        self._closing = True
        self._wake.set()
        reported = False
        while self._thread.is_alive():
            while_waiting()
            self._thread.join(0.1)
            if not reported and time.monotonic() - began > 5:
                reported = True
                self.info(f"waiting for uploads to {self.remote.location}")
            if self._failure and time.monotonic() - self._last_success > DRAIN_SECONDS:
                break
        self.check()
        if self._unreadable:
            files = ", ".join(f"{name} ({reason})" for name, reason in self._unreadable.items())
            self.info(f"not at {self.remote.location}, because it cannot be read in {self.workdir}: {files}")
        if self._thread.is_alive() or self._failure:
            self.lease.abandon()
            raise TrainingError(
                f"not everything was uploaded to {self.remote.location} ({self._failure}); {self.workdir} holds the rest, and "
                "the same command on this machine uploads it"
            )
        self._release(while_waiting)
        if self.bytes_uploaded:
            checkpoints = plural(self.checkpoints_uploaded, "checkpoint")
            self.info(f"uploaded {checkpoints} to {self.remote.location}, {self.bytes_uploaded / 1e6:,.1f} MB in all")

    def abandon(self) -> None:
        """Stop without uploading what is left."""
        self._abandoned = True
        self._wake.set()
        self.lease.abandon()

    def _release(self, while_waiting: Callable[[], Any]) -> None:
        """Release the lease; repeat failed requests for a while. Raises TrainingError."""
        result = self.workdir / RESULT
        final = {RESULT: [result.stat().st_size]} if result.exists() else {}
        patience = Patience(DRAIN_SECONDS, notice=lambda text: None, while_waiting=while_waiting)
        try:
            patience(lambda: self.lease.release(final))
        except LeaseLost:
            self.check()
        except StorageError as error:
            reason = f"{error.filename}: {error.strerror}"
            raise TrainingError(
                f"everything was uploaded to {self.remote.location}, but the lease there could not be released "
                f"({reason}); it expires after {self.lease.record.seconds:.0f} s"
            ) from None

    def _run(self) -> None:
        pause, is_new = FIRST_PAUSE, True
        try:
            while not self._abandoned:
                is_last = self._closing
                try:
                    if is_new:
                        self._compare()
                        is_new = False
                    self._upload_all()
                except OSError as error:  # of the storage, or of the local disk
                    self._report_failure(error)
                    if is_last and not (isinstance(error, StorageError) and not error.permanent):
                        break
                    self._wake.wait(pause) if not self._closing else time.sleep(pause)
                    self._wake.clear()
                    pause = min(2 * pause, LONGEST_PAUSE)
                    continue
                self._report_success()
                pause = FIRST_PAUSE
                if is_last:
                    break
                self._wake.wait(self.every_seconds)
                self._wake.clear()
        except LeaseLost:
            pass  # `check` raises it where the run trains
        except Exception as error:
            self._failure = first_line(error)
            self.info(f"uploads to {self.remote.location} have ended ({self._failure}); training continues")
        finally:
            self.group.broadcast_object("upload", None)

    def _report_failure(self, error: OSError) -> None:
        self._failure = f"{error.filename}: {error.strerror}"
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            self.info(f"uploads to {self.remote.location} are delayed ({self._failure}); training continues")

    def _report_success(self) -> None:
        self._last_success, self._failure = time.monotonic(), ""
        if self._failing_since is not None:
            seconds, self._failing_since = time.monotonic() - self._failing_since, None
            self.info(f"uploads to {self.remote.location} continue after {seconds:.0f} s")

    def _compare(self) -> None:
        """Read which checkpoints the URL holds, remove leftovers there, and enqueue the checkpoints that it lacks."""
        adopted = [name for word in self.lease.record.adopted or [] if (name := RemoteName.parse(word))]
        self.lease.confirm()
        self.remote.remove_others(adopted, lease=self.lease.record)
        found = self.remote.manifests(self.lease.record)
        self._manifests = {name: manifest for name, manifest in found.items() if isinstance(manifest, Manifest)}
        there = {name.samples: manifest for name, manifest in self._manifests.items()}
        for path in checkpoint_paths(self.workdir / CHECKPOINTS):
            samples = int(path.name)
            manifest = self._local_manifest(samples)
            if manifest and (samples not in there or there[samples].files != manifest.files):
                with self._lock:
                    self._pending.add(samples)

    def _local_manifest(self, samples: int) -> Manifest | None:
        path = self.workdir / CHECKPOINTS / str(samples)
        try:
            return read_manifest(path)
        except CheckpointError:
            return None

    def _upload_all(self) -> None:
        """Upload the files of the run directory, the pending checkpoints, newest first, and what changed meanwhile."""
        self._upload_files()
        if self._rejected:
            after, reason = self._rejected
            for name in [name for name in self._manifests if name.samples > after]:
                self.remote.reject(name, reason)
                del self._manifests[name]
            self._rejected = None
        while self._pending:
            with self._lock:
                samples = max(self._pending)
                self.retention.uploading = samples
            try:
                self._upload_checkpoint(samples)
            finally:
                self.retention.uploading = None
            self._upload_files()
            self._remove_expired()
        self._remove_expired()

    def _upload_files(self) -> None:
        """Upload the files of the run directory that have changed; report what cannot be read, and continue without it."""
        unreadable: dict[str, str] = {}

        def leave_out(error: OSError, name: str) -> None:
            if isinstance(error, (FileNotFoundError, NotADirectoryError)):  # removed meanwhile, or never there
                return
            if isinstance(error, StorageError) or name in ESSENTIAL:
                raise error
            unreadable[name] = error.strerror or first_line(error)
            if name not in self._unreadable:
                self.info(f"{self.workdir / name} cannot be read and is not uploaded ({unreadable[name]}); training continues")

        for name in _run_files(self.workdir, leave_out):
            try:
                self._upload_file(name)
            except OSError as error:
                leave_out(error, name)
        self._unreadable = unreadable

    def _upload_file(self, name: str) -> None:
        file = self.workdir / name
        status = file.stat()
        identity = status.st_ino, status.st_size, status.st_mtime_ns
        if not stat.S_ISREG(status.st_mode) or self._files.get(name) == identity:
            return
        if status.st_size > LARGEST:
            self.lease.confirm()
            self.remote.location.upload(file, name)
        else:  # read whole first, because the file may grow during the request
            content = read_regular(file, sys.maxsize)
            self.lease.confirm()
            self.remote.location.write(name, content)
        self.bytes_uploaded += status.st_size
        self._files[name] = identity

    def _upload_checkpoint(self, samples: int) -> None:
        """Upload a checkpoint unless it no longer exists here. An earlier one of the same samples is removed afterwards."""
        path = self.workdir / CHECKPOINTS / str(samples)
        with self._lock:
            self._pending.discard(samples)
        manifest = self._local_manifest(samples)
        if manifest is None:
            return
        self._saves += 1
        name = RemoteName(samples, self.lease.record.number, self._saves)
        try:
            self.lease.confirm()
            self.group.broadcast_object("upload", [samples, str(name)])
            error = upload_part(self.remote, name, path, group=self.group)
            errors = self.group.all_gather_object("uploaded", error)
            if self._local_manifest(samples) != manifest:  # removed or replaced meanwhile
                raise FileNotFoundError
            for rank, reason in enumerate(errors):
                if reason:
                    where = f" by rank {rank}" if self.group.num_processes > 1 else ""
                    raise StorageError(f"{reason}{where}", self.remote.url_of(name))
            if not self.complete_here:
                self._download_parts(name, manifest)
            sizes = self.remote.location.sizes(name.path())
            expected = {name.path(file): size for file, (size, _) in manifest.files.items()}
            if {file: sizes.get(file) for file in expected} != expected:
                raise StorageError("uploaded files are incomplete", self.remote.url_of(name))
            text = read_regular(path / MANIFEST)
            if parse_manifest(text, path) != manifest:
                raise FileNotFoundError
            log = read_regular(self.workdir / LOG, sys.maxsize)
            self.remote.location.write(name.path(LOG), log[: log.rfind(b"\n") + 1])
            self.lease.verify()
            self.remote.location.write(name.path(MANIFEST), text)
        except (FileNotFoundError, CorruptCheckpoint):
            self.remote.remove(name)
            if path.exists():
                self._add_pending(samples)
            return
        except OSError:
            self._incomplete.append(name)
            if path.exists():
                with self._lock:
                    self._pending.add(samples)
            raise
        self.checkpoints_uploaded += 1
        self.bytes_uploaded += manifest.num_bytes + len(text) + len(log)
        self._manifests[name] = replace(manifest, url=self.remote.url_of(name))
        self._report_success()  # checkpoints may be saved faster than they are uploaded

    def _download_parts(self, name: RemoteName, manifest: Manifest) -> None:
        """Complete the local copy of a checkpoint whose other parts lie on other machines."""
        for file in manifest.files:
            target = manifest.path / file
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f".{target.name}.partial")
                self.remote.location.download(name.path(file), partial)
                partial.rename(target)

    def _remove_expired(self) -> None:
        """Remove the checkpoints at the URL that the retention rules would remove from a disk, and incomplete ones."""
        newest = {name.samples: name for name in sorted(self._manifests)}
        by_age = [self._manifests[name] for name in sorted(newest.values(), reverse=True)]
        expired = {manifest.samples for manifest in self.retention.expired(by_age)}
        removed = [name for name in self._manifests if name.samples in expired or newest[name.samples] != name]
        if removed:  # only under the lease: the next holder must list the later saves that replace these
            self.lease.verify()
        while self._incomplete:
            self.remote.remove(self._incomplete[-1])
            self._incomplete.pop()
        for name in removed:
            self.remote.remove(name)
            del self._manifests[name]


class MirrorFollower:
    """`Mirror`'s interface on all other ranks: uploads this process's part of each checkpoint that rank 0 announces."""

    def __init__(self, remote: RemoteRun, workdir: Path, *, group: ProcessGroup, shares_directory: bool) -> None:
        self.remote, self.workdir, self.group, self.complete_here = remote, workdir, group, shares_directory
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def begin(self, retention: Retention, info: Callable[[str], Any]) -> None:
        self._thread.start()

    def enqueue(self, samples: int) -> None:
        """Remove this process's parts of the checkpoints that rank 0 no longer has. Until then, it may upload them again."""
        kept = self.group.broadcast_object("kept checkpoints", None)
        if not self.complete_here:
            for part in (self.workdir / CHECKPOINTS).glob(f"{UNFINISHED}*"):
                if part.name not in [f"{UNFINISHED}{samples}" for samples in kept]:
                    remove(part)

    def reject(self, *, after: int, reason: str) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self, while_waiting: Callable[[], Any]) -> None:
        while self._thread.is_alive():
            while_waiting()
            self._thread.join(0.1)

    def abandon(self) -> None:
        pass

    def _run(self) -> None:
        while (task := self.group.broadcast_object("upload", None)) is not None:
            samples, name = task[0], RemoteName.parse(task[1])
            assert name is not None
            folder = self.workdir / CHECKPOINTS
            path = folder / str(samples) if self.complete_here else folder / f"{UNFINISHED}{samples}"
            self.group.all_gather_object("uploaded", upload_part(self.remote, name, path, group=self.group))


def _run_files(workdir: Path, leave_out: Callable[[OSError, str], Any]) -> list[str]:
    """Names of the files of a run directory that are uploaded; the result comes after the log that it summarizes.

    leave_out: called with the error and the name of a folder that cannot be listed.
    """
    names: list[str] = []
    for top in (".", *FOLDERS, PROFILE):
        walk = os.walk(workdir / top, onerror=lambda error: leave_out(error, os.path.relpath(error.filename, workdir)))
        for folder, _, files in walk:
            names += [os.path.relpath(Path(folder, file), workdir) for file in files if not file.startswith(".")]
            if top != PROFILE:
                break
    return sorted(names, key=lambda name: (name == RESULT, name))


def upload_part(remote: RemoteRun, name: RemoteName, path: Path, *, group: ProcessGroup) -> str | None:
    """Upload the files of the checkpoint at `path` that this process has written; returns why that failed."""
    try:
        for file in state_files(path, group.rank, group.num_processes):
            remote.location.upload(path / file, name.path(file))
    except Exception as error:  # any: rank 0 waits for the answer
        return first_line(error)
    return None
