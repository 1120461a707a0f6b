"""The local copy of a run whose working directory is a URL: held by a lease, filled from the URL, and mirrored to it."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxdp.checkpoint.listing import checkpoint_paths
from jaxdp.checkpoint.manifest import CorruptCheckpoint
from jaxdp.cloud.lease import Lease, LeaseHeld, LeaseLost, LeaseRecord, newest_lease
from jaxdp.cloud.local import run_copy
from jaxdp.cloud.location import PROTOCOLS, Location, open_location, storage_errors
from jaxdp.cloud.mirror import Mirror, MirrorFollower
from jaxdp.cloud.remote_run import FOLDERS, RemoteName, RemoteRun, waiting_notice
from jaxdp.cloud.retry import open_patiently
from jaxdp.config import Storage
from jaxdp.distributed.signal_handler import ForcedStop, SignalHandler
from jaxdp.errors import ConfigError, StorageError, TrainingError
from jaxdp.files import CHECKPOINTS, CONFIG, read_text, write_atomically

FIELD = "--workdir"
UPLOAD_SECONDS = 30.0  # between uploads of the log: few requests, and as fresh as `jaxdp watch` needs it
LEASE_SECONDS = 60.0  # without renewal, after which another process may take over: longer than usual outages
CONTINUED = (".json", ".jsonl")  # endings of files that the local copy of a run has
STATE = "copy.json"  # beside the local copy: the token of the lease that it was made under, and whether it is complete
Lock = Callable[[Path], AbstractContextManager]


@contextmanager
def open_remote_workdir(
    url: str, storage: Storage, *, start_new: bool, signals: SignalHandler, lock: Lock, info: Callable[[str], Any]
) -> Iterator[Mirror | MirrorFollower]:
    """Hold the run at a URL, and upload it from its local copy, the mirror's `workdir`, until the caller has ended.

    lock: holds a local directory for this process. start_new: take NAME-2, NAME-3, ... if the URL holds a run. All processes
    call this. Raises ConfigError if the URL cannot be read or written, or if another process trains there, and TrainingError if
    the last uploads fail.
    """
    group = signals.group
    with ExitStack() as stack:
        holder = _Holder(url, storage, signals=signals, lock=lock, info=info)
        if group.is_rank0:
            signals.run_in_thread(holder.acquire, start_new, stack)
        url, token = group.broadcast_object("run at a URL", [holder.url, holder.token])
        path = run_copy(storage, url)
        shares = group.is_rank0 or _read_state(path).get("token") == token
        complete_here = all(group.all_gather_object("shared local copy", shares))
        name = None
        if group.is_rank0:
            try:
                name = signals.run_in_thread(holder.fill, complete_here)
            except BaseException:
                holder.give_back()
                raise
        word = group.broadcast_object("checkpoint at a URL", name and str(name))
        if not shares:
            path = path.with_name(f"{path.name}-rank-{group.rank}")
            signals.run_in_thread(_download_checkpoint, url, word, path)
        remote = RemoteRun(open_location(url, FIELD))  # without patience: a mirror repeats failed uploads itself
        mirror: Mirror | MirrorFollower
        if holder.lease is None:
            mirror = MirrorFollower(remote, path, group=group, shares_directory=shares)
        else:
            every = UPLOAD_SECONDS
            mirror = Mirror(remote, path, holder.lease, group=group, complete_here=complete_here, every_seconds=every)
        try:
            yield mirror
        except ForcedStop:
            mirror.abandon()
            raise
        except BaseException:
            try:
                mirror.close(group.status.record_progress)
            except TrainingError as error:
                info(str(error))
            raise
        group.set_activity("finish", detail="uploading")
        mirror.close(group.status.record_progress)


def _download_checkpoint(url: str, name: str | None, path: Path) -> None:
    """Fill the local copy of a process that does not see rank 0's copy. name: the checkpoint to continue from, if any."""
    shutil.rmtree(path, ignore_errors=True)
    if (checkpoint := RemoteName.parse(name or "")) is not None:
        try:
            with storage_errors(url, FIELD):
                RemoteRun(open_patiently(url, FIELD)).download_checkpoint(checkpoint, path / CHECKPOINTS)
        except CorruptCheckpoint as error:  # rank 0 has verified it
            raise TrainingError(str(error)) from None


class _Holder:
    """Rank 0's part: acquires the lease and fills the local copy. The fields are set by `acquire`."""

    def __init__(self, url: str, storage: Storage, *, signals: SignalHandler, lock: Lock, info: Callable[[str], Any]) -> None:
        self.url, self.storage, self.signals, self.lock, self.info = url, storage, signals, lock, info
        self.token = ""
        self.lease: Lease | None = None
        self._previous: LeaseRecord | None = None
        self._is_same_copy = False

    def acquire(self, start_new: bool, stack: ExitStack) -> None:
        """Lock the local copy and acquire the lease. stack: receives the lock."""
        location = self._open(self.url)
        if location.url.partition(":")[0] in PROTOCOLS and "/" not in location.path:
            raise ConfigError(FIELD, self.url, reason="it names no folder in the bucket", hint=f"use {location.url}/runs/NAME")
        with storage_errors(self.url, FIELD):
            if start_new:
                location = self._next_free(location)
            self.url, self.remote = location.url, RemoteRun(location)
            self.path = run_copy(self.storage, self.url)
            try:
                stack.enter_context(self.lock(_state_folder(self.path)))
            except ConfigError as error:
                raise ConfigError(FIELD, self.url, reason=error.reason, hint=error.hint) from None
            state = _read_state(self.path)
            try:
                self.lease = Lease.acquire(
                    location,
                    LEASE_SECONDS,
                    token=state.get("token"),
                    adopt=self._adopt,
                    on_wait=lambda lease: self.info(waiting_notice(self.url, lease)),
                    while_waiting=self._check_stop,
                )
            except LeaseHeld as error:
                reason = f"{error} is training there"
                raise ConfigError(FIELD, self.url, reason=reason, hint="stop it, or use another URL") from None
        if self.signals.stop_reason:  # the caller no longer waits for this thread
            self.give_back()
            self.signals.raise_if_signaled()
        self.token = self.lease.record.token
        same = self._previous is not None and self._previous.token == state.get("token")
        self._is_same_copy = same and bool(state.get("complete")) and self._is_ahead()
        _write_state(self.path, token=self.token, complete=self._is_same_copy)
        if not self.lease.is_exclusive:
            self.info(
                f"warning: {self.url} does not support conditional writes, so two runs that start there at the same moment may "
                "not notice each other"
            )

    def _open(self, url: str) -> Location:
        return open_patiently(url, FIELD, notice=self.info, while_waiting=self._check_stop)

    def _next_free(self, location: Location) -> Location:
        """The first of NAME, NAME-2, NAME-3, ... without a run."""
        urls = itertools.chain([location.url], (f"{location.url}-{number}" for number in itertools.count(2)))
        locations = map(self._open, urls)
        return next(place for place in locations if CONFIG not in place.top_sizes() and newest_lease(place) is None)

    def give_back(self) -> None:
        """Release the lease of a run that was not changed."""
        assert self.lease is not None
        with suppress(LeaseLost, StorageError):
            self.lease.release(self._previous.final if self._previous else {})

    def _adopt(self, previous: LeaseRecord | None) -> list[str]:
        self._previous = previous
        return [str(name) for name in self.remote.checkpoints(previous)]

    def _is_ahead(self) -> bool:
        """Whether the local copy holds a checkpoint at least as new as the newest at the URL."""
        assert self.lease is not None
        there = [name.samples for word in self.lease.record.adopted or [] if (name := RemoteName.parse(word))]
        here = [int(path.name) for path in checkpoint_paths(self.path / CHECKPOINTS)]
        return (self.path / CONFIG).exists() and max(here, default=-1) >= max(there, default=-1)

    def _check_stop(self) -> None:
        self.signals.group.status.record_progress()
        self.signals.raise_if_signaled()

    def fill(self, complete_here: bool) -> RemoteName | None:
        """Make the local copy match the URL; returns its newest checkpoint if it was downloaded, else None.

        A complete copy that this machine made under the last lease stays: it may be ahead of the URL. complete_here: whether
        all processes see this copy.
        """
        if self._is_same_copy and complete_here:
            self.info(f"{self.url} continues from its local copy in {self.path}")
            return None
        with storage_errors(self.url, FIELD):
            name = self._download()
        _write_state(self.path, token=self.token, complete=True)
        return name

    def _download(self) -> RemoteName | None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        files = self.remote.files(self._previous)
        if CONFIG in files:
            for file in files:
                if file.endswith(CONTINUED) or file.startswith(tuple(f"{folder}/" for folder in FOLDERS)):
                    self.remote.download_file(file, self.path)
        assert self.lease is not None
        adopted = [name for word in self.lease.record.adopted or [] if (name := RemoteName.parse(word))]
        valid, corrupt = [], []
        for name in sorted(adopted, reverse=True):
            self.signals.group.status.record_progress()
            try:
                self.remote.download_checkpoint(name, self.path / CHECKPOINTS)
                valid.append(name)
            except CorruptCheckpoint as error:
                corrupt.append((name, str(error)))
        if corrupt and not valid:
            reasons = "; ".join(reason for _, reason in corrupt)
            raise TrainingError(f"no checkpoint in {self.url} is valid ({reasons}); to start over, use --resume never")
        for name, reason in corrupt:
            self.info(f"skipped the checkpoint of samples {name.samples}: {reason}")
            self.remote.reject(name, reason)
        if not valid:
            return None
        self.remote.download_log(valid[0], self.path)
        self.info(f"downloaded {self.remote.url_of(valid[0])}")
        return valid[0]


def _state_folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.lease")


def _read_state(path: Path) -> dict:
    try:
        state = json.loads(read_text(_state_folder(path) / STATE))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _write_state(path: Path, *, token: str, complete: bool) -> None:
    write_atomically(_state_folder(path) / STATE, json.dumps({"token": token, "complete": complete}) + "\n")
