import dataclasses
import re
import sys
import tracemalloc
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from helpers.checkpoints import metadata, replicate

from jaxdp.checkpoint.checksums import describe_arrays
from jaxdp.checkpoint.manifest import (
    CorruptCheckpoint,
    Manifest,
    UnreadableCheckpoint,
    file_checksum,
    part_folder,
    read_manifest,
    state_files,
)
from jaxdp.checkpoint.orbax_io import CheckpointMismatch, _part, load_state, make_checkpointer, silence_orbax, verify_checkpoint
from jaxdp.parallel.mesh import make_mesh


def test_processes_write_parts_of_about_the_same_bytes():
    """Of arrays of any sizes; by bytes and not by elements."""
    random = np.random.default_rng(0)
    dtypes = [np.float64, np.float32, np.float16]
    tree = {
        "a": {f"{n}": np.zeros(random.integers(1, 10_000), dtypes[n % 3]) for n in range(40)},
        "b": (np.zeros(1), np.zeros(2)),
    }
    parts = [_part(tree, number, 3) for number in range(3)]
    assert sorted(name for part in parts for name in part) == sorted([*(f"a.{n}" for n in range(40)), "b.0", "b.1"])
    sizes = [sum(leaf.nbytes for leaf in part.values()) for part in parts]
    assert max(sizes) - min(sizes) <= max(leaf.nbytes for leaf in tree["a"].values())


class State(NamedTuple):
    params: dict
    opt_state: tuple | None


@pytest.mark.parametrize("parts", [1, 2])
def test_fields_that_are_none_are_not_read_from_any_number_of_parts(tmp_path, parts):
    """Arrays of equal sizes, so that their order decides in which part each is."""
    mesh = make_mesh(1, 1, jax.devices()[:1])
    host = State({name: np.full(3, number, np.float32) for number, name in enumerate("cab")}, (np.zeros(3, np.float32),) * 2)
    state, folder = replicate(mesh, **host._asdict()), tmp_path / "10"
    for part in range(parts):
        tree = State(**state) if parts == 1 else _part(State(**state), part, parts)
        make_checkpointer(0).save((folder / part_folder(part, parts)).absolute(), tree)
    files = {name: file_checksum(folder / name) for part in range(parts) for name in state_files(folder, part, parts)}
    manifest = Manifest(folder, 10, metadata(10), describe_arrays(host), files, parts)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), State(**state))
    found = load_state(manifest, abstract._replace(opt_state=None))
    assert found.opt_state is None
    jax.tree.map(np.testing.assert_array_equal, found.params, host.params)
    jax.tree.map(np.testing.assert_array_equal, load_state(manifest, abstract), host)
    verify_checkpoint(manifest)
    for name, (dtype, shape, checksum) in manifest.arrays.items():  # as if memory had failed before the file was written
        changed = manifest.arrays | {name: [dtype, shape, checksum[::-1]]}
        with pytest.raises(CorruptCheckpoint, match=rf"the checksum of the array {re.escape(name)} does not match"):
            verify_checkpoint(dataclasses.replace(manifest, arrays=changed))
        fewer = {other: description for other, description in manifest.arrays.items() if other != name}
        with pytest.raises(CorruptCheckpoint, match=r"holds 1 array that manifest\.json does not name"):
            verify_checkpoint(dataclasses.replace(manifest, arrays=fewer))
    with pytest.raises(CheckpointMismatch, match=r"holds float32 of shape .* but the run expects nothing"):
        load_state(manifest, State({"a": abstract.params["a"]}, None))


def test_a_number_of_parts_that_is_not_the_checkpoints_takes_no_memory(saved):
    manifest = dataclasses.replace(read_manifest(saved[0] / "10"), parts=10**6)
    tracemalloc.start()
    with pytest.raises(UnreadableCheckpoint, match="cannot be read although its checksums match"):
        load_state(manifest, saved[1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_silence_orbax_drops_late_write_errors_only(monkeypatch):
    passed = []
    monkeypatch.setattr(sys, "unraisablehook", passed.append)
    silence_orbax()
    silence_orbax()  # a second call changes nothing
    late = SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed"))
    others = [
        SimpleNamespace(object=None, exc_value=RuntimeError("another")),
        SimpleNamespace(object=None, exc_value=ValueError("Event loop is closed")),
        SimpleNamespace(object=print, exc_value=RuntimeError("Event loop is closed")),
    ]
    for unraisable in (late, *others):
        sys.unraisablehook(unraisable)
    assert passed == others
