"""Collectives of steps that are traced for abstract meshes, and of one that is compiled."""

import dataclasses
import io
import math
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from helpers.step import with_parts
from helpers.strategies import vector_program, vector_traffic
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp import models
from jaxdp.analysis.wire import normalization_messages, plan_traffic, step_traffic, table
from jaxdp.config import Config, Data, Model, Phase, Reduce
from jaxdp.errors import ConfigError
from jaxdp.parallel.mesh import AXES, abstract_mesh, make_mesh
from jaxdp.parallel.traffic import OPERATIONS, Collective, find_collectives, primitives
from jaxdp.planning import make_plan
from jaxdp.recipes import load_config
from jaxdp.sizes import model_summary
from jaxdp.strategies import STRATEGIES
from jaxdp.training.step_compiler import trace_train_step
from jaxdp.xla.hlo import read_schedule

ELEMENTS = 100_001
ROWS, COLUMNS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))  # devices of a mesh of 2x4
traffic = partial(vector_traffic, elements=ELEMENTS)


def test_traffic_torus_has_the_three_messages_of_the_paper():
    padded = 2 * 100_004
    assert traffic("torus", (2, 4), wire_dtype=jnp.bfloat16).collectives == (
        Collective("reduce-scatter", ("horizontal",), 4, "bfloat16", padded, 1),
        Collective("all-reduce", ("vertical",), 2, "bfloat16", padded // 4, 1),
        Collective("all-gather", ("horizontal",), 4, "bfloat16", padded // 4, 1),
    )


def test_traffic_ring_has_2_n_minus_1_permutes():
    part = 4 * math.ceil(ELEMENTS / 1024)
    assert traffic("ring", (32, 32)).collectives == (Collective("collective-permute", AXES, 1024, "float32", part, 2 * 1023),)


def test_traffic_hierarchical_sends_the_vector_along_both_axes():
    hierarchical = traffic("hierarchical", (4, 8))
    size = 4 * ELEMENTS
    assert hierarchical.collectives == (
        Collective("all-reduce", ("horizontal",), 8, "float32", size, 1),
        Collective("all-reduce", ("vertical",), 4, "float32", size, 1),
    )


def test_traffic_parameter_server_sends_as_much_as_all_workers():
    server = traffic("parameter_server", (2, 4))
    sent = server.sent_bytes
    assert sent[0] == 7 * 4 * ELEMENTS
    assert sent[1:] == [4 * ELEMENTS] * 7


GROUPS = {"axis_index_groups": [[0, 1], [2]]}
EXCHANGES = {
    "one row to another": lambda x: lax.ppermute(x, "vertical", [(2, 0)]),
    "a tree over the rows": lambda x: lax.ppermute(lax.ppermute(x, "vertical", [(1, 0)]), "vertical", [(2, 0)]),
    "one column to the other": lambda x: lax.ppermute(x, "horizontal", [(1, 0)]),
    "axes in the other order": lambda x: lax.psum(x, AXES[::-1], axis_index_groups=[[0, 1], [2], [3], [4], [5]]),
    "a device also to itself": lambda x: lax.ppermute(x, AXES, [(0, 0), (1, 2), (5, 4)]),
    "every device to itself": lambda x: lax.ppermute(x, "vertical", [(0, 0), (1, 1), (2, 2)]),
    "all in a ring": lambda x: lax.ppermute(x, AXES, [(device, (device + 1) % 6) for device in range(6)]),
    "nobody": lambda x: lax.ppermute(x, AXES, []),
    "unequal groups": lambda x: lax.psum(x, "vertical", **GROUPS),
    "equal groups": lambda x: lax.psum(x, AXES, axis_index_groups=[[0, 3], [1, 4], [2, 5]]),
    "groups of one": lambda x: lax.psum(x, "horizontal", axis_index_groups=[[0], [1]]),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_sent_bytes_of_a_registered_strategy_are_those_of_the_devices_that_xla_names(exchange):
    """XLA describes permutations as pairs of devices and reductions as groups of them, of a ring over each group here."""
    compiled = vector_program(EXCHANGES[exchange], make_mesh(3, 2), elements=ELEMENTS).lower().compile()
    expected = np.zeros(6)
    for one in read_schedule(compiled.as_text(), 6).collectives:
        for group in one.groups:
            if one.operation == "collective-permute":
                expected[group[0]] += 4 * ELEMENTS if len(set(group)) == 2 else 0
            else:
                expected[list(group)] += 2 * (len(group) - 1) / len(group) * 4 * ELEMENTS
    found = traffic(EXCHANGES[exchange], (3, 2))
    assert all(one.sent_bytes > 0 for one in found.collectives)
    assert found.sent_bytes == pytest.approx(expected.tolist())
    if any(one.senders for one in found.collectives):
        console = rich.console.Console(width=200, record=True, file=io.StringIO())
        console.print(table(found))
        assert f"{sum(expected):,.0f} in total" in console.export_text()


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

    def twice(x):
        return lax.scan(lambda c, _: (scanned(scanned(c)), None), x, None, length=3)[0]

    def branches(x):
        return lax.cond(x[0] > 0, scanned, lambda x: lax.ppermute(x, "horizontal", [(1, 0), (3, 3)]), x)

    def looped(x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: lax.pcast(lax.psum(c, AXES), AXES, to="varying"), x)

    def scan_in_loop(x):
        return lax.while_loop(lambda c: c[0] < 3, scanned, x)

    def counted_without_messages(x):
        return scanned(lax.while_loop(lambda c: c[0] < 3, lambda c: c + 1, x))

    def traced(function):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(AXES), out_specs=PartitionSpec(AXES))
        return jax.jit(mapped).trace(jax.ShapeDtypeStruct((8,), jnp.float32)).jaxpr

    assert find_collectives(traced(scanned), dict(mesh.shape)) == [Collective("all-reduce", AXES, 4, "float32", 8, 5)]
    all_reduces = Collective("all-reduce", AXES, 4, "float32", 8, 5)
    assert find_collectives(traced(counted_without_messages), dict(mesh.shape)) == [all_reduces]
    assert find_collectives(traced(twice), dict(mesh.shape)) == [dataclasses.replace(all_reduces, count=30)]
    permute = Collective("collective-permute", ("horizontal",), 4, "float32", 8, 1, (1,))
    assert set(find_collectives(traced(branches), dict(mesh.shape))) == {all_reduces, permute}
    assert primitives(traced(branches)) >= {"scan", "cond", "psum_invariant", "ppermute"}
    for function in (looped, scan_in_loop, lambda x: lax.scan(lambda c, _: (scan_in_loop(c), None), x, None, length=2)[0]):
        with pytest.raises(ConfigError, match="all-reduce in a while loop: the number of iterations is unknown"):
            find_collectives(traced(function), dict(mesh.shape))


CONFIG = Config(
    data=Data(source="synthetic", image_size=16),
    model=Model(depth=6, width=32, stem="small", classes=7, norm="synchronized"),
    batch=(Phase(global_batch=64, per_worker_batch=8),),
    reduce=Reduce(strategy="psum", bucket_bytes=None),
)


def plan_of(**parts):
    """The plan of `CONFIG` with parts changed, on eight devices."""
    return make_plan(with_parts(CONFIG, **parts), examples=4096, devices=8)


def sent_by(**parts) -> tuple[Collective, ...]:
    """What a step of `CONFIG` with parts changed sends."""
    plan = plan_of(**parts)
    return step_traffic(plan.config, plan.phases[0]).collectives


@pytest.mark.slow
def test_plan_traffic_groups_phases_with_equal_collectives():
    phases = Phase(64, 1.0, per_worker_batch=8), Phase(256, 2.0, per_worker_batch=8), Phase(64, per_worker_batch=8)
    traffic = plan_traffic(plan_of(batch=phases, epochs=3.0))
    assert [one.phases for one in traffic] == [(0, 2), (1,)]  # four micro-batches normalize together four times as often
    assert traffic[1].sent_bytes[0] > traffic[0].sent_bytes[0]


def test_step_traffic_accumulation_sends_the_same_messages():
    own = {"norm": "per_worker"}
    assert sent_by(model=own) == sent_by(model=own, batch=(Phase(64, per_worker_batch=2),))


@pytest.mark.parametrize("strategy", ["psum", "torus"])
def test_step_traffic_gradients_use_wire_dtype_and_statistics_float32(strategy):
    sent = sent_by(model={"norm": "per_worker"}, reduce={"strategy": strategy, "wire_dtype": "float16", "overlap": False})
    first = [one for one in sent if (one.operation, one.axes) == (sent[0].operation, sent[0].axes)]
    messages = sorted({(-one.operand_bytes, one.dtype) for one in first})
    assert [name for _, name in messages] == ["float16", "float32"]  # one of gradients, one of the smaller statistics


def test_step_traffic_smaller_buckets_make_more_messages_of_the_same_bytes():
    own = {"norm": "per_worker"}
    one, many = (sent_by(model=own, reduce={"bucket_bytes": size, "overlap": False}) for size in (None, 1))
    assert sum(c.count for c in one) == 2
    assert sum(c.count for c in many) > 10
    assert sum(c.count * c.operand_bytes for c in one) == sum(c.count * c.operand_bytes for c in many)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"norm": "per_worker"}},
        {"reduce": {"bucket_bytes": 4096}},
        {"model": {"remat": True}},
        {"finetune": {"weights": "any", "frozen_stages": 2}},
        {"optimizer": {"class_weights": (1.0,) * 7}},
    ],
    ids=str,
)
def test_model_summary_messages_equal_those_of_the_traced_step(changes):
    """Gradients, statistics with loss, accuracy and requests, and synchronized batch normalization, forward and backward."""
    plan = plan_of(**changes)
    between_layers = normalization_messages(plan)
    assert bool(between_layers) == (plan.config.model.norm == "synchronized")
    sent = [one.operand_bytes for one in sent_by(**changes) for _ in range(one.count)]
    assert sorted(sent) == sorted(model_summary(plan.config)["messages"] + between_layers)


@pytest.mark.parametrize("strategy", ["torus", "ring"])
def test_synchronized_normalization_uses_psum_for_every_strategy(strategy):
    change = {"strategy": strategy}
    found = [one for one in sent_by(reduce=change) if one.operation == "all-reduce" and one.axes == AXES]
    sent = [one.operand_bytes for one in found for _ in range(one.count)]
    assert sorted(sent) == sorted(normalization_messages(plan_of(reduce=change)))


@pytest.mark.slow
def test_normalization_messages_resnet50_has_four_per_layer():
    """Mean and squared mean forward, the means of two sums backward: 4 x 53 messages, 2 x 212,480 bytes."""
    config = load_config("imagenet_sony_exp2", ["--model.norm", "synchronized"])
    messages = normalization_messages(make_plan(config, examples=1_281_167, devices=3456))
    assert (len(messages), sum(messages)) == (212, 424_960)


QUICK = ("torus", "psum")


@pytest.mark.parametrize("strategy", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in STRATEGIES])
def test_step_traffic_equals_the_step_that_xla_compiles(strategy):
    """Bytes put into the collectives of each kind; XLA describes permutations as pairs of devices."""
    mesh, plan = make_mesh(2, 4), plan_of(model={"norm": "per_worker"}, reduce={"strategy": strategy, "bucket_bytes": 4096})
    traced = trace_train_step(plan.config, models.create(plan.config.model), plan.phases[0], mesh=mesh)
    groups = {("horizontal",): ROWS, ("vertical",): COLUMNS, AXES: (tuple(range(8)),)}
    expected, found = Counter(), Counter()
    for one in step_traffic(plan.config, plan.phases[0]).collectives:
        key = one.operation, *(() if one.operation == "collective-permute" else groups[one.axes])
        expected[key] += one.operand_bytes * one.count
    for one in read_schedule(traced.lower().compile().as_text(), 8).collectives:
        key = one.operation, *(() if one.operation == "collective-permute" else one.groups)
        found[key] += one.operand_bytes * one.count
    assert found == expected


@pytest.mark.slow
def test_step_traffic_of_resnet_50_on_a_published_grid_has_the_bytes_of_the_paper():
    """Gradients in float16, statistics with loss, accuracy and requests in float32, and padding of 54 messages."""
    flags = ["--mesh.vertical", "48", "--mesh.horizontal", "72"]
    config = load_config("imagenet_lars_32k", [*flags, "--batch.0.global-batch", "3456", "--batch.0.per-worker-batch", "1"])
    traffic = step_traffic(config, make_plan(config, examples=1_281_167, devices=3456).phases[0])
    sent = Counter()
    for one in traffic.collectives:
        sent[one.operation, one.axes] += one.operand_bytes * one.count
    whole = sent.pop(("reduce-scatter", ("horizontal",)))
    assert 51_114_064 + 212_488 <= whole <= 51_114_064 + 212_488 + 54 * 4 * 72
    assert sent == {("all-reduce", ("vertical",)): whole / 72, ("all-gather", ("horizontal",)): whole / 72}
    assert traffic.sent_bytes == pytest.approx([2 * (3456 - 1) / 3456 * whole] * 3456)


def test_sent_bytes_of_every_operation_are_those_of_its_cheapest_algorithm():
    """Of 1,000 bytes that each of five devices holds, as rings and direct exchanges send them; nothing to itself."""
    expected = {
        "all-reduce": 1600,
        "reduce-scatter": 800,
        "all-to-all": 800,
        "all-gather": 4000,
        "collective-permute": 1000,
    }
    assert set(expected) == set(OPERATIONS.values())
    for operation, sent in expected.items():
        assert Collective(operation, AXES, 5, "float32", 1000, 3).sent_bytes == pytest.approx(3 * sent), operation
