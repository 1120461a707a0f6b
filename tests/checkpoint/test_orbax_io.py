import dataclasses
import errno
import logging
import re
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from helpers.checkpoints import metadata, replicate

from jaxdp.checkpoint.manifest import (
    CheckpointError,
    CorruptCheckpoint,
    Manifest,
    UnreadableCheckpoint,
    file_checksum,
    part_folder,
    read_manifest,
    state_files,
)
from jaxdp.checkpoint.orbax_io import (
    CheckpointMismatch,
    _part,
    copy_to_host,
    load_state,
    make_checkpointer,
    save_error,
    silence_orbax,
    try_write,
    verify_checkpoint,
    write_state,
)
from jaxdp.checkpoint.replicas import describe_arrays
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


def test_arrays_are_in_the_parts_in_which_released_versions_put_them():
    """The largest first, of equal ones the first first: a checkpoint does not name the part of an array."""
    tree = {name: np.zeros(size, np.float32) for name, size in zip("abcdef", (1, 5, 3, 3, 5, 2), strict=True)}
    assert [list(_part(tree, number, 3)) for number in range(3)] == [["b", "d"], ["e", "f"], ["a", "c"]]


class State(NamedTuple):
    params: dict
    opt_state: tuple | None


@pytest.mark.parametrize("parts", [1, 2])
def test_fields_that_are_none_are_not_read_from_any_number_of_parts(tmp_path, parts):
    """Arrays of equal sizes, so that their order decides the part of each."""
    mesh = make_mesh(1, 1, jax.devices()[:1])
    host = State({name: np.full(3, number, np.float32) for number, name in enumerate("cab")}, (np.zeros(3, np.float32),) * 2)
    state, folder = replicate(mesh, **host._asdict()), tmp_path / "10"
    for part in range(parts):
        if part == 0:
            write_state(make_checkpointer(0), folder, host, part=part, parts=parts)
        else:  # in place of another process
            make_checkpointer(0).save((folder / part_folder(part, parts)).absolute(), _part(State(**state), part, parts))
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
        with pytest.raises(CorruptCheckpoint, match=rf"the checksum of the array {re.escape(name)} does not match"):
            load_state(dataclasses.replace(manifest, arrays=changed), abstract)
        fewer = {other: description for other, description in manifest.arrays.items() if other != name}
        one_more = r"holds 1 array that manifest\.json does not name"  # without it, other arrays may be in other parts
        with pytest.raises(CorruptCheckpoint, match=one_more if parts == 1 else f"{one_more}|does not match"):
            verify_checkpoint(dataclasses.replace(manifest, arrays=fewer))
    twice = manifest.arrays | {".params['d']": manifest.arrays[".params['a']"]}
    with pytest.raises(CorruptCheckpoint, match=r"the array .params\['[ad]'\] does not match"):
        verify_checkpoint(dataclasses.replace(manifest, arrays=twice))
    for name in files:  # which an upload would leave out
        fewer = {other: checksum for other, checksum in files.items() if other != name}
        with pytest.raises(CorruptCheckpoint, match=rf"{re.escape(name)} is corrupt: manifest\.json does not name it"):
            verify_checkpoint(dataclasses.replace(manifest, files=fewer))
    for number in {1, 2, 3, 5, 10**6} - {parts}:
        with pytest.raises(CheckpointError):
            verify_checkpoint(dataclasses.replace(manifest, parts=number))
    with pytest.raises(CheckpointMismatch, match=r"holds float32 of shape .* but the run expects nothing"):
        load_state(manifest, State({"a": abstract.params["a"]}, None))


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("float32 of shape (3,)", "float32 of shape (4,)"),
        ("float32 of shape (3,)", "int32 of shape (3,)"),
        ("nothing", "float32 of shape (3,)"),
        ("float32 of shape (3,)", "nothing"),
    ],
)
def test_arrays_that_are_not_the_requested_ones_are_named(saved, there, here):
    (name, abstract), manifest = *saved[1].items(), read_manifest(saved[0] / "10")
    if there == "nothing":
        name, expected = "y", {name: abstract, "y": abstract}
    elif here == "nothing":
        expected = {}
    else:
        dtype, length = re.fullmatch(r"(\w+) of shape \((\d),\)", here).groups()
        expected = {name: jax.ShapeDtypeStruct((int(length),), dtype, sharding=abstract.sharding)}
    with pytest.raises(CheckpointMismatch) as error:
        load_state(manifest, expected)
    assert str(error.value) == f"{manifest.path} holds {there} for ['{name}'], but the run expects {here}"


def test_paths_may_be_relative(saved, monkeypatch):
    monkeypatch.chdir(saved[0])
    manifest = read_manifest(Path("10"))
    np.testing.assert_array_equal(load_state(manifest, saved[1])["x"], np.arange(3.0))
    verify_checkpoint(manifest)
    try_write(Path("trial"))
    assert Path("trial/state/trial").read_bytes() == b"x"
    write_state(make_checkpointer(0), Path("20"), {"x": np.arange(4.0)}, part=0, parts=2)
    write_state(make_checkpointer(0), Path("30"), {}, part=0, parts=2)
    assert (state_files(Path("20"), 0, 2) != [], [*Path("30/state").iterdir()]) == (True, [])


def test_copy_to_host_overwrites_the_arrays_of_an_earlier_copy():
    mesh = make_mesh(2, 2)
    first = copy_to_host(replicate(mesh, x=np.arange(3.0), y=np.int8(1)))
    assert {name: (array.dtype.name, array.shape) for name, array in first.items()} == {
        "x": ("float32", (3,)),
        "y": ("int8", ()),
    }
    second = copy_to_host(replicate(mesh, x=np.ones(3), y=np.int8(2)), first)
    assert all(second[name] is first[name] for name in "xy")
    np.testing.assert_array_equal(first["x"], np.ones(3))
    assert first["y"] == 2
    with pytest.raises(TypeError, match="Cannot cast"):
        copy_to_host(replicate(mesh, x=np.ones(3, np.int32), y=np.int8(2)), first)


def test_save_error_is_the_systems_message_or_else_one_line():
    for error, expected in (
        (ValueError("UNKNOWN: x [os_error_code='28'] [y]"), "No space left on device"),
        (OSError(errno.EIO, "Input/output error", "file"), "Input/output error"),
        (OSError("no number"), "no number"),
        (RuntimeError("first\nsecond"), "first"),
    ):
        assert save_error(error) == expected


def test_a_number_of_parts_that_is_not_the_checkpoints_takes_no_memory(saved):
    manifest = dataclasses.replace(read_manifest(saved[0] / "10"), parts=10**6)
    tracemalloc.start()
    with pytest.raises(UnreadableCheckpoint, match="cannot be read although its checksums match"):
        load_state(manifest, saved[1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_silence_orbax_drops_late_write_errors_only(monkeypatch):
    passed, asyncio = [], logging.getLogger("asyncio")
    monkeypatch.setattr(sys, "unraisablehook", passed.append)
    monkeypatch.setattr(asyncio, "filters", [])
    silence_orbax()
    silence_orbax()  # a second call changes nothing
    assert len(asyncio.filters) == 1
    messages = {text: logging.makeLogRecord({"msg": text}) for text in ("task of orbax.py", "another")}
    assert [text for text, record in messages.items() if asyncio.filter(record)] == ["another"]
    assert not logging.getLogger("absl").isEnabledFor(logging.ERROR)
    late = SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed"))
    others = [
        SimpleNamespace(object=None, exc_value=RuntimeError("another")),
        SimpleNamespace(object=None, exc_value=ValueError("Event loop is closed")),
        SimpleNamespace(object=print, exc_value=RuntimeError("Event loop is closed")),
    ]
    for unraisable in (late, *others):
        sys.unraisablehook(unraisable)
    assert passed == others
