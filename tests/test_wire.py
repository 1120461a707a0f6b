"""The account of what a step sends, on steps traced and lowered for meshes that are not there."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.config import Config, Data, Model, Phase, Reduce
from jaxdp.parallel import allreduce, wire
from jaxdp.parallel.hlo import replica_groups
from jaxdp.parallel.mesh import AXES, abstract_mesh
from jaxdp.planning import make_plan
from jaxdp.recipes import load_config
from jaxdp.training.programs import wire_account

ELEMENTS = 100_001


def account(strategy, mesh_shape, wire_dtype=None, bucket_bytes=None):
    """The collectives of the mean of one vector."""
    mesh = abstract_mesh(*mesh_shape)

    def per_device(x):
        return allreduce.mean(lax.pcast(x, AXES, to="varying"), strategy, wire_dtype, bucket_bytes)

    proven = allreduce.proves_replication(strategy)
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=proven)
    traced = jax.jit(mapped).trace(jax.ShapeDtypeStruct((ELEMENTS,), jnp.float32))
    return wire.Account(*mesh_shape, strategy, (0,), tuple(wire.collectives(traced.jaxpr, dict(mesh.shape))))


def test_the_torus_sends_the_three_messages_of_the_paper():
    padded = 2 * 100_004
    assert account("torus", (2, 4), jnp.bfloat16).found == (
        wire.Collective("reduce-scatter", ("horizontal",), 4, "bfloat16", padded, 1),
        wire.Collective("all-reduce", ("vertical",), 2, "bfloat16", padded // 4, 1),
        wire.Collective("all-gather", ("horizontal",), 4, "bfloat16", padded // 4, 1),
    )


def test_a_ring_exchanges_2_n_minus_1_times_with_its_neighbour():
    part = 4 * math.ceil(ELEMENTS / 1024)
    assert account("ring", (32, 32)).found == (wire.Collective("permute", AXES, 1024, "float32", part, 2 * 1023),)


def test_hierarchical_carries_the_whole_vector_along_both_axes_and_tells_what_masters_would():
    told = account("hierarchical", (4, 8))
    size = 4 * ELEMENTS
    assert told.found == (
        wire.Collective("all-reduce", ("horizontal",), 8, "float32", size, 1),
        wire.Collective("all-reduce", ("vertical",), 4, "float32", size, 1),
    )
    masters = wire.masters_only(told)
    assert masters["vertical_bytes_all_columns"] == 8 * masters["vertical_bytes_masters_only"]
    assert masters["vertical_bytes_masters_only"] == 2 * (4 - 1) * size
    assert masters["master_sends"] == pytest.approx(2 * 3 / 4 * size + size)  # the ring of masters, then its row
    assert masters["others_send_at_most"] == 2 * size
    row = wire.masters_only(account("hierarchical", (1, 8)))
    assert (row["master_sends"], row["others_send_at_most"]) == (size, 2 * size)


def test_hierarchical_is_kept_from_being_folded_into_one():
    mesh = abstract_mesh(2, 4)
    mapped = jax.shard_map(
        lambda x: allreduce.mean(x, "hierarchical"), mesh=mesh, in_specs=PartitionSpec(AXES), out_specs=PartitionSpec()
    )
    traced = jax.jit(mapped).trace(jax.ShapeDtypeStruct((8, 100), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    order = re.findall(r"stablehlo\.(all_reduce|optimization_barrier)", text)
    assert order == ["all_reduce", "optimization_barrier", "all_reduce"]


def test_phases_that_send_something_else_have_accounts_of_their_own():
    from jaxdp.training.programs import wire_accounts

    config = Config(
        data=Data(source="synthetic", image_size=16),
        model=Model(depth=6, width=8, stem="small", classes=7, norm="synchronised"),
        batch=(Phase(64, until_epoch=1.0, per_worker_batch=8), Phase(256, until_epoch=2.0, per_worker_batch=8), Phase(64)),
        epochs=3.0,
    )
    config = dataclasses.replace(config, batch=(*config.batch[:2], Phase(64, per_worker_batch=8)))
    accounts = wire_accounts(make_plan(config, 4096, 8))
    assert [one.phases for one in accounts] == [(0, 2), (1,)]  # four micro-batches normalise together four times as often
    assert accounts[1].sent[0] > accounts[0].sent[0]


def test_the_server_sends_and_takes_what_all_others_do_together():
    told = account("parameter_server", (2, 4))
    sent = told.sent
    assert sent[0] == 7 * 4 * ELEMENTS
    assert sent[1:] == [4 * ELEMENTS] * 7


@pytest.mark.parametrize("mesh_shape", [(1, 8), (8, 1), (2, 4), (16, 24)])
@pytest.mark.parametrize("strategy", ["psum", "ring", "torus"])
def test_a_device_sends_2_n_minus_1_over_n_of_the_padded_message(strategy, mesh_shape):
    devices = math.prod(mesh_shape)
    unit = {"psum": 1, "ring": devices, "torus": mesh_shape[1]}[strategy]
    padded = 4 * math.ceil(ELEMENTS / unit) * unit
    for sent in account(strategy, mesh_shape).sent:
        assert sent == pytest.approx(2 * (devices - 1) / devices * padded)


@pytest.mark.parametrize("strategy", list(allreduce.STRATEGIES))
def test_one_device_sends_nothing(strategy):
    assert account(strategy, (1, 1)).found == ()


def test_a_collective_in_a_scan_counts_as_often_as_it_runs_and_in_a_while_not_at_all():
    mesh = abstract_mesh(1, 4)

    def scanned(x):
        return lax.scan(lambda c, _: (lax.pcast(lax.psum(c, AXES), AXES, to="varying"), None), x, None, length=5)[0]

    def looped(x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: lax.pcast(lax.psum(c, AXES), AXES, to="varying"), x)

    def traced(function):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(AXES), out_specs=PartitionSpec(AXES))
        return jax.jit(mapped).trace(jax.ShapeDtypeStruct((8,), jnp.float32)).jaxpr

    assert wire.collectives(traced(scanned), dict(mesh.shape)) == [wire.Collective("all-reduce", AXES, 4, "float32", 8, 5)]
    with pytest.raises(ValueError, match="all-reduce in a while loop: how often it runs is not known"):
        wire.collectives(traced(looped), dict(mesh.shape))


def step_account(devices=8, **changes) -> wire.Account:
    """What the step of a tiny net sends."""
    config = Config(
        data=Data(source="synthetic", image_size=16),
        model=Model(depth=6, width=32, stem="small", classes=7),
        batch=(Phase(global_batch=64, per_worker_batch=2),),
    )
    config = dataclasses.replace(config, **changes)
    return wire_account(config, make_plan(config, 4096, devices).phases[0])


def test_accumulation_does_not_multiply_communication():
    config = Config(batch=(Phase(global_batch=64, per_worker_batch=8),))
    assert step_account().found == step_account(batch=config.batch).found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("strategy", list(allreduce.STRATEGIES))
def test_gradients_travel_in_the_wire_dtype_and_statistics_together_in_float32(strategy, dtype):
    told = step_account(reduce=Reduce(strategy=strategy, wire_dtype=dtype, bucket_bytes=None, overlap=False))
    first = [one for one in told.found if one.operation == told.found[0].operation and one.axes == told.found[0].axes]
    messages = sorted({(-one.operand_bytes, one.dtype) for one in first})
    assert [name for _, name in messages] == [dtype, "float32"]  # one of gradients, one of the smaller statistics


def test_smaller_buckets_are_more_messages_of_the_same_bytes():
    one, many = (step_account(reduce=Reduce(strategy="psum", bucket_bytes=size, overlap=False)) for size in (None, 1))
    assert sum(c.count for c in one.found) == 2
    assert sum(c.count for c in many.found) > 10
    assert sum(c.count * c.operand_bytes for c in one.found) == sum(c.count * c.operand_bytes for c in many.found)


def written_groups(attributes: str, vertical: int, horizontal: int) -> tuple:
    """The groups of devices that StableHLO names one by one, or from JAX 0.12 on by mesh axes."""
    if by_axes := re.search(r"replica_group_mesh_axes<mesh = @\w+, axes = \[(.*?)\]>", attributes):
        (axis,) = re.findall(r'name = "(\w+)"', by_axes[1])
        rows, columns = rows_and_columns(vertical, horizontal)
        return {"horizontal": rows, "vertical": columns}[axis]
    dense = re.search(r"replica_groups = dense<(.*?)> : tensor<(\d+)x(\d+)xi64>", attributes, re.DOTALL)
    if dense[1].startswith('"'):
        raw = np.frombuffer(bytes.fromhex(dense[1].strip('"').removeprefix("0x")), "<i8")
    else:
        raw = np.array([int(n) for n in re.findall(r"\d+", dense[1])])
    return tuple(map(tuple, raw.reshape(int(dense[2]), int(dense[3])).tolist()))


def lowered_groups(text: str, vertical: int, horizontal: int) -> dict:
    """(operation, groups) -> bytes put in, read from StableHLO: independent of the account, which reads the jaxpr."""
    meshes = set(re.findall(r"sdy\.mesh @\w+ = <\[(.*?)\]>", text))
    assert meshes <= {f'"vertical"={vertical}, "horizontal"={horizontal}'}
    sizes = {"f16": 2, "bf16": 2, "f32": 4}
    found = {}
    pattern = re.compile(
        r'"stablehlo\.(all_reduce|reduce_scatter|all_gather)"\(.*?\}> .*?\(tensor<([\dx]+)x(f16|bf16|f32)>\) ->', re.DOTALL
    )
    for match in pattern.finditer(text):
        groups = written_groups(match[0], vertical, horizontal)
        assert sum(map(len, groups)) == vertical * horizontal
        key = match[1].replace("_", "-"), groups
        found[key] = found.get(key, 0) + math.prod(map(int, match[2].split("x"))) * sizes[match[3]]
    return found


def rows_and_columns(vertical, horizontal):
    ids = np.arange(vertical * horizontal).reshape(vertical, horizontal)
    return tuple(map(tuple, ids.tolist())), tuple(map(tuple, ids.T.tolist()))


def resnet50(vertical, horizontal):
    """(recipe of the paper with float16 on the wire, the phase on its grid)."""
    config = load_config(
        "imagenet_lars_32k",
        ["--mesh.vertical", str(vertical), "--mesh.horizontal", str(horizontal), "--batch.0.per-worker-batch", "1"],
    )
    config = dataclasses.replace(config, batch=(Phase(global_batch=vertical * horizontal, per_worker_batch=1),))
    return config, make_plan(config, 1_281_167, vertical * horizontal).phases[0]


def traced_on(config, phase, mesh):
    from jaxdp import models
    from jaxdp.training.programs import trace_train_step

    return trace_train_step(config, models.create(config.model, platform="any"), (0.0, 1.0), phase, mesh)


def assert_torus_of_resnet50(groups_to_bytes, account, vertical, horizontal):
    rows, columns = rows_and_columns(vertical, horizontal)
    assert set(groups_to_bytes) == {("reduce-scatter", rows), ("all-reduce", columns), ("all-gather", rows)}
    whole = groups_to_bytes["reduce-scatter", rows]
    assert 51_114_064 + 212_480 <= whole <= 51_114_064 + 212_488 + 54 * 4 * horizontal  # padding of 54 messages
    assert groups_to_bytes["all-reduce", columns] * horizontal == whole
    assert groups_to_bytes["all-gather", rows] * horizontal == whole
    devices = vertical * horizontal
    assert account.sent == pytest.approx([2 * (devices - 1) / devices * whole] * devices)


@pytest.mark.parametrize(("vertical", "horizontal"), [(48, 72), (64, 64)])
def test_the_real_step_lowered_for_the_papers_grids(vertical, horizontal):
    config, phase = resnet50(vertical, horizontal)
    mesh = abstract_mesh(vertical, horizontal)
    traced = traced_on(config, phase, mesh)
    told = wire.Account(vertical, horizontal, "torus", (0,), tuple(wire.collectives(traced.jaxpr, dict(mesh.shape))))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert_torus_of_resnet50(lowered_groups(text, vertical, horizontal), told, vertical, horizontal)


def test_groups_are_read_in_all_their_forms():
    rows, columns = rows_and_columns(2, 4)
    for form, expected in [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, x", rows),
        ("replica_groups=[2,4]<=[8], x", rows),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", columns),
        ("replica_groups=mesh['vertical'=2,'horizontal'=4] {'vertical'}, x", columns),
        ("replica_groups=mesh['vertical'=2,'horizontal'=4] {'horizontal'}, x", rows),
        ("replica_groups=mesh['vertical'=2,'horizontal'=4] {'vertical','horizontal'}, x", (tuple(range(8)),)),
        ("replica_groups={}, x", (tuple(range(8)),)),
        ("source_target_pairs={{0,1},{1,0}}, x", ((0, 1), (1, 0))),
    ]:
        assert replica_groups(form, 8) == expected, form


COMPILE_THE_REAL_STEP = """
import json, sys
vertical, horizontal = map(int, sys.argv[1:])
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", vertical * horizontal)
from test_wire import resnet50, traced_on
from jaxdp.parallel.hlo import read_schedule
from jaxdp.parallel.mesh import make_mesh

config, phase = resnet50(vertical, horizontal)
compiled = traced_on(config, phase, make_mesh(vertical, horizontal)).lower().compile()
found = {}
for one in read_schedule(compiled.as_text(), vertical * horizontal).collectives:
    key = json.dumps([one.operation, one.groups])
    found[key] = found.get(key, 0) + one.count * one.operand_bytes
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("vertical", "horizontal"), [(32, 32)])
def test_the_real_step_compiled_for_the_papers_grids_on_virtual_devices(vertical, horizontal):
    command = [sys.executable, "-c", COMPILE_THE_REAL_STEP, str(vertical), str(horizontal)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout
    found = {}
    for key, size in json.loads(out.splitlines()[-1]).items():
        operation, groups = json.loads(key)
        found[operation, tuple(map(tuple, groups))] = size
    config, phase = resnet50(vertical, horizontal)
    assert_torus_of_resnet50(found, wire_account(config, phase), vertical, horizontal)
