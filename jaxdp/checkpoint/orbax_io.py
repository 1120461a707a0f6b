"""Reading and writing a checkpoint's arrays with Orbax."""

import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdp.checkpoint.checksums import describe_arrays
from jaxdp.checkpoint.manifest import STATE, CorruptCheckpoint, Manifest, UnreadableCheckpoint, verify_files
from jaxdp.errors import first_line

# Orbax measures its timeout with the system clock, which can be changed during a save. The heartbeats detect a save that hangs
# (see `jaxdp.distributed.hang_rules`), so Orbax's own timeout is disabled.
SAVE_TIMEOUT_SECONDS = 100 * 365 * 24 * 3600


class CheckpointMismatch(Exception):
    """A valid checkpoint whose arrays do not match the requested state. The message names the first array that differs."""


def make_checkpointer(rank: int, num_processes: int) -> ocp.StandardCheckpointer:
    """An Orbax checkpointer that reads in this process alone, and writes in a run of one process."""
    timeout = ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT_SECONDS)
    return ocp.StandardCheckpointer(multiprocessing_options=_alone(rank, num_processes), async_options=timeout)


def make_writer(rank: int, num_processes: int) -> ocp.Checkpointer:
    """An Orbax checkpointer that writes this process's part of a state.

    With several processes it is not asynchronous: the processes would take each other's signals for their own.
    """
    if num_processes == 1:
        return make_checkpointer(rank, num_processes)
    # By default, rank 0 writes all NumPy arrays, and each process writes a slice of every replicated array.
    arrays = ocp.type_handlers.ArrayHandler(primary_host=rank, replica_id=0, use_replica_parallel=False)
    registry, options = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)), _alone(rank, num_processes)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options, type_handler_registry=registry)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _alone(rank: int, num_processes: int) -> ocp.options.MultiprocessingOptions:
    """Options without barriers between processes: Orbax's collectives would interleave with those of the training step."""
    if num_processes == 1:
        return ocp.options.MultiprocessingOptions()
    name = f"rank {rank}"
    return ocp.options.MultiprocessingOptions(primary_host=rank, active_processes={rank}, barrier_sync_key_prefix=name)


def load_state(manifest: Manifest, abstract_state: Any) -> Any:
    """Load the state of a checkpoint and compare every file and array with the manifest. Each process loads independently.

    abstract_state: a tree with the shapes, dtypes and shardings to restore.

    Raises CheckpointMismatch if the checkpoint holds other arrays, CorruptCheckpoint if its content changed.
    """
    stored, expected = manifest.arrays, describe_arrays(abstract_state)
    for name in stored.keys() | expected.keys():
        if stored.get(name, [])[:2] != expected.get(name, [])[:2]:
            raise CheckpointMismatch(
                f"{manifest.path} holds {_array_type(stored.get(name))} for {name}, but the run expects "
                f"{_array_type(expected.get(name))}"
            )
    verify_files(manifest)
    try:
        with make_checkpointer(jax.process_index(), jax.process_count()) as checkpointer:
            state = _restore(checkpointer, manifest, abstract_state)
    except Exception as error:  # OSError, ValueError or a bare Exception, depending on Orbax's version
        raise UnreadableCheckpoint(
            f"{manifest.path / STATE} cannot be read although its checksums match: {first_line(error)}"
        ) from None
    for name, description in describe_arrays(copy_to_host(state)).items():
        if description != stored[name]:
            raise CorruptCheckpoint(f"{manifest.path / STATE} is corrupt: the checksum of the array {name} does not match")
    return state


def _restore(checkpointer: ocp.StandardCheckpointer, manifest: Manifest, abstract_state: Any) -> Any:
    if manifest.parts == 1:
        return checkpointer.restore((manifest.path / STATE).absolute(), abstract_state)
    leaves, structure = jax.tree.flatten(abstract_state)
    restored: list[Any] = [None] * len(leaves)
    for part in range(manifest.parts):
        numbers, tree = _part(abstract_state, part, manifest.parts)
        if numbers:
            arrays = checkpointer.restore((manifest.path / part_folder(part, manifest.parts)).absolute(), tree)
            for number, array in zip(numbers, jax.tree.leaves(arrays), strict=True):
                restored[number] = array
    return jax.tree.unflatten(structure, restored)


def part_folder(part: int, parts: int) -> str:
    """The folder of a part of the state in a checkpoint that `parts` processes have written."""
    return STATE if parts == 1 else f"{STATE}/part-{part}"


def write_state(writer: ocp.Checkpointer, path: Path, host_state: Any, *, part: int, parts: int) -> None:
    """Write a part of the state of the checkpoint at `path` and wait until it is complete. Each process writes its own."""
    if parts == 1:
        tree = host_state
    else:
        (path / STATE).mkdir(parents=True, exist_ok=True)
        _, tree = _part(host_state, part, parts)
        tree = _global_arrays(tree, part)
    if tree:
        writer.save((path / part_folder(part, parts)).absolute(), tree)
    if isinstance(writer, ocp.AsyncCheckpointer):
        writer.wait_until_finished()


def _global_arrays(tree: Any, rank: int) -> Any:
    """Arrays that are replicated over the first device of every process, with this process's as the first replica.

    Orbax writes the first replica, and refuses arrays of only one process. Nothing is sent to other processes.
    """
    first_devices: dict[int, jax.Device] = {}
    for device in jax.devices():
        first_devices.setdefault(device.process_index, device)
    devices = [first_devices.pop(rank), *first_devices.values()]
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ("process",)), jax.sharding.PartitionSpec())
    return jax.tree.map(lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__), tree)


def _part(tree: Any, part: int, parts: int) -> tuple[list[int], dict]:
    """(numbers of the leaves in a part, in the order of its tree; the part as nested dicts with the names of the tree).

    The largest leaf goes to the part with the fewest bytes so far, and so on, so that all processes write about as much.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sizes, members = [0] * parts, []
    for number in sorted(range(len(leaves)), key=lambda number: (-leaves[number][1].size, number)):
        smallest = min(range(parts), key=lambda part: (sizes[part], part))
        sizes[smallest] += leaves[number][1].size * leaves[number][1].dtype.itemsize
        members += [number] if smallest == part else []
    nested: dict = {}
    for number in members:
        path, leaf = leaves[number]
        *folders, name = (jax.tree_util.keystr((entry,), simple=True) for entry in path)
        folder = nested
        for key in folders:
            folder = folder.setdefault(key, {})
        folder[name] = number, leaf
    pairs = jax.tree.leaves(nested, is_leaf=lambda node: isinstance(node, tuple))
    leaf_tree = jax.tree.map(lambda pair: pair[1], nested, is_leaf=lambda node: isinstance(node, tuple))
    return [number for number, _ in pairs], leaf_tree


def copy_to_host(state: Any, buffers: Any = None) -> Any:
    """NumPy copies of a replicated state's arrays, taken from this process's first device.

    buffers: an earlier copy, whose memory is reused if shape and dtype are the same.
    """

    def copy(leaf: jax.Array, buffer: np.ndarray | None = None) -> np.ndarray:
        data = leaf.addressable_data(0)
        if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
            return np.array(data)
        np.copyto(buffer, data)
        return buffer

    reusable = buffers is not None and jax.tree.structure(state) == jax.tree.structure(buffers)  # type: ignore[operator]
    return jax.tree.map(copy, state, buffers) if reusable else jax.tree.map(copy, state)


def all_finite(tree: Any) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def _array_type(description: list | None) -> str:
    return f"{description[0]} of shape {tuple(description[1])}" if description else "nothing"


def save_error(error: Exception) -> str:
    """One line on why a save failed: the system's error message if tensorstore passes on its number."""
    if match := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(match[1]))
    return (isinstance(error, OSError) and error.strerror) or first_line(error)


class _LateWriteFilter:
    """An unraisable hook that drops tensorstore's late errors of a failed save and passes everything else on.

    Orbax closes its event loop when the first array cannot be written. Each write still in flight then reports to the closed
    loop and would print a traceback.
    """

    def __init__(self, previous: Callable[[Any], Any]) -> None:
        self.previous = previous

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        late_write = unraisable.object is None and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not late_write:
            self.previous(unraisable)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    """False for asyncio's report of a failed write that was never awaited: it names Orbax's code or temporary directory."""
    return "orbax" not in record.getMessage()


def silence_orbax() -> None:
    """Suppress the tracebacks that Orbax's threads print for a failed save; jaxdp reports one line instead."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_is_not_orbax)  # added once however often it is called
    if not isinstance(sys.unraisablehook, _LateWriteFilter):
        sys.unraisablehook = _LateWriteFilter(sys.unraisablehook)
