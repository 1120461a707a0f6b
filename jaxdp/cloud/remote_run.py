"""A run in object storage: its files, and its checkpoints, which are complete once they have a manifest.

Objects below the URL of a run:

    config.json, metrics.jsonl, ...               files of the run directory
    checkpoints/SAMPLES.LEASE.NUMBER/state/...    a checkpoint, saved as the NUMBER-th under a lease
    checkpoints/SAMPLES.LEASE.NUMBER/metrics.jsonl, then manifest.json
    .lease/NUMBER.json                            see `jaxdp.cloud.lease`

No two processes write objects of the same name, except for files of the run directory. A checkpoint counts if it was saved
under the newest lease, or was there just after that lease began. What a process writes after another one has taken over is
ignored. A run directory that was copied to a URL can be read and continued too: its checkpoints are named by their samples
alone.
"""

import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from jaxdp.checkpoint.listing import CHECKPOINT_NAMES, candidates
from jaxdp.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, parse_manifest, verify_files
from jaxdp.cloud.lease import LeaseHeld, LeaseRecord, newest_lease, wait_until_free
from jaxdp.cloud.location import Location, ObjectNotFoundError, open_location, storage_errors
from jaxdp.cloud.retry import open_patiently
from jaxdp.config import Config
from jaxdp.distributed import status
from jaxdp.errors import ConfigError, print_safe
from jaxdp.files import CHECKPOINTS, CONFIG, LOG, RESULT

REJECTED = "rejected"  # object in a checkpoint that must not be used: it is corrupt, or may contain a wrong gradient
FOLDERS = ("tensorboard", "trackers")  # that a run continues, besides the files at the top
_NAME = re.compile(r"(0|[1-9]\d*)(?:\.(\d+)\.(\d+))?")


@dataclass(frozen=True, order=True)
class RemoteName:
    """The name of a checkpoint in object storage, ordered by age: samples, number of the lease, number of the save."""

    samples: int
    lease: int = 0
    number: int = 0

    @classmethod
    def parse(cls, name: str) -> "RemoteName | None":
        match = _NAME.fullmatch(name)
        return cls(*(int(group or 0) for group in match.groups())) if match else None

    def __str__(self) -> str:
        return f"{self.samples}.{self.lease}.{self.number}" if self.lease else str(self.samples)

    def path(self, name: str = "") -> str:
        return f"{CHECKPOINTS}/{self}/{name}" if name else f"{CHECKPOINTS}/{self}"


class RemoteRun:
    """Reads a run in object storage, and writes it if the caller holds its lease. Every method raises StorageError."""

    def __init__(self, location: Location) -> None:
        self.location = location

    def holder(self) -> tuple[LeaseRecord | None, str]:
        """(the newest lease, its state): held, free (released, or never taken), or lost (the holder no longer renews it).

        If the lease was not released, this waits for a renewal, for up to the `seconds` of the lease.
        """
        lease = newest_lease(self.location)
        if lease is None or lease.released:
            return lease, "free"
        print_safe(waiting_notice(self.location.url, lease), sys.stderr)
        try:
            lease = wait_until_free(self.location, lease)
        except LeaseHeld as error:
            return error.lease, "held"
        return lease, "free" if lease.released else "lost"

    def files(self, lease: LeaseRecord | None) -> dict[str, int]:
        """Name -> bytes of the files of the run directory, without checkpoints. The result is included if its run has ended."""
        files = self.location.top_sizes()
        for folder in FOLDERS:
            files |= self.location.sizes(folder)
        if lease is not None and RESULT not in lease.final:
            files.pop(RESULT, None)
        return {name: size for name, size in files.items() if not name.startswith(".")}

    def checkpoints(self, lease: LeaseRecord | None) -> list[RemoteName]:
        """The complete checkpoints that count under a lease, newest first; for the same samples, only the newest."""
        objects = self._objects()
        complete = [name for name, files in objects.items() if MANIFEST in files and REJECTED not in files]
        if lease is not None and lease.adopted is not None:
            complete = [name for name in complete if name.lease == lease.number or str(name) in lease.adopted]
        newest = {name.samples: name for name in sorted(complete)}
        return sorted(newest.values(), reverse=True)

    def remove_others(self, kept: Iterable[RemoteName], *, lease: LeaseRecord) -> None:
        """Remove the checkpoints of older leases that are incomplete or do not count: all except `kept` and rejected ones."""
        kept = {*kept}
        for name, files in self._objects().items():
            if name.lease < lease.number and name not in kept and REJECTED not in files:
                self.remove(name, files)

    def _objects(self) -> dict[RemoteName, list[str]]:
        """Checkpoint -> names of its objects."""
        objects: dict[RemoteName, list[str]] = {}
        for path in self.location.sizes(CHECKPOINTS):
            folder, _, name = path.removeprefix(f"{CHECKPOINTS}/").partition("/")
            if name and (checkpoint := RemoteName.parse(folder)):
                objects.setdefault(checkpoint, []).append(name)
        return objects

    def remove(self, checkpoint: RemoteName, files: Iterable[str] | None = None) -> None:
        """Remove a checkpoint, its manifest first. files: names of its objects, if known."""
        names = self.location.sizes(checkpoint.path()) if files is None else [checkpoint.path(name) for name in files]
        self.location.remove(sorted(names, key=lambda name: (name != checkpoint.path(MANIFEST), name)))

    def reject(self, checkpoint: RemoteName, reason: str) -> None:
        """Mark a checkpoint as not to be used; it is kept for inspection."""
        self.location.write(checkpoint.path(REJECTED), reason.encode())

    def read_manifest(self, checkpoint: RemoteName) -> Manifest:
        """The manifest of a checkpoint. Raises CorruptCheckpoint."""
        text = self.location.read_intact(checkpoint.path(MANIFEST))
        url = self.url_of(checkpoint)
        try:
            return replace(parse_manifest(text, Path(str(checkpoint.samples))), url=url)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(str(error).replace(str(checkpoint.samples), url, 1)) from None

    def url_of(self, checkpoint: RemoteName) -> str:
        return f"{self.location.url}/{checkpoint.path()}"

    def manifests(self, lease: LeaseRecord | None) -> dict[RemoteName, Manifest | str]:
        """The manifest, or the error as text, of each complete checkpoint under a lease, newest first."""
        manifests: dict[RemoteName, Manifest | str] = {}
        for name in self.checkpoints(lease):
            try:
                manifests[name] = self.read_manifest(name)
            except CorruptCheckpoint as error:
                manifests[name] = str(error)
            except ObjectNotFoundError:  # removed meanwhile by a training process
                pass
        return manifests

    def download_checkpoint(self, checkpoint: RemoteName, folder: Path) -> Manifest:
        """Download a checkpoint to `folder`/SAMPLES, which appears when it is complete and matches its manifest.

        Raises CorruptCheckpoint if it is corrupt in two downloads or an object is missing, and OSError for errors of the local
        disk.
        """
        try:
            with suppress(CorruptCheckpoint):
                return self._download_checkpoint(checkpoint, folder)
            return self._download_checkpoint(checkpoint, folder)
        except ObjectNotFoundError as error:
            raise CorruptCheckpoint(f"{self.url_of(checkpoint)} is corrupt: {error.filename} is missing") from None

    def _download_checkpoint(self, checkpoint: RemoteName, folder: Path) -> Manifest:
        manifest = self.read_manifest(checkpoint)
        partial, target = folder / f"saving-{checkpoint.samples}-download", folder / str(checkpoint.samples)
        for name in manifest.files:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
        for name in (*manifest.files, MANIFEST):
            self.location.download(checkpoint.path(name), partial / name)
        manifest = replace(manifest, path=partial)
        try:
            verify_files(manifest)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(str(error).replace(str(partial), manifest.location)) from None
        partial.rename(target)
        return replace(manifest, path=target)

    def download_file(self, name: str, folder: Path) -> None:
        """Download a file of the run directory."""
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(self.location.read_intact(name))

    def download_files(self, names: Iterable[str], folder: Path, *, lease: LeaseRecord | None) -> None:
        """Download the named files of the run directory that exist under a lease."""
        files = self.files(lease)
        for name in names:
            if name in files:
                self.download_file(name, folder)

    def download_log(self, checkpoint: RemoteName, folder: Path) -> None:
        """Download the log that was uploaded with a checkpoint, if there is one."""
        with suppress(ObjectNotFoundError):
            (folder / LOG).write_bytes(self.location.read_intact(checkpoint.path(LOG)))


def read_run_file(url: str, name: str, field: str = "--workdir") -> bytes | None:
    """A file of the run at a URL, None if it does not exist. Raises ConfigError."""
    with storage_errors(url, field):
        try:
            return open_patiently(url, field).read_intact(name)
        except ObjectNotFoundError:
            return None


def waiting_notice(url: str, lease: LeaseRecord) -> str:
    return f"{url} was in use by {lease.holder}; waiting up to {lease.seconds:.0f} s to see whether it still is"


def download_run_files(url: str, folder: Path, *, names: tuple[str, ...], field: str) -> None:
    """Download the files of the run at a URL that exist. Raises ConfigError."""
    with storage_errors(url, field):
        remote = RemoteRun(open_patiently(url, field))
        remote.download_files(names, folder, lease=newest_lease(remote.location))


def list_manifests(url: str, field: str = "--workdir") -> tuple[RemoteRun, dict[RemoteName, Manifest | str]]:
    """(run, manifest of each complete checkpoint, newest first, or the error as text). Raises ConfigError."""
    with storage_errors(url, field):
        remote = RemoteRun(open_patiently(url, field))
        return remote, remote.manifests(newest_lease(remote.location))


def download_checkpoint(
    url: str, field: str, folder: Path, *, checkpoint: str = "newest", metric: str = Config().first_metric
) -> Manifest:
    """Download a checkpoint of the run at a URL, with the log of the run, to `folder`/checkpoints and verify it.

    url: of the run, or of one of its checkpoints, by its name or its number of samples. checkpoint: result (the newest, or with
    early stopping the best that the newest one records), newest, best (by `metric`), or its number of samples. A name skips
    corrupt checkpoints and reports them on stderr. Raises ConfigError if there is no such checkpoint.
    """
    run, _, last = url.rstrip("/").rpartition(f"/{CHECKPOINTS}/")
    named = RemoteName.parse(last) if run else None
    remote, manifests = list_manifests(run if named else url, field)
    if not manifests and CONFIG not in remote.location.top_sizes():
        raise ConfigError(field, url, reason=f"it holds no run (no {CONFIG})")
    is_one, errors = named is not None or checkpoint not in CHECKPOINT_NAMES, list[str]()
    for name in _chosen(manifests, checkpoint=checkpoint, named=named, metric=metric):
        try:
            if isinstance(found := manifests[name], str):
                raise CorruptCheckpoint(found)
            with storage_errors(url, field):
                manifest = remote.download_checkpoint(name, folder / CHECKPOINTS)
                remote.download_log(name, folder)
        except CorruptCheckpoint as error:
            with storage_errors(url, field):
                was_removed = not remote.location.sizes(name.path(MANIFEST))
            if was_removed and not named:  # by a training process, which keeps newer ones
                return download_checkpoint(url, field, folder, checkpoint=checkpoint, metric=metric)
            if is_one:
                raise ConfigError("--checkpoint", str(name.samples), reason=str(error), hint="use another checkpoint") from None
            errors.append(str(error))
        else:
            if errors:
                message = f"jaxdp: using {manifest.location} instead of the {checkpoint} checkpoint: {'; '.join(errors)}"
                print_safe(message, sys.stderr)
            return manifest
    if is_one:
        available = ", ".join(str(name.samples) for name in manifests) or "none"
        wanted, hint = str(named) if named else checkpoint, f"use {', '.join(CHECKPOINT_NAMES)}, or one of: {available}"
        raise ConfigError("--checkpoint", wanted, reason="checkpoint not found", hint=hint)
    raise ConfigError(field, url, reason="no valid checkpoint found", hint="list them with `jaxdp checkpoints`")


def _chosen(
    manifests: dict[RemoteName, Manifest | str], *, checkpoint: str, named: RemoteName | None, metric: str
) -> list[RemoteName]:
    """The checkpoints to try, in order."""
    if named:
        return [name for name in manifests if name == named or (not named.lease and name.samples == named.samples)]
    if checkpoint not in CHECKPOINT_NAMES:
        return [name for name in manifests if str(name.samples) == checkpoint]
    by_samples = {name.samples: name for name in manifests}
    order = candidates({name.samples: found for name, found in manifests.items()}, checkpoint, metric)
    return [by_samples[samples] for samples in order if samples in by_samples]


class RemoteBoard:
    """A `Board` of `jaxdp.distributed.status`. Requests cost time and money, so there are fewer than in a directory."""

    period_seconds, poll_seconds = 2.0, 0.5

    def __init__(self, url: str) -> None:
        self.location, self.name = open_location(url, "--workdir"), f"{url}/{status.FOLDER}"

    def write(self, name: str, text: str) -> None:
        self.location.write(f"{status.FOLDER}/{name}", text.encode())

    def read(self, name: str) -> str | None:
        try:
            return self.location.read(f"{status.FOLDER}/{name}").decode(errors="replace")
        except ObjectNotFoundError:
            return None
