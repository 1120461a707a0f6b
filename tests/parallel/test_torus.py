"""Meshes along the network of TPU slices. The devices are like those of JAX's topologies, which libtpu makes without a TPU."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils
from rich.table import Table
from scipy.sparse import csgraph

import jaxdp
from jaxdp.analysis import aot
from jaxdp.cli import main
from jaxdp.cli import plan as plan_command
from jaxdp.config import Config, Model, Phase
from jaxdp.data import prefetch
from jaxdp.distributed import runtime
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.parallel import torus
from jaxdp.planning import make_plan
from jaxdp.recipes import load_config
from jaxdp.session import assembly
from jaxdp.setup.prepare import prepare
from jaxdp.training import step_compiler

V5E, V4 = "TPU v5 lite", "TPU v4"


def slice_of(kind, x, y, z=1):
    """The devices of a slice in JAX's order: by process, each of which has 2x2 neighboring chips."""
    coords = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    processes = [(k * (y // 2) + j // 2) * (x // 2) + i // 2 for i, j, k in coords]
    fields = {"platform": "tpu", "device_kind": kind, "core_on_chip": 0}
    order = sorted(range(len(coords)), key=lambda index: (processes[index], index))
    return [SimpleNamespace(id=n, coords=coords[n], process_index=processes[n], **fields) for n in order]


def mesh_of(devices, *shape):
    """A mesh of `make_mesh`, for devices that JAX does not know."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            jax.sharding, "Mesh", lambda array, axes, *, axis_types: SimpleNamespace(devices=array, size=array.size)
        )
        return jaxdp.make_mesh(*shape, devices=devices)


def distances(devices, closed):
    """Hops between any two devices, as shortest paths over the links of the chips, by SciPy."""
    sides = 1 + np.max([device.coords for device in devices], axis=0)
    link = np.zeros((len(devices), len(devices)))
    for (a, one), (b, other) in itertools.permutations(enumerate(devices), 2):
        steps = np.abs(np.subtract(one.coords, other.coords))
        if steps.sum() == 1 or (closed and np.count_nonzero(steps) == 1 and (steps == sides - 1).any()):
            link[a, b] = 1
    found = csgraph.shortest_path(link, unweighted=True)
    return {(one.id, other.id): found[a, b] for a, one in enumerate(devices) for b, other in enumerate(devices)}


def hops(array, distance):
    """Of the rings of columns and rows, between neighbors."""
    pairs = [zip(array.ravel(), np.roll(array, -1, axis).ravel(), strict=True) for axis in (0, 1)]
    return tuple(int(max(distance[one.id, other.id] for one, other in each)) for each in pairs)


@pytest.mark.parametrize(
    ("kind", "sides", "closed", "given", "shape", "expected"),
    [
        (V5E, (2, 4), False, (), (2, 4), (1, 3)),  # an open axis of n chips is a ring whose ends are n - 1 hops apart
        (V5E, (4, 8), False, (), (4, 8), (3, 7)),
        (V5E, (8, 8), False, (), (8, 8), (7, 7)),
        (V5E, (16, 16), True, (), (16, 16), (1, 1)),
        (V4, (2, 2, 2), False, (), (2, 4), (1, 1)),
        (V4, (4, 4, 4), True, (), (4, 16), (1, 1)),
        ("TPU v5", (4, 4, 8), True, (), (8, 16), (1, 1)),
        ("TPU v5", (2, 2, 4), False, (), (2, 8), (1, 1)),  # more square are 4x4, with rows of 3 hops
        ("TPU v5", (2, 4, 4), False, (), (2, 16), (1, 1)),
        (V5E, (4, 8), False, (1, 32), (1, 32), (0, 1)),  # two axes that a row visits point by point
        (V5E, (4, 8), False, (None, 4), (8, 4), (7, 3)),
        (V4, (4, 4, 4), True, (16, None), (16, 4), (1, 1)),
    ],
)
def test_rows_and_columns_follow_the_axes_of_a_slice(kind, sides, closed, given, shape, expected):
    devices = slice_of(kind, *sides)
    mesh = mesh_of(devices, *given)
    assert mesh.devices.shape == shape
    assert sorted(device.id for device in mesh.devices.flat) == list(range(len(devices)))
    distance = distances(devices, closed)
    assert hops(mesh.devices, distance) == expected
    of_jax = hops(mesh_utils.create_device_mesh(shape, devices), distance)
    assert max(expected) <= max(of_jax)
    texts = {1: "1 hop", 3: "3 hops", 7: "7 hops"}
    column = f"{texts[expected[0]]} apart in a column and " if expected[0] else ""  # a column of one chip has no neighbors
    assert torus.describe_layout(mesh, devices).endswith(f"are at most {column}{texts[expected[1]]} apart in a row")


def test_jax_separates_neighbors_of_the_smallest_slice():
    """The reason not to call `jax.make_mesh`."""
    devices = slice_of(V5E, 2, 4)
    assert hops(mesh_utils.create_device_mesh((2, 4), devices), distances(devices, closed=False)) == (4, 2)


@pytest.mark.parametrize(
    ("whole", "shape", "slice_name"),
    [
        (slice_of(V5E, 4, 8), (2, 16), "4x8x1 slice of TPU v5 lite"),
        (slice_of(V4, 4, 4, 4), (4, 6), "4x4x4 slice of TPU v4"),  # a plane and a half of a cube, whose axes are closed
    ],
)
def test_a_shape_that_no_axes_have_takes_consecutive_devices_and_is_named_with_its_hops(whole, shape, slice_name):
    devices = whole[: shape[0] * shape[1]]
    mesh = mesh_of(devices, *shape)
    assert mesh.devices.ravel().tolist() == devices
    columns, rows = hops(mesh.devices, distances(whole, closed="v4" in slice_name))
    expected = "consecutive devices, because no axes fit: neighbors are at most "
    expected += f"{columns} hops apart in a column and {rows} hops apart in a row"
    part = f"; for a part of a slice XLA may refuse the step: if so, use all {len(whole)} devices"
    expected = f"mesh {shape[0]}x{shape[1]} on a {slice_name}, {expected}{part * (len(devices) < len(whole))}"
    assert torus.describe_layout(mesh, whole) == expected


def test_a_run_on_a_part_of_a_slice_follows_the_axes_of_that_part():
    """Half of the chips of each process are every second column."""
    used = [device for device in slice_of(V5E, 4, 8) if device.coords[1] % 2 == 0]
    assert mesh_of(used).devices.shape == (4, 4)
    assert torus.describe_layout(mesh_of(used), used).endswith("at most 3 hops apart in a column and 6 hops apart in a row")
    cubes = slice_of(V4, 4, 4, 8)  # a half of whose last axis is open
    assert "at most 1 hop apart in a column and 3 hops" in str(torus.describe_layout(mesh_of(cubes[:64], 16, 4), cubes))
    assert torus.default_rows([SimpleNamespace(process_index=0, platform="gpu")] * 8) is None
    assert torus.describe_layout(jaxdp.make_mesh(2, 4), jax.devices()) is None


def test_two_cores_of_a_chip_are_no_hops_apart():
    devices = [*slice_of("TPU v3", 1, 1), *slice_of("TPU v3", 1, 1)]
    devices[1].core_on_chip = 1
    layout = "mesh 1x2 on a 1x1x1 slice of TPU v3, along its axes: neighbors are at most 0 hops apart in a row"
    assert torus.describe_layout(mesh_of(devices, 1, 2), devices) == layout


def test_each_process_loads_the_rows_of_its_own_devices(monkeypatch):
    devices = slice_of(V5E, 4, 8)
    mesh = mesh_of(devices)
    for process in range(8):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        own = [index for index, device in enumerate(mesh.devices.flat) if device.process_index == process]
        assert own != list(range(own[0], own[0] + 4))  # a row of the mesh is no row of hosts
        assert prefetch.local_rows(mesh, 64).tolist() == [row for index in own for row in (2 * index, 2 * index + 1)]


def test_a_run_takes_the_rows_of_its_slice_and_says_how_its_mesh_lies(monkeypatch):
    devices, group = slice_of(V5E, 4, 8), ProcessGroup()
    monkeypatch.setattr(runtime, "start", lambda *_, **__: devices)
    config = Config(model=Model(norm="synchronized"), batch=(Phase(32, until_epoch=1), Phase(16)))
    plan, *_ = prepare(config, group=group)
    assert [phase.shape for phase in plan.phases] == [(4, 8), (4, 4)]
    monkeypatch.setattr(jax.sharding, "Mesh", lambda array, axes, *, axis_types: SimpleNamespace(devices=array))
    prepared = SimpleNamespace(plan=plan, devices=devices, summary={"statistics": 0}, saved_batches=None)
    lines = [line for line in assembly._warnings(prepared, group) if line.startswith("mesh ")]
    assert [line.partition(",")[0] for line in lines] == [
        f"mesh {shape} slice of {V5E}" for shape in ("4x8 on a 4x8x1", "4x4 on a 4x8x1")
    ]
    for device in devices[16:]:
        device.slice_index = 1
    (line,) = {line for line in assembly._warnings(prepared, group) if line.startswith("mesh 4x8")}
    assert line == f"mesh 4x8 on several slices of {V5E}: consecutive devices"


class Traced(Exception):
    """Carries the mesh of a step that is not compiled."""


@pytest.mark.parametrize(
    ("name", "devices", "batches"),
    [
        ("v5e:4x8", slice_of(V5E, 4, 8), (64, 32)),
        ("v5p:2x2x4", slice_of("TPU v5", 2, 2, 4), (32, 16)),
        ("v5p:4x4x4", slice_of("TPU v5", 4, 4, 4), (64, 32)),
    ],
)
def test_plan_compiler_and_run_take_the_same_devices_of_a_slice(name, devices, batches, monkeypatch, capsys):
    def traced(*_, mesh):
        raise Traced(mesh.devices)

    monkeypatch.setattr(aot, "devices_of", lambda *_: devices)
    monkeypatch.setattr(aot, "unavailable_reason", lambda platform: None)
    monkeypatch.setattr(runtime, "start", lambda *_, **__: devices)
    monkeypatch.setattr(jax.sharding, "Mesh", lambda array, axes, *, axis_types: SimpleNamespace(devices=array))
    monkeypatch.setattr(plan_command, "_compiled", lambda *_: ({}, Table()))
    group = SimpleNamespace(num_processes=len(devices) // 4, status=ProcessGroup().status)
    flags = ["--model.norm", "synchronized", "--reduce.strategy", "torus"]
    for index, batch in enumerate(batches):
        flags += [f"--batch.{index}.global-batch", str(batch), f"--batch.{index}.per-worker-batch", "1"]
    plan, *_ = prepare(load_config("digits", flags), group=group)
    assert plan == make_plan(plan.config, examples=plan.examples, **aot.sizes_of(name))
    main.main(["plan", "--json", "--network", "v5e", "--compile-for", name, *flags])
    document = json.loads(capsys.readouterr().out)
    assert [(phase["vertical"], phase["horizontal"]) for phase in document["phases"]] == [phase.shape for phase in plan.phases]
    meshes = [step_compiler.mesh_of(phase, devices) for phase in plan.phases]
    assert document["layouts"] == list(dict.fromkeys(torus.describe_layout(mesh, devices) for mesh in meshes))
    assert document["network"]["hops"] == max(max(torus.hops(mesh.devices, devices)) for mesh in meshes) > 0
    monkeypatch.setattr(step_compiler, "trace_train_step", traced)  # not before: the plan traces too
    for phase, mesh in zip(plan.phases, meshes, strict=True):
        with pytest.raises(Traced) as compiled:
            aot.compile_for(plan, phase.index, target=name)
        assert compiled.value.args[0].tolist() == mesh.devices.tolist()
        assert {process: 4 * phase.devices // len(devices) for process in range(len(devices) // 4)} == Counter(
            device.process_index for device in mesh.devices.flat
        )


def test_plan_prints_the_layout_of_each_mesh_on_the_slice_of_this_machine(monkeypatch, capsys):
    devices = slice_of(V5E, 2, 4)
    for device in devices:
        device.memory_stats = dict
    monkeypatch.setattr(runtime, "start", lambda *_, **__: devices)
    monkeypatch.setattr(jax.sharding, "Mesh", lambda array, axes, *, axis_types: SimpleNamespace(devices=array))
    main.main(["plan", "--model.depth", "18", "--model.width", "4", "--batch.0.per-worker-batch", "16"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mesh ")]
    assert [line.partition(",")[0] for line in lines] == [f"mesh {shape} on a 2x4x1 slice of {V5E}" for shape in ("2x2", "2x4")]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(("kind", "sides"), [(V5E, (2, 4)), (V5E, (4, 8)), (V5E, (8, 8)), ("TPU v5", (4, 4, 4))])
def test_these_devices_are_those_of_jaxs_topologies(kind, sides):
    name = f"{'v5e' if kind == V5E else 'v5p'}:{'x'.join(map(str, sides))}"
    code = (
        "from jax.experimental import topologies\n"
        f"for d in topologies.get_topology_desc(platform='tpu', topology_name='{name}').devices:\n"
        "    print(d.id, *d.coords, d.process_index, d.core_on_chip, d.platform, d.device_kind)"
    )
    variables = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, check=True)
    expected = [
        f"{d.id} {' '.join(map(str, d.coords))} {d.process_index} {d.core_on_chip} {d.platform} {d.device_kind}"
        for d in slice_of(kind, *sides)
    ]
    assert out.stdout.splitlines() == expected
