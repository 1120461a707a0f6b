"""Tests of jaxdp.checkpoint.orbax_io."""

import asyncio
import gc
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.checkpoints import metadata, replicate
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.orbax_io import _part, silence_orbax
from jaxdp.config import Checkpoint
from jaxdp.parallel.mesh import AXES, make_mesh


def test_load_state_onto_another_mesh_restores_the_values(tmp_path):
    state = replicate(make_mesh(2, 4), x=np.arange(12.0).reshape(3, 4))
    manager = CheckpointManager(tmp_path, Checkpoint(), print)
    manager.save(state, 10, metadata(10))
    manager.wait()
    sharding = NamedSharding(make_mesh(1, 3), PartitionSpec())
    abstract = {"x": jax.ShapeDtypeStruct((3, 4), state["x"].dtype, sharding=sharding)}
    restored, _ = manager.restore(lambda samples: abstract)
    assert restored["x"].sharding == sharding
    np.testing.assert_array_equal(restored["x"], np.arange(12.0).reshape(3, 4))
    assert restored["x"].sharding.mesh.axis_names == AXES


def test_processes_write_parts_of_about_the_same_bytes():
    """Ten small arrays beside large ones: a part with as many arrays as the others would have most of the bytes."""
    sizes = {"a": 5000, "b": 3000, "c": 2000} | {f"small{n}": 10 for n in range(10)}
    tree = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    parts = [_part(tree, number, 2) for number in range(2)]
    assert sorted(number for numbers, _ in parts for number in numbers) == list(range(13))
    assert [sum(leaf.nbytes for leaf in part.values()) for _, part in parts] == pytest.approx([4 * 5050] * 2, abs=40)
    wide = {"f": np.zeros(100, np.float64), "h": np.zeros(100, np.float16), "i": np.zeros(100, np.float16)}
    assert [sorted(_part(wide, number, 2)[1]) for number in range(2)] == [["f"], ["h", "i"]]


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


def test_silence_orbax_drops_asyncio_reports_of_its_writers_only(caplog):
    silence_orbax()

    async def fail_in(path):
        namespace = {}
        exec(compile("async def write(): raise ValueError('disk full')", path, "exec"), namespace)
        task = asyncio.ensure_future(namespace["write"]())
        await asyncio.sleep(0)  # the task fails and nothing awaits it
        del task

    async def fail_with(error):
        asyncio.get_running_loop().create_future().set_exception(error)

    for failure in (
        fail_in("/packages/orbax/checkpoint/type_handlers.py"),
        fail_with(ValueError("Error writing /runs/a/checkpoints/saving-1/state.orbax-checkpoint-tmp/d: File too large")),
        fail_in("/users/code.py"),
    ):
        asyncio.run(failure)
        gc.collect()
    (record,) = caplog.records
    assert "/users/code.py" in record.getMessage()
