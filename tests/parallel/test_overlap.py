"""Overlap of all-reduces with the backward pass: sums, order of the messages, and dependencies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.flax_nets import BUILDERS
from jax.sharding import PartitionSpec

from jaxdp import models, register_model
from jaxdp.config import Config, Data, Model, Phase, Reduce
from jaxdp.parallel import allreduce
from jaxdp.parallel.allreduce import Overlap
from jaxdp.parallel.mesh import AXES, HORIZONTAL, make_mesh
from jaxdp.planning import make_plan
from jaxdp.strategies import STRATEGIES
from jaxdp.training.step_compiler import trace_train_step

SIZES = {"one": (3, 5), "two": (7,), "three": (2, 2, 2), "none": (0,), "four": (1,)}


def reduce_parts(mesh_shape, strategy, wire_dtype=None, bucket_bytes=None, divisor=1):
    """(sums on every device, inputs of all devices): parts of two tensors, enqueued one after another."""
    mesh, devices = make_mesh(*mesh_shape), mesh_shape[0] * mesh_shape[1]
    draw = np.random.default_rng(0)
    inputs = {
        name: {"w": draw.normal(size=(devices, *size)), "b": draw.normal(size=(devices, 3))} for name, size in SIZES.items()
    }
    inputs = jax.tree.map(lambda x: x.astype(np.float32), inputs)

    def send(tree):
        overlap, cotangent = (
            Overlap(strategy, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, divisor=divisor),
            tree["one"]["w"].sum(),
        )
        for name in SIZES:
            cotangent = overlap.enqueue(cotangent + 1, {name: jax.tree.map(lambda x: x[0], tree[name])})
        return overlap.wait_all()

    check_vma = allreduce.check_vma(strategy)
    specs = {"in_specs": PartitionSpec(AXES), "out_specs": PartitionSpec()}
    return jax.jit(jax.shard_map(send, mesh=mesh, check_vma=check_vma, **specs))(inputs), inputs


@pytest.mark.parametrize(
    ("strategy", "mesh_shape", "bucket_bytes"),
    [*((name, (2, 4), 30) for name in STRATEGIES), *(("torus", (4, 2), size) for size in (1, None)), ("torus", (1, 2), 30)],
)
def test_overlap_every_strategy_returns_the_sum_of_all_parts(strategy, mesh_shape, bucket_bytes):
    sums, inputs = reduce_parts(mesh_shape, strategy, bucket_bytes=bucket_bytes, divisor=4)
    assert set(sums) == set(SIZES)
    for (path, actual), contributed in zip(jax.tree.leaves_with_path(sums), jax.tree.leaves(inputs), strict=True):
        np.testing.assert_allclose(actual, contributed.astype(np.float64).sum(0) / 4, rtol=1e-5, atol=1e-6, err_msg=str(path))


def test_overlap_wire_dtype_applies_to_messages_only():
    sums, inputs = reduce_parts((2, 4), "torus", jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(sums)} == {np.dtype(np.float32)}
    actual, contributed = sums["one"]["w"], inputs["one"]["w"].astype(np.float64).sum(0)
    assert 1e-5 < np.abs(actual - contributed).max() < 0.1


@pytest.mark.parametrize("sharded", [False, True])
def test_overlap_of_a_gradient_that_is_there_sends_its_segments_from_the_last_to_the_first(sharded):
    """In the same messages; audits get them too. Each device has the sum, or its quarter of it."""
    sent, gradient = ["earlier"], {name: jnp.arange(8.0) * place for place, name in enumerate("abcd", 1)}
    segments = [("a",), ("b", "c"), ("d",)]

    def reduce(x):
        overlap = Overlap("torus", wire_dtype=None, bucket_bytes=1, sharded=sharded, sent=sent)
        return overlap.reduce(jax.tree.map(lambda leaf: leaf * x[0], gradient), iter(segments))

    specs = {"in_specs": PartitionSpec(AXES), "out_specs": PartitionSpec(HORIZONTAL if sharded else None), "check_vma": False}
    sums = jax.jit(jax.shard_map(reduce, mesh=make_mesh(2, 4), **specs))(jnp.arange(8.0))
    jax.tree.map(np.testing.assert_array_equal, sums, jax.tree.map(lambda leaf: 28 * leaf, gradient))
    assert sent.pop(0) == "earlier"
    assert [tuple(tree) for tree, _ in sent] == segments[::-1]
    assert [len(buckets) for _, buckets in sent] == [1, 2, 1]


RESNET = Model(depth=6, width=2, stem="small", classes=5)
NETWORKS = {"resnet": RESNET} | {name: Model(name=name, classes=5) for name in ("linen_stages", "nnx_stages")}


@pytest.fixture(autouse=True)
def flax_modules_with_stages():
    for name, build in BUILDERS.items():
        register_model(name, build)


def step_of(**changes):
    """The equations of a traced step inside `shard_map`, on 2x4 devices."""
    config = Config(
        data=Data(source="synthetic", image_size=8),
        model=RESNET,
        batch=(Phase(global_batch=16),),
        reduce=Reduce(strategy="psum", bucket_bytes=None),
    )
    config = dataclasses.replace(config, **changes)
    phase = make_plan(config, examples=64, devices=8).phases[0]
    model = models.create(config.model)
    jaxpr = trace_train_step(config, model, phase, mesh=make_mesh(2, 4)).jaxpr.jaxpr
    (mapped,) = (one for one in walk(jaxpr.eqns) if one.primitive.name == "shard_map")
    return config, model, mapped.params["jaxpr"].eqns


def walk(eqns):
    """All equations in program order, with inner functions inlined."""
    for one in eqns:
        inner = [v for v in one.params.values() if hasattr(getattr(v, "jaxpr", v), "eqns")]
        if one.primitive.name in ("jit", "pjit", "custom_vjp_call", "custom_jvp_call", "remat2", "checkpoint") and inner:
            yield from walk(getattr(inner[0], "jaxpr", inner[0]).eqns)
        yield one


def is_convolution(equation) -> bool:
    return any(one.primitive.name in ("conv_general_dilated", "dot_general") for one in walk([equation]))


def messages_of(config, model, eqns):
    """Indices of the gradient all-reduces among the equations, and the expected elements of each."""
    params, _ = jax.eval_shape(lambda: model.init(jax.random.key(0), (8, 8, 3)))
    sizes = [sum(leaf.size for name in part for leaf in jax.tree.leaves(params[name])) for part in reversed(model.segments)]
    *sent, _ = [place for place, one in enumerate(eqns) if one.primitive.name in ("psum", "psum_invariant")]  # and statistics
    sent = [place for place in sent if eqns[place].invars[0].aval.size in sizes]
    return sent, sizes


@pytest.mark.parametrize(("network", "parts"), [("resnet", 4), ("linen_stages", 3), ("nnx_stages", 3)])
def test_train_step_sends_one_message_per_part_in_backward_order(network, parts):
    config, model, eqns = step_of(model=NETWORKS[network])
    sent, sizes = messages_of(config, model, eqns)
    assert [eqns[place].invars[0].aval.size for place in sent] == sizes
    assert len(sizes) == parts  # of the ResNet: a head, two blocks, a stem


@pytest.mark.parametrize("network", NETWORKS)
def test_train_step_message_is_awaited_one_part_later(network):
    """No convolution of the next part depends on it; the convolutions of all later parts do."""
    config, model, eqns = step_of(model=NETWORKS[network])
    sent, _ = messages_of(config, model, eqns)
    for number, place in enumerate(sent[:-1]):
        known = set(map(id, eqns[place].outvars))
        beside, after = [], []
        for later, one in enumerate(eqns[place + 1 :], place + 1):
            depends = any(id(v) in known for v in one.invars)
            if depends:
                known |= set(map(id, one.outvars))
            if is_convolution(one) and later < sent[-1]:
                (beside if later < sent[number + 1] else after).append(depends)
        assert beside
        assert not any(beside)
        assert all(after)


@pytest.mark.parametrize("overlap", [False, True])
def test_train_step_without_overlap_sends_after_the_backward_pass(overlap):
    _, _, eqns = step_of(reduce=Reduce(strategy="psum", bucket_bytes=None, overlap=overlap))
    last = max(place for place, one in enumerate(eqns) if is_convolution(one))
    early = [place for place, one in enumerate(eqns[:last]) if one.primitive.name in ("psum", "psum_invariant")]
    assert bool(early) == overlap
