"""Saving checkpoints in the background and restoring the newest valid one."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from jaxdp.checkpoint.checksums import Parts, describe_arrays, diverged_devices, local_parts, part_checksums
from jaxdp.checkpoint.listing import checkpoint_paths, latest_valid, quarantine, read_manifests, remove
from jaxdp.checkpoint.manifest import (
    CorruptCheckpoint,
    Manifest,
    UnreadableCheckpoint,
    file_checksum,
    is_checkpoint_name,
    read_manifest,
    state_files,
    write_manifest,
)
from jaxdp.checkpoint.orbax_io import (
    CheckpointMismatch,
    all_finite,
    copy_to_host,
    load_state,
    make_writer,
    part_folder,
    save_error,
    silence_orbax,
    write_state,
)
from jaxdp.checkpoint.replicas import StateReport, rejection_reason
from jaxdp.checkpoint.retention import Retention
from jaxdp.config import Checkpoint as CheckpointConfig
from jaxdp.config import Stop
from jaxdp.distributed.process_group import ProcessGroup, SingleProcess
from jaxdp.errors import TrainingError

UNFINISHED = "saving-"  # prefix of directories that are being written or removed
SAVING_THREAD = "checkpoint"  # prefix of the names of threads that write
SUSPECT = "suspect"  # suffix of checkpoints that may contain a wrong gradient


class Rollback(NamedTuple):
    """Result of `CheckpointManager.quarantine_unaudited`.

    checkpoint: the checkpoint to continue from; None to start over. quarantined: new paths of the newer checkpoints. failures:
    those that could not be renamed, with the reason.
    """

    checkpoint: Path | None
    quarantined: list[Path]
    failures: list[str]


class Uploader(Protocol):
    """Uploads checkpoints. All processes call it alike, but for `reject`, which only rank 0 calls.

    complete_here: whether all processes write to one directory; otherwise their parts reach rank 0's later.
    """

    complete_here: bool

    def enqueue(self, samples: int) -> None:
        """Upload the checkpoint of `samples` samples, which is complete. Called in the saving thread."""

    def reject(self, *, after: int, reason: str) -> None:
        """Mark the checkpoints of more than `after` samples as not to be used."""


class Replicas(NamedTuple):
    """diverged: this process's devices whose parameters differ from most of their replicas. parts: see `local_parts`."""

    diverged: list[jax.Device]
    parts: Parts


# The last save in each folder by this process, which may outlive its run if a second signal ended that.
_last_saves: dict[Path, Future] = {}


class CheckpointManager:
    """Saves, restores and removes the checkpoints of one run in `folder`.

    All processes of the group write; rank 0 completes, removes and reports. In a run of one process a failed save is reported
    and the run continues; with several processes it ends the run, because a disk that is full for one would block all of them.

    info: called with each message for the user. uploader: told of complete and of quarantined checkpoints. metric: the best
    checkpoint by it is kept. last_error: why the last save failed; None if it succeeded.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        info: Callable[[str], Any],
        *,
        group: ProcessGroup | None = None,
        uploader: Uploader | None = None,
        metric: str = Stop.metric,
    ) -> None:
        self.folder, self.info, self.group, self.uploader = folder, info, group or SingleProcess(), uploader
        self.retention = Retention(config.keep, metric)
        self.last_error: str | None = None
        self._rejection: TrainingError | None = None
        self._host_state: Any = None  # host memory that every save reuses
        self._pending: Future | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=SAVING_THREAD)
        silence_orbax()
        if self.group.num_processes == 1 and (unfinished := _last_saves.pop(folder.absolute(), None)):
            wait([unfinished])
        self._writer = make_writer(self.group.rank, self.group.num_processes)

    def save(
        self,
        state: Any,
        samples: int,
        metadata: dict,
        *,
        placed: Any = None,
        before_manifest: Callable[[], None] = lambda: None,
    ) -> None:
        """Start saving a replicated state; returns when it has been copied from the devices.

        Waits for the previous save. metadata: see `Manifest`. placed: the state as the step has it on the devices, whole or in
        shards, whose replicas are compared (None: `state`). before_manifest: called on rank 0 before the manifest is written,
        for files that must be on the disk when the checkpoint is.
        """
        self.wait()
        placed = state if placed is None else placed
        parts = local_parts(placed)
        # Shards are few bytes: all are compared. Of a state that is whole on every device, the parameters.
        compared = placed if parts.numbers else getattr(placed, "params", placed)
        replicas = Replicas(diverged_devices(compared), parts)
        self._host_state = copy_to_host(state, self._host_state)
        self._pending = self._thread.submit(
            self._save, self._host_state, samples, metadata, replicas=replicas, before_manifest=before_manifest
        )
        _last_saves[self.folder.absolute()] = self._pending

    def wait(self) -> None:
        """Wait for the save in progress, if any."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress."""
        return self._pending is not None and not self._pending.done()

    def check(self) -> None:
        """Raise the TrainingError of a save that rejected the state."""
        if self._rejection:
            raise self._rejection

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.group.is_rank0 and (self._pending is None or self._pending.done()):
            self._clean_up()

    def restore(self, abstract_state_of: Callable[[int], Any]) -> tuple[Any, Manifest] | None:
        """(state, manifest) of the newest valid checkpoint; None if the folder holds no checkpoint.

        abstract_state_of: maps samples to the tree that `load_state` expects. Rank 0 chooses the checkpoint. It renames corrupt
        ones and removes what an interrupted save left. Raises TrainingError if all checkpoints are corrupt, CheckpointMismatch
        if the newest one has other arrays.
        """
        restored = self._restore_newest(abstract_state_of) if self.group.is_rank0 else None
        samples = self.group.broadcast_object("restored checkpoint", restored[1].samples if restored else None)
        if restored or samples is None:
            return restored
        try:
            manifest = read_manifest(self.folder / str(samples))
            return load_state(manifest, abstract_state_of(samples)), manifest
        except (CorruptCheckpoint, CheckpointMismatch) as error:
            rank = self.group.rank
            raise TrainingError(f"{error} (on rank {rank}, host {self.group.hosts[rank]}; rank 0 could read it)") from None

    def _restore_newest(self, abstract_state_of: Callable[[int], Any]) -> tuple[Any, Manifest] | None:
        corrupt = []
        self._clean_up()
        for path in checkpoint_paths(self.folder):
            try:
                manifest = read_manifest(path)
                state = load_state(manifest, abstract_state_of(manifest.samples))
            except CorruptCheckpoint as error:
                corrupt.append((path, str(error)))
                continue
            for bad_path, reason in corrupt:
                self.info(f"skipped the checkpoint of samples {bad_path.name}: {reason}; renamed to {quarantine(bad_path)}")
            return state, manifest
        if corrupt:
            errors = "; ".join(reason for _, reason in corrupt)
            raise TrainingError(f"no checkpoint in {self.folder} is valid ({errors}); to start over, use --resume never")
        return None

    def latest_valid(self, max_samples: int | None = None) -> Manifest | None:
        """The newest checkpoint of at most `max_samples` samples whose files are intact, without those of other processes if
        they write elsewhere; None if there is none."""
        complete_here = self.uploader is None or self.uploader.complete_here
        own = "" if complete_here else f"{part_folder(self.group.rank, self.group.num_processes)}/"
        return latest_valid(self.folder, max_samples, below=own)

    def retain_latest(self, max_samples: int) -> Manifest | None:
        """Never remove the newest valid checkpoint of at most `max_samples` samples; returns it, or None if there is none."""
        manifest = self.latest_valid(max_samples)
        if manifest:
            self.retention.retain(manifest.samples)
        return manifest

    def mark_audited(self) -> int | None:
        """Keep the newest checkpoint until the next audit passes. Returns its samples; None if there is no checkpoint."""
        newest = next(read_manifests(self.folder), None)
        self.retention.mark_audited(newest.samples if newest else None)
        return self.retention.audited

    def quarantine_unaudited(self) -> Rollback:
        """Rename all checkpoints after the last audit that passed to NAME.suspect. Only rank 0 calls this.

        If no audit has passed, the checkpoint that this session started from is the last one to trust.
        """
        samples = self.retention.rollback_samples
        trusted = None if samples is None else self.latest_valid(samples)
        quarantined, failures = [], []
        for path in checkpoint_paths(self.folder):
            if trusted is None or int(path.name) > trusted.samples:
                try:
                    quarantined.append(quarantine(path, SUSPECT))
                except OSError as error:
                    failures.append(f"{path} ({error.strerror})")
        if self.uploader:
            after = trusted.samples if trusted else samples  # which may be only at the URL
            self.uploader.reject(after=-1 if after is None else after, reason="it was saved after the last audit that passed")
        return Rollback(trusted.path if trusted else None, quarantined, failures)

    # The following methods run in the saving thread.

    def _save(self, host_state: Any, samples: int, metadata: dict, **options: Any) -> None:
        """Report what is being saved while `_check_and_write` saves it."""
        self.group.set_background_save(f"the checkpoint of {samples} samples")
        try:
            self._check_and_write(host_state, samples, metadata, **options)
        finally:
            self.group.set_background_save("")

    def _check_and_write(
        self,
        host_state: Any,
        samples: int,
        metadata: dict,
        *,
        replicas: Replicas,
        before_manifest: Callable[[], None],
    ) -> None:
        """Check the state on all processes, write it, complete the checkpoint, and remove expired ones."""
        path, group = self.folder / f"{UNFINISHED}{samples}", self.group
        arrays, checksum, error = self._prepare(path, host_state)
        report = StateReport(
            diverged=[str(device) for device in replicas.diverged],
            finite=all_finite(getattr(host_state, "params", host_state)),
            checksum=checksum,
            part_checksums=part_checksums(host_state, replicas.parts) if group.num_processes > 1 else {},
            error=error,
            bad_images=metadata.get("progress", {}).get("bad_images", {}),
        )
        reports = [StateReport(**fields) for fields in group.all_gather_object("ready to save", dataclasses.asdict(report))]
        if reason := rejection_reason(samples, reports, group.hosts):
            remove(path)
            self._rejection = TrainingError(reason)
            return
        error = next((report.error for report in reports if report.error), None)
        files: dict[str, list] = {}
        if error is None:
            files, error = self._write(path, host_state)
        if group.is_rank0 and error is None:
            bad_images = {name: reason for report in reports for name, reason in report.bad_images.items()}
            if bad_images:
                metadata = metadata | {"progress": metadata["progress"] | {"bad_images": bad_images}}
            manifest = Manifest(path, samples, metadata, arrays, files, parts=group.num_processes)
            error = self._complete(manifest, before_manifest)
        self.last_error = error = group.broadcast_object("manifest", error)
        if error is None:
            group.set_resume_hint(f"the same command continues from {self.folder / str(samples)}")
            if self.uploader:
                self.uploader.enqueue(samples)
        elif group.is_rank0:
            self._abandon(path, error)

    def _prepare(self, path: Path, host_state: Any) -> tuple[dict[str, list], str | None, str | None]:
        """Make the directory and compute (descriptions of all arrays, their checksum, error)."""
        try:
            if self.group.is_rank0:
                self._clean_up()
                path.mkdir(parents=True)
            arrays = describe_arrays(host_state)
            return arrays, hashlib.sha256(json.dumps(arrays).encode()).hexdigest(), None
        except Exception as error:  # its type depends on the file system
            return {}, None, save_error(error)

    def _write(self, path: Path, host_state: Any) -> tuple[dict[str, list], str | None]:
        """Write this process's part of the arrays; returns (checksums of all files, first error of any process)."""
        rank, processes = self.group.rank, self.group.num_processes
        error, files = None, {}
        try:
            write_state(self._writer, path, host_state, part=rank, parts=processes)
            files = {name: file_checksum(path / name) for name in state_files(path, part_folder(rank, processes))}
        except Exception as failure:  # for example a full disk
            error = save_error(failure)
            if processes > 1:
                self._abort(path, error)
        reports = self.group.all_gather_object("written", (files, error))
        error = next((error for _, error in reports if error), None)
        return {name: checksum for files, _ in reports for name, checksum in files.items()}, error

    def _complete(self, manifest: Manifest, before_manifest: Callable[[], None]) -> str | None:
        """Write the manifest and rename the directory to its final name; returns the error if that fails."""
        path = manifest.path
        try:
            before_manifest()
            write_manifest(manifest)
            final = self.folder / str(manifest.samples)
            if os.path.lexists(final):  # of the same samples, saved before their evaluation
                replaced = _rename_for_removal(final)
                path.rename(final)
                remove(replaced)
            else:
                path.rename(final)
        except Exception as error:  # for example a full disk
            return save_error(error)
        with contextlib.suppress(OSError):  # retried after the next save
            for manifest in self.retention.expired(list(read_manifests(self.folder))):
                remove(_rename_for_removal(manifest.path))
        return None

    def _abort(self, path: Path, error: str) -> None:
        """End all processes after a failed write of this process's part. The next run removes the parts of the others.

        They may be writing still: without their folders they would fail first, and report that in place of the cause.
        """
        folder = path / part_folder(self.group.rank, self.group.num_processes)
        with contextlib.suppress(OSError):
            for own in [folder, *folder.parent.glob(f"{folder.name}.*")]:  # with the temporary folders of Orbax
                remove(own)
        self.group.abort(_save_message(path, error))

    def _abandon(self, path: Path, error: str) -> None:
        """Remove a failed save that no process writes any more. A single process continues without it; several end."""
        remove(path)
        message = _save_message(path, error)
        if self.group.num_processes > 1:
            self.group.abort(message)
        latest = self.latest_valid()
        kept = f"the checkpoint {latest.path} is kept" if latest else "there is no other checkpoint yet"
        self.info(f"{message}; training continues, and {kept}")

    def _clean_up(self) -> None:
        """Remove what interrupted or failed saves left; Orbax may write for a moment after a failure.

        A save that was interrupted between its manifest and its final name is completed.
        """
        for path in self.folder.glob(f"{UNFINISHED}*"):
            name = path.name.removeprefix(UNFINISHED)
            if is_checkpoint_name(name) and not os.path.lexists(self.folder / name):
                with contextlib.suppress(CorruptCheckpoint, UnreadableCheckpoint, OSError):
                    if read_manifest(path).samples == int(name):
                        path.rename(self.folder / name)
        for path in self.folder.glob(f"{UNFINISHED}*"):
            remove(path)


def _save_message(path: Path, error: str) -> str:
    return f"the checkpoint {path} could not be saved ({error})"


def _rename_for_removal(path: Path) -> Path:
    """Rename a checkpoint, so that `_clean_up` removes it if this process is interrupted before it does."""
    target = path.with_name(f"{UNFINISHED}{path.name}-replaced")
    remove(target)
    path.rename(target)
    return target
