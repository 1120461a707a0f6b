"""A run in object storage: its files, and its checkpoints, which are complete once their manifest is there.

Objects below the URL of a run:

    config.json, metrics.jsonl, ...               files of the run directory
    checkpoints/SAMPLES.LEASE.NUMBER/state/...    a checkpoint, saved as the NUMBER-th under a lease
    checkpoints/SAMPLES.LEASE.NUMBER/metrics.jsonl, then manifest.json
    .lease/NUMBER.json                            see `jaxdp.storage.lease`

No two processes write objects of the same name, except for files of the run directory. A checkpoint counts if it was saved
under the newest lease, or was there just after that lease began: what a process writes after another one has taken over is
ignored. A run directory that was copied to a URL, whose checkpoints are named by their samples alone, can be read and continued
too.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from jaxdp.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, parse_manifest, verify_files
from jaxdp.files import CHECKPOINTS, LOG, RESULT
from jaxdp.storage.lease import LeaseRecord, newest_lease
from jaxdp.storage.location import Location, ObjectNotFoundError

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


def _counts(name: RemoteName, lease: LeaseRecord) -> bool:
    return name.lease == lease.number or str(name) in (lease.adopted or [])


class RemoteRun:
    """Reads a run in object storage, and writes it if the caller holds its lease. Every method raises StorageError."""

    def __init__(self, location: Location) -> None:
        self.location = location

    def newest_lease(self) -> LeaseRecord | None:
        return newest_lease(self.location)

    def files(self, lease: LeaseRecord | None) -> dict[str, int]:
        """Name -> bytes of the files of the run directory, without checkpoints. The result counts if its run has ended."""
        files = self.location.top_sizes()
        for folder in FOLDERS:
            files |= self.location.sizes(folder)
        if lease is not None and RESULT not in lease.final:
            files.pop(RESULT, None)
        return {name: size for name, size in files.items() if not name.startswith(".")}

    def checkpoints(self, lease: LeaseRecord | None) -> list[RemoteName]:
        """The complete checkpoints that count under a lease, newest first; of those with the same samples only the newest."""
        objects = self._objects()
        complete = [name for name, files in objects.items() if MANIFEST in files and REJECTED not in files]
        counted = complete if lease is None or lease.adopted is None else [name for name in complete if _counts(name, lease)]
        newest = {name.samples: name for name in sorted(counted)}
        return sorted(newest.values(), reverse=True)

    def remove_others(self, kept: Iterable[RemoteName], *, lease: LeaseRecord) -> None:
        """Remove the checkpoints of older leases but `kept` and rejected ones: incomplete ones, and those that do not count."""
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

    def download_log(self, checkpoint: RemoteName, folder: Path) -> None:
        """Download the log that was uploaded with a checkpoint, if there is one."""
        with suppress(ObjectNotFoundError):
            (folder / LOG).write_bytes(self.location.read_intact(checkpoint.path(LOG)))
