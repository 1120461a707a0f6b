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


def make_checkpointer(rank: int, num_processes: int, *, all_processes: bool) -> ocp.StandardCheckpointer:
    """An Orbax checkpointer for this process or for all processes of the run.

    The processes synchronize by messages: Orbax's collectives would interleave with those of the training step.
    """
    async_options = ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT_SECONDS)
    if num_processes == 1:
        return ocp.StandardCheckpointer(async_options=async_options)
    active = set(range(num_processes)) if all_processes else {rank}
    options = ocp.options.MultiprocessingOptions(
        primary_host=0 if all_processes else rank,
        active_processes=active,
        barrier_sync_key_prefix="all" if all_processes else f"rank {rank}",
    )
    return ocp.StandardCheckpointer(multiprocessing_options=options, async_options=async_options)


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
        with make_checkpointer(jax.process_index(), jax.process_count(), all_processes=False) as checkpointer:
            state = checkpointer.restore((manifest.path / STATE).absolute(), abstract_state)
    except Exception as error:  # OSError, ValueError or a bare Exception, depending on Orbax's version
        raise UnreadableCheckpoint(
            f"{manifest.path / STATE} cannot be read although its checksums match: {first_line(error)}"
        ) from None
    for name, description in describe_arrays(copy_to_host(state)).items():
        if description != stored[name]:
            raise CorruptCheckpoint(f"{manifest.path / STATE} is corrupt: the checksum of the array {name} does not match")
    return state


def write_state(checkpointer: ocp.StandardCheckpointer, path: Path, host_state: Any, *, num_processes: int) -> None:
    """Write the state folder of the checkpoint at `path` and wait until it is complete. All processes call this."""
    checkpointer.save((path / STATE).absolute(), _shard_over_processes(host_state, num_processes))
    checkpointer.wait_until_finished()


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


def _shard_over_processes(host_state: Any, num_processes: int) -> Any:
    """With several processes, arrays sharded over them, so that each process writes a part of the checkpoint.

    Orbax would split replicated arrays on the devices while the step runs. On CPU devices that deadlocks: the splits occupy all
    slots for single-device programs and wait for threads that wait for them in a collective.
    """
    if num_processes == 1:
        return host_state
    first_devices: dict[int, jax.Device] = {}
    for device in jax.devices():
        first_devices.setdefault(device.process_index, device)
    mesh = jax.sharding.Mesh(np.array([first_devices[rank] for rank in sorted(first_devices)]), ("process",))

    def shard(leaf: np.ndarray) -> jax.Array:
        axis = next((axis for axis, size in enumerate(leaf.shape) if size and size % num_processes == 0), None)
        spec = () if axis is None else (*[None] * axis, "process")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)

    return jax.tree.map(shard, host_state)


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
