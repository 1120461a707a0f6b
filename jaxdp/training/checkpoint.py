"""Checkpoints: written beside the run by Orbax, sealed when whole, and checked bit by bit before they are believed.

What one consists of is told in `seal`. It gets its name, its samples seen, when it is sealed.
"""

import contextlib
import hashlib
import json
import logging
import shutil
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdp.config import Checkpoint as CheckpointConfig
from jaxdp.errors import first_line
from jaxdp.parallel.alone import Alone
from jaxdp.training import seal
from jaxdp.training.digest import described, devices_that_differ
from jaxdp.training.guard import TrainingError
from jaxdp.training.seal import STATE, Damaged, Sealed, Unreadable, all_sealed, newest_good

SAVING = "saving-"  # in the name of one that is being written
SAVE_SECONDS = 120  # for which processes wait for one another in a save


class Unfit(Exception):
    """A sound checkpoint of another state than the one asked for: one line that names the first array that differs."""


def _checkpointer(rank: int, processes: int, alone: bool) -> ocp.StandardCheckpointer:
    """Orbax's, for this process alone or for all of them, which then meet by messages: its collectives would meet the run's."""
    if processes == 1:
        return ocp.StandardCheckpointer()
    active = {rank} if alone else set(range(processes))
    name = f"rank {rank}" if alone else "all"
    options = ocp.options.MultiprocessingOptions(rank if alone else 0, active, name)
    return ocp.StandardCheckpointer(multiprocessing_options=options, async_options=ocp.AsyncOptions(timeout_secs=SAVE_SECONDS))


def load(sealed: Sealed, abstract):
    """The state of a checkpoint, every file and every array checked. abstract: shapes, dtypes and shardings.

    Each process of a run loads for itself.

    Raises Unfit where the checkpoint holds other arrays than those, Damaged where it is not what was saved.
    """
    held, wanted = sealed.arrays, described(abstract)
    for name in held.keys() | wanted.keys():
        if held.get(name, [])[:2] != wanted.get(name, [])[:2]:
            raise Unfit(
                f"{sealed.path} holds for {name} {_in_words(held.get(name))}, and the run wants {_in_words(wanted.get(name))}"
            )
    seal.check_files(sealed)
    try:
        with _checkpointer(jax.process_index(), jax.process_count(), alone=True) as checkpointer:
            state = checkpointer.restore((sealed.path / STATE).absolute(), abstract)
    except Exception as error:  # by release: OSError, ValueError, bare Exception; its files are what was written
        raise Unreadable(
            f"{sealed.path / STATE} cannot be read, though no file of it is damaged: {first_line(error)}"
        ) from None
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


def _hush() -> None:
    """Orbax tells of a failed save by tracebacks from each of its threads; ours is one line."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)


class Checkpoints:
    """The checkpoints of one run in `folder`: saves beside the run, keeps the newest and the best, finds the newest sound one.

    say: takes one line for people. A save that fails costs a remark; the run and the checkpoints before it stay. Of several
    processes it ends the run: a disk that is full for one would hold up all of them.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, say, team=None):
        """team: the processes of the run, all of which write; the first one seals, removes and says."""
        self.folder, self.config, self.say, self.team = folder, config, say, team or Alone()
        _hush()
        self.pinned: list[int] = []  # samples of checkpoints that are kept for good
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.checkpointer = _checkpointer(self.team.rank, self.team.processes, alone=False)
        self.host = None  # a copy of the state, in memory that every save uses again
        self.saving: Future | None = None
        self.failed: TrainingError | None = None

    def save(self, state, samples: int, told: dict, before_seal=lambda: None) -> None:
        """Begin to save a replicated state; returns as soon as it has been copied from the devices.

        Waits for the save before, if that is still going on. told: what to keep beside the arrays. before_seal: what must be on
        the disk when the checkpoint is.
        """
        self.wait()
        odd = devices_that_differ(getattr(state, "params", state))
        self.host = _on_host(state, self.host)
        self.saving = self.thread.submit(self._write, self.host, samples, told, odd, before_seal)

    def _write(self, host, samples: int, told: dict, odd: list, before_seal) -> None:
        """In the background: if the state is usable, write and seal it, and remove what need not be kept."""
        path, team = self.folder / f"{SAVING}{samples}", self.team
        team.saves(f"the checkpoint of {samples} samples")
        ready = {"odd": [str(device) for device in odd], "finite": _finite(getattr(host, "params", host))}
        ready |= {"digest": None, "error": None}
        ready["bad_images"] = told.get("progress", {}).get("bad_images", {})
        try:
            if team.first:
                self._sweep()
                path.mkdir(parents=True)
            arrays = described(host)
            ready["digest"] = hashlib.sha256(json.dumps(arrays).encode()).hexdigest()
        except Exception as error:  # by file system
            ready["error"] = first_line(error)
        everywhere = team.exchange("ready to save", ready)
        if reason := _why_unusable(samples, everywhere, team.hosts):
            shutil.rmtree(path, ignore_errors=True)
            self.failed = TrainingError(reason)
            return
        problem = next((one["error"] for one in everywhere if one["error"]), None)
        if problem is None:
            try:
                self.checkpointer.save((path / STATE).absolute(), _to_be_written(host, team))
                self.checkpointer.wait_until_finished()
            except Exception as error:  # the disk may be full, or gone
                problem = first_line(error)
                if team.processes > 1:  # the others wait in Orbax, which does not tell them
                    self._give_up(path, problem)
            problem = next((one for one in team.exchange("written", problem) if one), None)
        if team.first and problem is None:
            for one in everywhere[1:]:
                ready["bad_images"].update(one["bad_images"])
            problem = self._seal(path, samples, told, arrays, before_seal)
        problem = team.share("sealed", problem)
        team.saves("")
        if problem is None:
            team.advice = f"the same command goes on from {self.folder / str(samples)}"
        elif team.first:
            self._give_up(path, problem)

    def _seal(self, path: Path, samples: int, told: dict, arrays: dict, before_seal) -> str | None:
        """Give what was written its seal and its name; what stood against it, if anything did."""
        try:
            before_seal()
            files = {name: seal.checksum(path / name) for name in seal.state_files(path)}
            seal.write(Sealed(path, samples, told, arrays, files))
            final = self.folder / str(samples)
            if final.exists():  # of the same samples, saved before their evaluation
                replaced = _leaving(final)
                path.rename(final)
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                path.rename(final)
        except Exception as error:  # the disk may be full, or gone
            return first_line(error)
        with contextlib.suppress(OSError):  # what cannot be removed now is tried again after the next save
            self._remove_old()
        return None

    def _give_up(self, path: Path, problem: str) -> None:
        """Leave a save that failed: one process goes on without it, several end together."""
        shutil.rmtree(path, ignore_errors=True)
        if self.team.processes > 1:
            self.team.give_up(f"the checkpoint {path} could not be saved ({problem})")
        good = newest_good(self.folder)
        stays = f"the checkpoint {good.path} stays" if good else "there is no other checkpoint yet"
        self.say(f"the checkpoint {path} could not be saved ({problem}); the run goes on, and {stays}")

    def _sweep(self) -> None:
        """Remove what saves that were cut off or failed have left: Orbax may write on for a moment after one has failed.

        One that was sealed and had not got its name gets it.
        """
        for path in self.folder.glob(f"{SAVING}*"):
            name = path.name.removeprefix(SAVING)
            if name.isdigit() and not (self.folder / name).exists():
                with contextlib.suppress(Damaged, Unreadable, OSError):
                    if seal.read(path).samples == int(name):
                        path.rename(self.folder / name)
        for path in self.folder.glob(f"{SAVING}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove_old(self) -> None:
        sealed = list(all_sealed(self.folder))
        kept = {one.samples for one in sealed[: self.config.keep]} | set(self.pinned)
        kept |= {one.samples for one in seal.by_accuracy(sealed)[:1]}
        for one in sealed:
            if one.samples not in kept:
                shutil.rmtree(_leaving(one.path), ignore_errors=True)

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
        damaged. What a cut-off save has left is removed. Of several processes the first one chooses.
        """
        found = self._newest_sound(abstract_of) if self.team.first else None
        samples = self.team.share("restored", found and found[1].samples)
        if found or samples is None:
            return found
        try:
            sealed = seal.read(self.folder / str(samples))
            return load(sealed, abstract_of(samples)), sealed
        except (Damaged, Unfit) as error:
            raise TrainingError(
                f"{error} (rank {self.team.rank} on {self.team.hosts[self.team.rank]}; rank 0 has read it)"
            ) from None

    def _newest_sound(self, abstract_of):
        damaged = []
        self._sweep()
        for path in seal.directories(self.folder):
            try:
                sealed = seal.read(path)
                state = load(sealed, abstract_of(sealed.samples))
            except Damaged as error:
                damaged.append((path, str(error)))
                continue
            for path, error in damaged:
                self.say(f"the checkpoint of samples {path.name} is not used: {error}; it is kept as {put_aside(path)}")
            return state, sealed
        if damaged:
            told = "; ".join(error for _, error in damaged)
            raise TrainingError(f"no checkpoint in {self.folder} is sound ({told}): give --resume never to begin anew")
        return None

    def pin(self, samples: int) -> Sealed | None:
        """Keep the newest checkpoint of at most so many samples for good, and return it."""
        good = newest_good(self.folder, samples)
        if good and good.samples not in self.pinned:
            self.pinned.append(good.samples)
        return good

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        if self.team.first and (self.saving is None or self.saving.done()):
            self._sweep()


def _leaving(path: Path) -> Path:
    """A checkpoint under a name that `_sweep` removes, should this process not come to it."""
    leaving = path.with_name(f"{SAVING}{path.name}-replaced")
    shutil.rmtree(leaving, ignore_errors=True)
    path.rename(leaving)
    return leaving


def put_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to NAME.damaged, NAME.damaged-2, ..., so that its place is free."""
    names = (path.with_name(f"{path.name}.damaged{'' if n == 1 else f'-{n}'}") for n in range(1, 10_000))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    return aside


def _to_be_written(host, team):
    """What Orbax is given of a copy of the state: where there are several processes, arrays of which each holds, and writes, a
    part.

    Of arrays that all hold whole Orbax would cut the parts on the devices, beside the step. On CPU devices that ends in a
    deadlock: the cuts take all places for programs of one device, and wait for threads that wait for it in a collective.
    """
    if team.processes == 1:
        return host
    writers = {}
    for device in jax.devices():
        writers.setdefault(device.process_index, device)
    mesh = jax.sharding.Mesh(np.array([writers[rank] for rank in sorted(writers)]), ("process",))

    def in_parts(leaf):
        axis = next((axis for axis, size in enumerate(leaf.shape) if size and size % team.processes == 0), None)
        spec = () if axis is None else (*[None] * axis, "process")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)

    return jax.tree.map(in_parts, host)


def _why_unusable(samples: int, everywhere: list[dict], hosts: list[str]) -> str | None:
    """Why a state must not be saved, if it must not. everywhere: what each process has found of its own copies."""
    odd = [name for one in everywhere for name in one["odd"]]
    digests = {rank: one["digest"] for rank, one in enumerate(everywhere) if one["digest"]}
    if not odd and len(set(digests.values())) > 1:
        (common, times), *_ = Counter(digests.values()).most_common(1)
        told_apart = 2 * times > len(digests)
        odd = [f"rank {rank} on {hosts[rank]}" for rank, digest in digests.items() if digest != common or not told_apart]
    if odd:
        told = f"{odd[0]} differs from the others" if len(odd) == 1 else f"{' and '.join(odd)} differ from one another"
        return (
            f"the devices do not hold the same parameters at samples {samples}: {told}; nothing was saved there; the memory of "
            "one of them or the link to it may be faulty"
        )
    if not all(one["finite"] for one in everywhere):
        return f"the parameters are no longer finite at samples {samples}; nothing was saved there"
    return None
