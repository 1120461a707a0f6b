"""Reading and writing a checkpoint's arrays with Orbax, which the first read or write imports."""

import functools
import logging
import math
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxdp.checkpoint.manifest import (
    MANIFEST,
    STATE,
    CorruptCheckpoint,
    Manifest,
    UnreadableCheckpoint,
    part_folder,
    state_files,
    verify_files,
)
from jaxdp.checkpoint.replicas import describe_arrays
from jaxdp.errors import first_line, plural

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


class CheckpointMismatch(Exception):
    """A valid checkpoint whose arrays do not match the requested state. The message names the first array that differs."""


def make_checkpointer(rank: int) -> "ocp.Checkpointer":
    """An Orbax checkpointer that reads in this process alone, and writes only what this process passes to it.

    It is not asynchronous: jaxdp's saving thread waits for it. Orbax's own time limit uses a clock that can be set, and several
    processes would mistake each other's signals for their own. There are no barriers between processes, because they would
    interleave with the collectives of the training step.
    """
    import orbax.checkpoint as ocp

    silence_orbax()
    alone = ocp.options.MultiprocessingOptions(primary_host=rank, active_processes={rank}, barrier_sync_key_prefix=f"{rank}")
    # By default, each process writes a slice of every replicated array.
    arrays = ocp.type_handlers.ArrayHandler(primary_host=rank, replica_id=0, use_replica_parallel=False)
    numpy_arrays = ocp.type_handlers.NumpyHandler()  # writes on rank 0 only
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays), (np.ndarray, numpy_arrays))
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone, type_handler_registry=registry)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def write_state(checkpointer: "ocp.Checkpointer", path: Path, host_state: Any, *, part: int, parts: int) -> None:
    """Write a part of the state of the checkpoint at `path`. Each process writes its own."""
    folder = (path / part_folder(part, parts)).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    tree = host_state if parts == 1 else _global_arrays(_part(host_state, part, parts), part)
    if tree:
        checkpointer.save(folder, tree)


def try_write(path: Path) -> None:
    """Write a file in a folder with the library that Orbax uses for arrays. Importing Orbax would delay the first step."""
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "file", "path": f"{path.absolute() / STATE}/"}).result()
    store.write("trial", b"x").result()


def _global_arrays(tree: Any, rank: int) -> Any:
    """Arrays replicated over the first device of every process, with this process's as the first replica, which Orbax writes.

    Orbax refuses arrays of only one process. Nothing is sent to other processes.
    """
    first_devices = {device.process_index: device for device in reversed(jax.devices())}
    devices = [first_devices.pop(rank), *first_devices.values()]
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ("process",)), jax.sharding.PartitionSpec())
    return jax.tree.map(lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__), tree)


def _part(tree: Any, part: int, parts: int) -> dict[str, Any]:
    """Name -> leaf of a part of a tree, such as "params.head.bias"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    numbers = _divide([(leaf.shape, leaf.dtype) for _, leaf in leaves], parts)
    return {_name(path): leaf for (path, leaf), number in zip(leaves, numbers, strict=True) if number == part}


def _divide(arrays: Iterable[tuple[Sequence[int], Any]], parts: int) -> list[int]:
    """The part of each array, given by shape and dtype. Parts differ by at most the bytes of the largest array.

    Loading repeats this division. The manifest keeps the arrays of the whole state in the same order.
    """
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays]
    numbers = [0] * len(sizes)
    for place, index in enumerate(sorted(range(len(sizes)), key=lambda index: -sizes[index])):
        numbers[index] = place % parts
    return numbers


def _part_of_each(manifest: Manifest) -> dict[str, int]:
    """The part of each array of a checkpoint, by its path."""
    numbers = _divide([(shape, dtype) for dtype, shape, _ in manifest.arrays.values()], manifest.parts)
    return dict(zip(manifest.arrays, numbers, strict=True))


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def load_state(manifest: Manifest, abstract_state: Any) -> Any:
    """Load the state of a checkpoint and compare every file and array with the manifest. Each process loads independently.

    abstract_state: a tree with the shapes, dtypes and shardings to restore; fields of a named tuple that are None are not read.
    Raises CheckpointMismatch if the checkpoint holds different arrays, CorruptCheckpoint if its content changed.
    """
    left_out = tuple(f".{field}" for field, tree in _fields(abstract_state).items() if tree is None)
    stored = {name: description for name, description in manifest.arrays.items() if not name.startswith(left_out)}
    expected = describe_arrays(abstract_state)
    for name in stored.keys() | expected.keys():
        if stored.get(name, [])[:2] != expected.get(name, [])[:2]:
            there, here = _array_type(stored.get(name)), _array_type(expected.get(name))
            raise CheckpointMismatch(f"{manifest.path} holds {there} for {name}, but the run expects {here}")
    verify_files(manifest)
    try:
        state = _restore(manifest, abstract_state)
    except Exception as error:  # OSError, ValueError or a bare Exception, depending on Orbax's version
        reason = f"cannot be read although its checksums match: {first_line(error)}"
        raise UnreadableCheckpoint(f"{manifest.path / STATE} {reason}") from None
    for name, description in describe_arrays(copy_to_host(state)).items():
        if description != stored[name]:
            raise CorruptCheckpoint(f"{manifest.path / STATE} is corrupt: the checksum of the array {name} does not match")
    return state


def verify_checkpoint(manifest: Manifest) -> None:
    """Compare every file and every array of a checkpoint, of any model, with its manifest.

    Raises CorruptCheckpoint, and UnreadableCheckpoint if Orbax cannot read it.
    """
    verify_files(manifest)
    part_of = _part_of_each(manifest)
    parts = sorted({*part_of.values()})
    for name in (name for part in parts for name in state_files(manifest.path, part, manifest.parts)):
        if name not in manifest.files:
            raise CorruptCheckpoint(f"{manifest.path / name} is corrupt: {MANIFEST} does not name it")
    try:
        trees = [_read_arrays((manifest.path / part_folder(part, manifest.parts)).absolute()) for part in parts]
    except Exception as error:  # as in `load_state`
        reason = f"cannot be read although its checksums match: {first_line(error)}"
        raise UnreadableCheckpoint(f"{manifest.path / STATE} {reason}") from None
    found = Counter(
        (part, str(array)) for part, tree in zip(parts, trees, strict=True) for array in describe_arrays(tree).values()
    )
    for name, description in manifest.arrays.items():
        array = part_of[name], str(description)
        if not found[array]:
            raise CorruptCheckpoint(f"{manifest.path / STATE} is corrupt: the checksum of the array {name} does not match")
        found[array] -= 1
    if extra := found.total():
        raise CorruptCheckpoint(
            f"{manifest.path / STATE} is corrupt: it holds {plural(extra, 'array')} that {MANIFEST} does not name"
        )


def _read_arrays(path: Path) -> Any:
    """The arrays that Orbax finds in a folder, on the host."""
    import orbax.checkpoint as ocp

    checkpointer = make_checkpointer(jax.process_index())
    tree = checkpointer.metadata(path).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


def _array_type(description: list | None) -> str:
    return f"{description[0]} of shape {tuple(description[1])}" if description else "nothing"


def _fields(tree: Any) -> dict[str, Any]:
    """The fields of a named tuple; {} for other trees."""
    return tree._asdict() if hasattr(tree, "_asdict") else {}


def _restore(manifest: Manifest, abstract_state: Any) -> Any:
    import orbax.checkpoint as ocp

    checkpointer, fields = make_checkpointer(jax.process_index()), _fields(abstract_state)
    read_fields = {field: tree for field, tree in fields.items() if tree is not None}
    partial = len(read_fields) < len(fields)

    def read(part: int, tree: Any) -> Any:
        path = (manifest.path / part_folder(part, manifest.parts)).absolute()
        restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(tree, restore_args, partial_restore=partial))

    if manifest.parts == 1:
        return abstract_state._replace(**read(0, read_fields)) if partial else read(0, abstract_state)
    part_of, trees = _part_of_each(manifest), defaultdict[int, dict[str, Any]](dict)
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_state):
        trees[part_of[jax.tree_util.keystr(path)]][_name(path)] = leaf
    arrays = {name: array for part, tree in trees.items() for name, array in read(part, tree).items()}
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[_name(path)], abstract_state)


def copy_to_host(state: Any, buffers: Any = None) -> Any:
    """NumPy copies of a replicated state's arrays, from this process's first device. buffers: an earlier copy to overwrite, if
    the state has not grown since."""
    structure: Any = jax.tree.structure(state)
    if structure != jax.tree.structure(buffers):
        buffers = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), state)
    jax.tree.map(lambda leaf, buffer: np.copyto(buffer, leaf.addressable_data(0), casting="no"), state, buffers)
    return buffers


def save_error(error: Exception) -> str:
    """One line on why a save failed: the system's error message if tensorstore passes on its number."""
    if match := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(match[1]))
    return (isinstance(error, OSError) and error.strerror) or first_line(error)


def silence_orbax() -> None:
    """Suppress the tracebacks that Orbax's threads print for a failed save; jaxdp reports one line instead."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    if getattr(sys.unraisablehook, "func", None) is not _report_but_late_writes:
        sys.unraisablehook = functools.partial(_report_but_late_writes, sys.unraisablehook)
        # asyncio reports failed writes that were never awaited; the report names Orbax's code or temporary directory.
        logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())


def _report_but_late_writes(report: Callable[[Any], Any], unraisable: Any) -> None:
    """Orbax closes its event loop when an array cannot be written; each write still in flight reports to the closed loop."""
    error = unraisable.exc_value
    if not (unraisable.object is None and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        report(unraisable)
