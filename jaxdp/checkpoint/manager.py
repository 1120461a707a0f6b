"""Saving checkpoints in the background and restoring the newest valid one."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxdp.checkpoint import orbax_io, replicas
from jaxdp.checkpoint.listing import (
    UNFINISHED,
    checkpoint_paths,
    latest_valid,
    quarantine,
    read_manifests,
    remove,
    rename_for_removal,
)
from jaxdp.checkpoint.manifest import (
    CheckpointError,
    CorruptCheckpoint,
    Manifest,
    file_checksum,
    part_folder,
    read_manifest,
    state_files,
    write_manifest,
)
from jaxdp.checkpoint.replicas import StateReport
from jaxdp.checkpoint.retention import Retention
from jaxdp.config import Checkpoint as CheckpointConfig
from jaxdp.config import Config
from jaxdp.distributed import status
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import TrainingError
from jaxdp.file_locks import file_system

TRIAL = "trial"  # in the name of a folder
SAVING_THREAD = "checkpoint"  # prefix of the names of threads that write


class Rollback(NamedTuple):
    """checkpoint: the one to continue from; None to start over. quarantined: new paths of the newer ones. failures:
    checkpoints that could not be renamed, with the reason."""

    checkpoint: Path | None
    quarantined: list[Path]
    failures: list[str]


class Uploader(Protocol):
    """complete_here: whether all processes write to one directory; otherwise parts reach rank 0's directory later."""

    complete_here: bool

    def enqueue(self, samples: int) -> None:
        """Upload the complete checkpoint of `samples` samples. All processes call this, in the saving thread."""

    def reject(self, *, after: int, reason: str) -> None:
        """Mark the checkpoints of more than `after` samples as rejected. Rank 0 alone calls this."""


_last_saves: dict[Path, Future] = {}  # by folder; a save may outlive its run if a second signal ended the run


class CheckpointManager:
    """Saves, restores and removes the checkpoints of one run in `folder`. All processes write; rank 0 completes and removes.

    A failed save is reported and the run continues; with several processes it ends the run. info: called with each message for
    the user. uploader: notified of complete and quarantined checkpoints. metric: its best checkpoint is kept. last_error: why
    the last save failed; None if it succeeded.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        info: Callable[[str], Any],
        *,
        group: ProcessGroup | None = None,
        uploader: Uploader | None = None,
        metric: str = Config().first_metric,
    ) -> None:
        self.folder, self.info, self.group, self.uploader = folder, info, group or ProcessGroup(), uploader
        self.retention = Retention(config.keep, metric)
        self.last_error: str | None = None
        self._rejection: TrainingError | None = None
        self._host_state: Any = None  # host memory that every save reuses
        self._pending: Future | None = None
        self._trial: Future | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=SAVING_THREAD)
        if self.group.num_processes == 1 and (unfinished := _last_saves.pop(folder.absolute(), None)):
            wait([unfinished])

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

        Waits for the previous save and raises its TrainingError if it rejected the state. metadata: see `Manifest`. placed: the
        state on the devices, whole or in shards, as the step uses it; its replicas are compared (None: `state`).
        before_manifest: called on rank 0 before the manifest is written, for files that must be on the disk by then.
        """
        self.wait()
        self.check()
        placed = state if placed is None else placed
        is_sharded = not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(placed))
        with status.current().waiting(status.DEVICES):
            # Shards have few bytes, so all are compared; of a whole state, only the parameters.
            diverged = replicas.diverged_devices(placed if is_sharded else getattr(placed, "params", placed))
            parts = replicas.part_checksums(placed) if self.group.num_processes > 1 else {}
            self._host_state = orbax_io.copy_to_host(state, self._host_state)
        report = StateReport([*map(str, diverged)], parts, metadata.get("progress", {}).get("bad_images", {}))
        self._pending = self._thread.submit(self._save, samples, metadata, report=report, before_manifest=before_manifest)
        _last_saves[self.folder.absolute()] = self._pending

    def try_save(self) -> None:
        """Start a save of a few bytes, which is removed again; see `check_trial`. All processes call this."""
        self._pending = self._trial = self._thread.submit(self._try_save)

    @status.current().waiting(status.SAVE)
    def check_trial(self) -> None:
        """Wait for the trial save. Raises TrainingError if it failed: every other save would fail too."""
        if self._trial is not None:
            self._trial.result()
            self.check()

    @status.current().waiting(status.SAVE)
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
        self._thread.shutdown(wait=False)
        if self.group.is_rank0 and not self.is_saving:
            self._clean_up()

    def restore(self, abstract_state_of: Callable[[Manifest], Any]) -> tuple[Any, Manifest] | None:
        """(state, manifest) of the newest valid checkpoint; None if the folder holds no checkpoint.

        abstract_state_of: maps a manifest to the tree for `load_state`. Rank 0 chooses, renames corrupt checkpoints and
        removes what an interrupted save left. Raises TrainingError if all are corrupt, CheckpointMismatch if the newest one has
        different arrays.
        """
        restored = self._restore_newest(abstract_state_of) if self.group.is_rank0 else None
        samples = self.group.broadcast_object("restored checkpoint", restored[1].samples if restored else None)
        if restored or samples is None:
            return restored
        try:
            manifest = read_manifest(self.folder / str(samples))
            return orbax_io.load_state(manifest, abstract_state_of(manifest)), manifest
        except (CorruptCheckpoint, orbax_io.CheckpointMismatch) as error:
            rank = self.group.rank
            raise TrainingError(f"{error} (on rank {rank}, host {self.group.hosts[rank]}; rank 0 could read it)") from None

    def _restore_newest(self, abstract_state_of: Callable[[Manifest], Any]) -> tuple[Any, Manifest] | None:
        corrupt = []
        self._clean_up()
        for path in checkpoint_paths(self.folder):
            try:
                manifest = read_manifest(path)
                state = orbax_io.load_state(manifest, abstract_state_of(manifest))
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
        """The newest intact checkpoint of at most `max_samples` samples, or None. Files on other hosts are not checked."""
        complete_here = self.uploader is None or self.uploader.complete_here
        own = "" if complete_here else f"{part_folder(self.group.rank, self.group.num_processes)}/"
        return latest_valid(self.folder, max_samples, below=own)

    def retain_latest(self, max_samples: int) -> Manifest | None:
        """Never remove the newest valid checkpoint of at most `max_samples` samples; returns it, or None if there is none."""
        manifest = self.latest_valid(max_samples)
        if manifest and manifest.samples not in self.retention.retained:
            self.retention.retained.append(manifest.samples)
        return manifest

    def mark_audited(self) -> int | None:
        """Keep the newest checkpoint until the next audit passes. Returns its samples; None if there is no checkpoint."""
        newest = next(read_manifests(self.folder), None)
        self.retention.audited, self.retention.resumed = newest.samples if newest else None, None
        return self.retention.audited

    def quarantine_unaudited(self) -> Rollback:
        """Rename to NAME.suspect all checkpoints after the last audit that passed, or else after the resumed one."""
        samples = self.retention.resumed if self.retention.audited is None else self.retention.audited
        trusted = None if samples is None else self.latest_valid(samples)
        quarantined, failures = [], []
        for path in checkpoint_paths(self.folder):
            if trusted is None or int(path.name) > trusted.samples:
                try:
                    quarantined.append(quarantine(path, "suspect"))
                except OSError as error:
                    failures.append(f"{path} ({error.strerror})")
        if self.uploader:
            after = trusted.samples if trusted else samples  # this checkpoint may exist only at the URL
            self.uploader.reject(after=-1 if after is None else after, reason="it was saved after the last audit that passed")
        return Rollback(trusted.path if trusted else None, quarantined, failures)

    # The following methods run in the saving thread.

    @cached_property
    def _checkpointer(self) -> Any:
        return orbax_io.make_checkpointer(self.group.rank)

    def _try_save(self) -> None:
        """Try what a file system may refuse in a save, in a folder of this process."""
        group, path = self.group, self.folder / f"{UNFINISHED}{TRIAL}-{self.group.rank}"
        renamed = path.with_name(f"{path.name}-renamed")
        group.status.set_background_save("a trial of a save")
        try:
            orbax_io.try_write(path)
            write_manifest(Manifest(path, 0, {}, arrays={}, files={}))
            path.rename(renamed)
        except Exception as error:  # the type depends on the file system
            reason = f"{orbax_io.save_error(error)}; {file_system(self.folder)}"
            message = f"no checkpoint can be saved in {self.folder} ({reason}), so nothing was trained"
            self._rejection = TrainingError(f"{message}; use a --workdir on another file system")
        finally:
            remove(path)
            remove(renamed)
            group.status.set_background_save("")

    def _save(self, samples: int, metadata: dict, *, report: StateReport, before_manifest: Callable[[], None]) -> None:
        """Write the state, check it on all processes, complete the checkpoint, and remove expired ones."""
        group, path = self.group, self.folder / f"{UNFINISHED}{samples}"
        group.status.set_background_save(f"the checkpoint of {samples} samples")
        try:
            arrays = self._write(path, report)
            reports = [StateReport(**fields) for fields in group.all_gather_object("written", dataclasses.asdict(report))]
            if reason := replicas.rejection_reason(samples, reports, group.hosts):
                remove(path)
                self._rejection = TrainingError(reason)
                return
            errors = [report.error for report in reports]
            if not any(errors):
                if bad_images := {name: reason for report in reports for name, reason in report.bad_images.items()}:
                    metadata = metadata | {"progress": metadata["progress"] | {"bad_images": bad_images}}
                files = {name: checksum for report in reports for name, checksum in report.files.items()}
                manifest = Manifest(path, samples, metadata, arrays, files, parts=group.num_processes)
                error = self._complete(manifest, before_manifest) if group.is_rank0 else None
                errors = [group.broadcast_object("manifest", error)]
            self.last_error = next(filter(None, errors), None)
            if self.last_error is None:
                group.set_resume_hint(f"the same command continues from {self.folder / str(samples)}")
                if self.uploader:
                    self.uploader.enqueue(samples)
            elif group.rank == errors.index(self.last_error):
                self._abandon(path, self.last_error)
        finally:
            group.status.set_background_save("")

    def _write(self, path: Path, report: StateReport) -> dict[str, list]:
        """Write this process's part of the state, complete the report, and return the descriptions of all arrays."""
        state, part, parts, arrays = self._host_state, self.group.rank, self.group.num_processes, {}
        try:
            if parts == 1:  # several processes end after a failed save
                self._clean_up()
            remove(path / part_folder(part, parts))
            arrays = replicas.describe_arrays(state)
            report.checksums[replicas.WHOLE] = hashlib.sha256(json.dumps(arrays).encode()).hexdigest()
            report.finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(getattr(state, "params", state)))
            orbax_io.write_state(self._checkpointer, path, state, part=part, parts=parts)
            report.files = {name: file_checksum(path / name) for name in state_files(path, part, parts)}
        except Exception as error:  # for example a full disk; the type depends on the file system
            report.error = orbax_io.save_error(error)
        return arrays

    def _complete(self, manifest: Manifest, before_manifest: Callable[[], None]) -> str | None:
        """Write the manifest, rename the directory to its final name, and remove expired checkpoints; returns the error."""
        path, final = manifest.path, self.folder / str(manifest.samples)
        try:
            before_manifest()
            write_manifest(manifest)
            replaced = rename_for_removal(final) if os.path.lexists(final) else None  # saved before its evaluation
            path.rename(final)
        except Exception as error:  # for example a full disk
            return orbax_io.save_error(error)
        if replaced:
            remove(replaced)
        with contextlib.suppress(OSError):  # retried after the next save
            for expired in self.retention.expired(list(read_manifests(self.folder))):
                remove(rename_for_removal(expired.path))
        return None

    def _abandon(self, path: Path, error: str) -> None:
        """Remove a failed save, which no process writes any more. A single process continues without it; several processes must
        end."""
        remove(path)
        message = f"the checkpoint {path} could not be saved ({error})"
        if self.group.num_processes > 1:
            self.group.abort(message)
        latest = self.latest_valid()
        kept = f"the checkpoint {latest.path} is kept" if latest else "there is no other checkpoint yet"
        self.info(f"{message}; training continues, and {kept}")

    def _clean_up(self) -> None:
        """Complete a save that was interrupted between its manifest and its final name. Remove the remains of other saves:
        Orbax may have written them just after a failure."""
        for path in [*self.folder.glob(f"{UNFINISHED}*")]:
            final = path.with_name(path.name.removeprefix(UNFINISHED))
            with contextlib.suppress(CheckpointError, OSError):
                if not os.path.lexists(final) and str(read_manifest(path).samples) == final.name:
                    path.rename(final)
            remove(path)
