"""Checkpoints: written beside the run by Orbax, sealed when whole, and checked bit by bit before they are believed.

A checkpoint is a directory named by its samples seen: `state/`, Orbax's, and `seal.json`, written last, with what the run knew,
the size and checksum of every file, and a digest of every array. It gets its name when it is sealed.
"""

import contextlib
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdp.config import Checkpoint as CheckpointConfig
from jaxdp.errors import first_line
from jaxdp.training.digest import described, devices_that_differ
from jaxdp.training.guard import TrainingError

SEAL, STATE, SAVING = "seal.json", "state", "saving-"


class Damaged(Exception):
    """A checkpoint that must not be used: one line that names it, the file or array, and what is wrong."""


class Unfit(Exception):
    """A sound checkpoint of another state than the one asked for: one line that names the first array that differs."""


@dataclass(frozen=True)
class Sealed:
    """A checkpoint with its seal. told: what the run knew, a dict that JSON can hold."""

    path: Path
    samples: int
    told: dict
    arrays: dict[str, list]
    files: dict[str, list]

    @property
    def accuracy(self) -> float | None:
        return self.told.get("accuracy")

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def directories(folder: Path) -> list[Path]:
    """What may be checkpoints in a folder, the newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.name.isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def read_seal(path: Path) -> Sealed:
    """The seal of a checkpoint. Raises Damaged where it is missing or damaged."""
    try:
        text = (path / SEAL).read_bytes()
    except OSError as error:
        raise Damaged(f"{path / SEAL} cannot be read: {error.strerror}") from None
    body, _, digest = text.rstrip(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise Damaged(f"{path / SEAL} is damaged")
    held = json.loads(body)
    return Sealed(path, held["samples"], held["told"], held["arrays"], held["files"])


def _write_seal(sealed: Sealed) -> None:
    held = {"samples": sealed.samples, "told": sealed.told, "arrays": sealed.arrays, "files": sealed.files}
    body = json.dumps(held, indent=1).encode()
    temporary = sealed.path / (SEAL + ".tmp")
    with open(temporary, "wb") as file:
        file.write(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, sealed.path / SEAL)


def _checksum(path: Path) -> list:
    """[bytes, CRC-32 in hexadecimal] of a file."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, f"{crc:08x}"]


def _files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in (path / STATE).rglob("*") if file.is_file())


def check_files(sealed: Sealed) -> None:
    """Raise Damaged, naming the file, if one that was sealed is missing or not what it was."""
    for name, expected in sealed.files.items():
        file = sealed.path / name
        try:
            found = _checksum(file)
        except OSError as error:
            raise Damaged(f"{file} cannot be read: {error.strerror}") from None
        if found != expected:
            what = "truncated" if found[0] < expected[0] else "changed"
            raise Damaged(f"{file} is damaged: {what} since it was written")


def all_sealed(folder: Path) -> Iterator[Sealed]:
    """The checkpoints whose seals are sound, the newest first; their files are not looked at.

    Those with a damaged seal are passed over here: `restore` and `jaxdp checkpoints` name them.
    """
    for path in directories(folder):
        with contextlib.suppress(Damaged):
            yield read_seal(path)


def newest_good(folder: Path, before: int | None = None) -> Sealed | None:
    """The newest of them, of at most `before` samples."""
    return next((one for one in all_sealed(folder) if before is None or one.samples <= before), None)


def best(sealed: list[Sealed]) -> Sealed | None:
    """The one of the highest accuracy, of equals the latest; None where none was saved right after an evaluation."""
    scored = [one for one in sealed if one.accuracy is not None]
    return max(scored, key=lambda one: (one.accuracy, one.samples), default=None)


def load(sealed: Sealed, abstract):
    """The state of a checkpoint, every file and every array checked. abstract: shapes, dtypes and shardings.

    Raises Unfit where the checkpoint holds other arrays than those, Damaged where it is not what was saved.
    """
    held, wanted = sealed.arrays, described(abstract)
    for name in held.keys() | wanted.keys():
        if held.get(name, [])[:2] != wanted.get(name, [])[:2]:
            raise Unfit(
                f"{sealed.path} holds for {name} {_in_words(held.get(name))}, and the run wants {_in_words(wanted.get(name))}"
            )
    check_files(sealed)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore((sealed.path / STATE).absolute(), abstract)
    except Exception as error:  # by file and release: OSError, ValueError, JSONDecodeError, bare Exception
        raise Damaged(f"{sealed.path / STATE} cannot be read: {first_line(error)}") from None
    for name, what in described(_on_host(state)).items():
        if what != held[name]:
            raise Damaged(f"{sealed.path / STATE}: the array {name} is not what was saved")
    return state


def _on_host(state, memory=None):
    """A copy of what this process's first device holds of a replicated state. memory: an earlier copy to write it over."""

    def copied(leaf, place=None):
        data = leaf.addressable_data(0)
        if place is None or place.shape != data.shape or place.dtype != data.dtype:
            return np.array(data)
        np.copyto(place, data)
        return place

    if jax.tree.structure(state) != jax.tree.structure(memory):
        return jax.tree.map(copied, state)
    return jax.tree.map(copied, state, memory)


def _finite(tree) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def _in_words(array: list | None) -> str:
    return f"{array[0]} of shape {tuple(array[1])}" if array else "nothing"


class Checkpoints:
    """The checkpoints of one run in `folder`: saves beside the run, keeps the newest and the best, finds the newest sound one.

    say: takes one line for people. A save that fails costs a remark; the run and the checkpoints before it stay.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, say):
        self.folder, self.config, self.say = folder, config, say
        self.pinned: set[int] = set()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.checkpointer = ocp.StandardCheckpointer()
        self.host = None  # a copy of the state, in memory that every save uses again
        self.saving: Future | None = None
        self.failed: TrainingError | None = None

    def save(self, state, samples: int, told: dict) -> None:
        """Begin to save a replicated state; returns as soon as it has been copied from the devices.

        Waits for the save before, if that is still going on. told: what to keep beside the arrays.
        """
        self.wait()
        odd = devices_that_differ(getattr(state, "params", state))
        self.host = _on_host(state, self.host)
        self.saving = self.thread.submit(self._write, self.host, samples, told, odd)

    def _write(self, host, samples: int, told: dict, odd: list) -> None:
        """In the background: if the state is usable, write and seal it, and remove what need not be kept."""
        path = self.folder / f"{SAVING}{samples}"
        try:
            self._sweep()
            if odd or not _finite(getattr(host, "params", host)):
                self.failed = TrainingError(_why_unusable(samples, odd))
                return
            path.mkdir(parents=True)
            self.checkpointer.save((path / STATE).absolute(), host)
            self.checkpointer.wait_until_finished()
            arrays = described(host)
            files = {name: _checksum(path / name) for name in _files(path)}
            _write_seal(Sealed(path, samples, told, arrays, files))
            final = self.folder / str(samples)
            shutil.rmtree(final, ignore_errors=True)
            path.rename(final)
            self._remove_old()
        except Exception as error:  # the disk may be full, or gone
            self._give_up(path, error)

    def _give_up(self, path: Path, error: BaseException) -> None:
        shutil.rmtree(path, ignore_errors=True)
        good = newest_good(self.folder)
        stays = f"the checkpoint {good.path} stays" if good else "there is no other checkpoint yet"
        self.say(f"the checkpoint {path} could not be saved ({first_line(error)}); the run goes on, and {stays}")

    def _sweep(self) -> None:
        """Remove what saves that were cut off or failed have left: Orbax may write on for a moment after one has failed."""
        for path in self.folder.glob(f"{SAVING}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove_old(self) -> None:
        sealed = list(all_sealed(self.folder))
        kept = {one.samples for one in sealed[: self.config.keep]} | self.pinned
        if one := best(sealed):
            kept.add(one.samples)
        for one in sealed:
            if one.samples not in kept:
                shutil.rmtree(one.path)

    def check(self) -> None:
        """Raise the TrainingError of a save that found the state unusable."""
        if self.failed:
            raise self.failed

    def wait(self) -> None:
        """Until the save under way, if any, is sealed or given up."""
        if self.saving is not None:
            self.saving.result()
            self.saving = None

    def restore(self, abstract_of):
        """(state, Sealed) of the newest sound checkpoint, or None where there is none at all. abstract_of(samples): see `load`.

        A damaged one is named, put aside under another name, and the one before it tried. Raises TrainingError where all are
        damaged. What a cut-off save has left is removed.
        """
        damaged = []
        self._sweep()
        for path in directories(self.folder):
            try:
                sealed = read_seal(path)
                state = load(sealed, abstract_of(sealed.samples))
            except Damaged as error:
                damaged.append(f"{error}")
                aside = put_aside(path)
                self.say(f"the checkpoint of samples {path.name} is not used: {error}; it is kept as {aside}")
                continue
            return state, sealed
        if damaged:
            raise TrainingError(
                f"no checkpoint in {self.folder} is sound ({'; '.join(damaged)}): give --resume never to begin anew"
            )
        return None

    def pin(self, samples: int) -> Sealed | None:
        """Keep the newest checkpoint of at most so many samples for good, and return it."""
        good = newest_good(self.folder, samples)
        if good:
            self.pinned.add(good.samples)
        return good

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        if self.saving is None or self.saving.done():
            self._sweep()


def put_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to NAME.damaged, NAME.damaged-2, ..., so that its place is free."""
    names = (path.with_name(f"{path.name}.damaged{'' if n == 1 else f'-{n}'}") for n in range(1, 10_000))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    return aside


def _why_unusable(samples: int, odd: list) -> str:
    if not odd:
        return f"the parameters are no longer finite at samples {samples}; nothing was saved there"
    named = ", ".join(str(device) for device in odd)
    return (
        f"the devices do not hold the same parameters at samples {samples}: {named} differs from the others; nothing was saved "
        "there; its memory or the link to it may be faulty"
    )
