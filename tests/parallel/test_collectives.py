"""Collectives of steps that are traced, lowered and compiled for abstract meshes."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.strategies import vector_traffic
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp import models
from jaxdp.analysis.traffic import normalization_messages, plan_traffic, step_traffic, table
from jaxdp.config import Config, Data, Finetune, Model, Phase, Reduce
from jaxdp.parallel import allreduce, collectives
from jaxdp.parallel.mesh import AXES, abstract_mesh
from jaxdp.planning import make_plan
from jaxdp.recipes import load_config
from jaxdp.sizes import model_summary
from jaxdp.strategies import STRATEGIES
from jaxdp.training.step_compiler import trace_train_step
from jaxdp.xla.hlo import replica_groups

ELEMENTS = 100_001
traffic = partial(vector_traffic, elements=ELEMENTS)


def test_traffic_torus_has_the_three_messages_of_the_paper():
    padded = 2 * 100_004
    assert traffic("torus", (2, 4), wire_dtype=jnp.bfloat16).collectives == (
        collectives.Collective("reduce-scatter", ("horizontal",), 4, "bfloat16", padded, 1),
        collectives.Collective("all-reduce", ("vertical",), 2, "bfloat16", padded // 4, 1),
        collectives.Collective("all-gather", ("horizontal",), 4, "bfloat16", padded // 4, 1),
    )


def test_traffic_ring_has_2_n_minus_1_permutes():
    part = 4 * math.ceil(ELEMENTS / 1024)
    assert traffic("ring", (32, 32)).collectives == (
        collectives.Collective("collective-permute", AXES, 1024, "float32", part, 2 * 1023),
    )


def test_traffic_hierarchical_sends_the_vector_along_both_axes():
    hierarchical = traffic("hierarchical", (4, 8))
    size = 4 * ELEMENTS
    assert hierarchical.collectives == (
        collectives.Collective("all-reduce", ("horizontal",), 8, "float32", size, 1),
        collectives.Collective("all-reduce", ("vertical",), 4, "float32", size, 1),
    )


def test_hierarchical_lowered_keeps_two_all_reduces():
    mesh = abstract_mesh(2, 4)
    mapped = jax.shard_map(
        lambda x: allreduce.all_reduce_mean(x, "hierarchical"),
        mesh=mesh,
        in_specs=PartitionSpec(AXES),
        out_specs=PartitionSpec(),
    )
    traced = jax.jit(mapped).trace(jax.ShapeDtypeStruct((8, 100), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    order = re.findall(r"stablehlo\.(all_reduce|optimization_barrier)", text)
    assert order == ["all_reduce", "optimization_barrier", "all_reduce"]


def test_plan_traffic_groups_phases_with_equal_collectives():
    config = Config(
        data=Data(source="synthetic", image_size=16),
        model=Model(depth=6, width=8, stem="small", classes=7, norm="synchronized"),
        batch=(Phase(64, 1.0, per_worker_batch=8), Phase(256, 2.0, per_worker_batch=8), Phase(64, per_worker_batch=8)),
        epochs=3.0,
    )
    traffic = plan_traffic(make_plan(config, examples=4096, devices=8))
    assert [one.phases for one in traffic] == [(0, 2), (1,)]  # four micro-batches normalize together four times as often
    assert traffic[1].sent_bytes[0] > traffic[0].sent_bytes[0]


def test_traffic_parameter_server_sends_as_much_as_all_workers():
    server = traffic("parameter_server", (2, 4))
    sent = server.sent_bytes
    assert sent[0] == 7 * 4 * ELEMENTS
    assert sent[1:] == [4 * ELEMENTS] * 7


@pytest.mark.parametrize("mesh_shape", [(1, 8), (8, 1), (2, 4), (16, 24)])
@pytest.mark.parametrize("strategy", ["psum", "ring", "torus"])
def test_traffic_sent_bytes_are_2_n_minus_1_over_n_of_the_padded_message(strategy, mesh_shape):
    devices = math.prod(mesh_shape)
    unit = {"psum": 1, "ring": devices, "torus": mesh_shape[1]}[strategy]
    padded = 4 * math.ceil(ELEMENTS / unit) * unit
    for sent in traffic(strategy, mesh_shape).sent_bytes:
        assert sent == pytest.approx(2 * (devices - 1) / devices * padded)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_traffic_one_device_has_no_collectives(strategy):
    assert traffic(strategy, (1, 1)).collectives == ()
    assert table(traffic(strategy, (1, 1))).endswith(": none on one device")


def test_find_collectives_counts_scans_and_rejects_while_loops():
    mesh = abstract_mesh(1, 4)

    def scanned(x):
        return lax.scan(lambda c, _: (lax.pcast(lax.psum(c, AXES), AXES, to="varying"), None), x, None, length=5)[0]

    def looped(x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: lax.pcast(lax.psum(c, AXES), AXES, to="varying"), x)

    def traced(function):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(AXES), out_specs=PartitionSpec(AXES))
        return jax.jit(mapped).trace(jax.ShapeDtypeStruct((8,), jnp.float32)).jaxpr

    assert collectives.find_collectives(traced(scanned), dict(mesh.shape)) == [
        collectives.Collective("all-reduce", AXES, 4, "float32", 8, 5)
    ]
    with pytest.raises(ValueError, match="all-reduce in a while loop: the number of iterations is unknown"):
        collectives.find_collectives(traced(looped), dict(mesh.shape))


def tiny_traffic(devices=8, **changes) -> collectives.StepTraffic:
    """What the step of a tiny_resnet net sends."""
    config = Config(
        data=Data(source="synthetic", image_size=16),
        model=Model(depth=6, width=32, stem="small", classes=7),
        batch=(Phase(global_batch=64, per_worker_batch=2),),
    )
    config = dataclasses.replace(config, **changes)
    return step_traffic(config, make_plan(config, examples=4096, devices=devices).phases[0])


def test_step_traffic_accumulation_sends_the_same_messages():
    assert tiny_traffic().collectives == tiny_traffic(batch=(Phase(64, per_worker_batch=8),)).collectives


@pytest.mark.parametrize("strategy", ["psum", "torus"])
def test_step_traffic_gradients_use_wire_dtype_and_statistics_float32(strategy):
    step = tiny_traffic(reduce=Reduce(strategy=strategy, wire_dtype="float16", bucket_bytes=None, overlap=False))
    first = [
        one
        for one in step.collectives
        if one.operation == step.collectives[0].operation and one.axes == step.collectives[0].axes
    ]
    messages = sorted({(-one.operand_bytes, one.dtype) for one in first})
    assert [name for _, name in messages] == ["float16", "float32"]  # one of gradients, one of the smaller statistics


def test_step_traffic_smaller_buckets_make_more_messages_of_the_same_bytes():
    one, many = (tiny_traffic(reduce=Reduce(strategy="psum", bucket_bytes=size, overlap=False)) for size in (None, 1))
    assert sum(c.count for c in one.collectives) == 2
    assert sum(c.count for c in many.collectives) > 10
    assert sum(c.count * c.operand_bytes for c in one.collectives) == sum(c.count * c.operand_bytes for c in many.collectives)


def tiny_synchronized(strategy="psum", frozen_stages=0, bucket_bytes=None, **model) -> Config:
    return Config(
        data=Data(source="synthetic", image_size=16),
        model=Model(depth=6, width=32, stem="small", classes=7, **({"norm": "synchronized"} | model)),
        batch=(Phase(global_batch=64, per_worker_batch=8),),
        finetune=Finetune(weights="any", frozen_stages=frozen_stages) if frozen_stages else Finetune(),
        reduce=Reduce(strategy=strategy, bucket_bytes=bucket_bytes),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "per_worker"},
        {"bucket_bytes": 4096},
        {"remat": True},
        {"frozen_stages": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "synchronized",
)
def test_model_summary_messages_equal_those_of_the_traced_step(options):
    """Gradients, statistics with loss, accuracy and requests, and synchronized batch normalization, forward and backward."""
    config = tiny_synchronized(**options)
    plan = make_plan(config, examples=4096, devices=8)
    between_layers = normalization_messages(plan)
    assert bool(between_layers) == (config.model.norm == "synchronized")
    sent = [one.operand_bytes for one in step_traffic(config, plan.phases[0]).collectives for _ in range(one.count)]
    assert sorted(sent) == sorted(model_summary(config)["messages"] + between_layers)


def test_synchronized_normalization_uses_psum_for_every_strategy():
    for strategy in ("torus", "ring"):
        config = tiny_synchronized(strategy)
        plan = make_plan(config, examples=4096, devices=8)
        found = step_traffic(config, plan.phases[0]).collectives
        sent = [
            one.operand_bytes for one in found if one.operation == "all-reduce" and one.axes == AXES for _ in range(one.count)
        ]
        assert sorted(sent) == sorted(normalization_messages(plan))


@pytest.mark.slow
def test_normalization_messages_resnet50_has_four_per_layer():
    """Mean and squared mean forward, the means of two sums backward: 4 x 53 messages, 2 x 212,480 bytes."""
    config = load_config("imagenet_sony_exp2", ["--model.norm", "synchronized"])
    messages = normalization_messages(make_plan(config, examples=1_281_167, devices=3456))
    assert (len(messages), sum(messages)) == (212, 424_960)


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
    """(operation, groups) -> bytes put in, read from StableHLO: independent of the traffic, which reads the jaxpr."""
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
    return config, make_plan(config, examples=1_281_167, devices=vertical * horizontal).phases[0]


def traced_on(config, phase, mesh):
    return trace_train_step(config, models.create(config.model, platform="any"), phase, mesh=mesh)


def assert_torus_of_resnet50(groups_to_bytes, traffic, vertical, horizontal):
    rows, columns = rows_and_columns(vertical, horizontal)
    assert set(groups_to_bytes) == {("reduce-scatter", rows), ("all-reduce", columns), ("all-gather", rows)}
    whole = groups_to_bytes["reduce-scatter", rows]
    assert 51_114_064 + 212_488 <= whole <= 51_114_064 + 212_488 + 54 * 4 * horizontal  # padding of 54 messages
    assert groups_to_bytes["all-reduce", columns] * horizontal == whole
    assert groups_to_bytes["all-gather", rows] * horizontal == whole
    devices = vertical * horizontal
    assert traffic.sent_bytes == pytest.approx([2 * (devices - 1) / devices * whole] * devices)


def test_step_traffic_equals_lowered_step_on_a_published_grid():
    vertical, horizontal = 48, 72
    config, phase = resnet50(vertical, horizontal)
    mesh = abstract_mesh(vertical, horizontal)
    traced = traced_on(config, phase, mesh)
    traced_traffic = collectives.StepTraffic(
        vertical, horizontal, "torus", (0,), tuple(collectives.find_collectives(traced.jaxpr, dict(mesh.shape)))
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert_torus_of_resnet50(lowered_groups(text, vertical, horizontal), traced_traffic, vertical, horizontal)


def test_replica_groups_parses_every_form():
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
from parallel.test_collectives import resnet50, traced_on
from jaxdp.xla.hlo import read_schedule
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
def test_step_traffic_equals_compiled_step_on_published_grid():
    vertical = horizontal = 32
    command = [sys.executable, "-c", COMPILE_THE_REAL_STEP, str(vertical), str(horizontal)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]).stdout
    found = {}
    for key, size in json.loads(out.splitlines()[-1]).items():
        operation, groups = json.loads(key)
        found[operation, tuple(map(tuple, groups))] = size
    config, phase = resnet50(vertical, horizontal)
    assert_torus_of_resnet50(found, step_traffic(config, phase), vertical, horizontal)


def test_sent_bytes_of_every_operation_are_those_of_its_cheapest_algorithm():
    """Of 1,000 bytes that each of five devices holds, as rings and direct exchanges send them; nothing to itself."""
    expected = {
        "all-reduce": 1600,
        "reduce-scatter": 800,
        "all-to-all": 800,
        "all-gather": 4000,
        "collective-permute": 1000,
    }
    assert set(expected) == set(collectives.OPERATIONS.values())
    for operation, sent in expected.items():
        assert collectives.Collective(operation, AXES, 5, "float32", 1000, 3).sent_bytes == pytest.approx(3 * sent), operation
