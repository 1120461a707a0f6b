import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES, make_mesh

MESHES = [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
SHAPES = {"odd": (7,), "scalar": (), "fused": (3, 5), "large": (137, 151), "empty": (0,), "matrix": (130, 128)}


def reduced(mesh_shape, strategy, wire_dtype=None, dtype=np.float32):
    """(what the devices were given in float64, what each device got)."""
    mesh = make_mesh(*mesh_shape)
    devices = mesh_shape[0] * mesh_shape[1]
    random = np.random.default_rng(0)
    given = {name: random.normal(size=(devices, *shape)).astype(dtype) for name, shape in SHAPES.items()}

    def per_device(tree):
        return allreduce.mean(jax.tree.map(lambda x: x[0], tree), strategy, wire_dtype)

    rows, everywhere = PartitionSpec(AXES), PartitionSpec()
    out = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=rows, out_specs=everywhere))(given)
    return given, out


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("strategy", list(allreduce.STRATEGIES))
def test_every_device_gets_the_mean_of_all(mesh_shape, strategy):
    given, out = reduced(mesh_shape, strategy)
    for name, value in out.items():
        assert value.shape == SHAPES[name]
        assert value.dtype == jnp.float32
        assert len(value.addressable_shards) == mesh_shape[0] * mesh_shape[1]
        for shard in value.addressable_shards:
            np.testing.assert_array_equal(shard.data, value.addressable_shards[0].data)
        np.testing.assert_allclose(value, given[name].astype(np.float64).mean(0), rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("strategy", list(allreduce.STRATEGIES))
@pytest.mark.parametrize(("wire", "bound"), [("bfloat16", 2**-7), ("float16", 2**-10)])
def test_a_16_bit_wire_errs_by_its_rounding(strategy, wire, bound):
    """Eight values are rounded once and then summed with at most seven more roundings of partial sums."""
    given, out = reduced((2, 4), strategy, jnp.dtype(wire))
    for name, value in out.items():
        assert value.dtype == jnp.float32
        largest = np.abs(given[name]).sum(0) / 8
        assert np.all(np.abs(value - given[name].astype(np.float64).mean(0)) <= bound * largest * 8 / 2 + 1e-12)


def collectives(strategy, mesh_shape, wire_dtype):
    """(name, axes, dtype, elements) of each collective in the traced reduction of a vector of 100,001."""
    mesh = jax.sharding.AbstractMesh(mesh_shape, AXES)

    def per_device(x):
        return allreduce.mean(lax.pcast(x, AXES, to="varying"), strategy, wire_dtype)

    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    jaxpr = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((100_001,), jnp.float32)).jaxpr
    inner = next(e.params["jaxpr"] for e in jaxpr.eqns if e.primitive.name == "shard_map")
    found = []
    for equation in inner.eqns:
        axes = equation.params.get("axes") or equation.params.get("axis_name")
        if axes and equation.primitive.name != "pcast" and "pvary" not in equation.primitive.name:
            operand = equation.invars[0].aval
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            found.append((equation.primitive.name.removesuffix("_invariant"), axes, str(operand.dtype), operand.size))
    return found


def test_the_torus_sends_the_three_messages_of_the_paper():
    padded = 100_004
    assert collectives("torus", (2, 4), jnp.bfloat16) == [
        ("reduce_scatter", ("horizontal",), "bfloat16", padded),
        ("psum", ("vertical",), "bfloat16", padded // 4),
        ("all_gather", ("horizontal",), "bfloat16", padded // 4),
    ]


def test_psum_sends_one_message_over_both_axes():
    assert collectives("psum", (2, 4), None) == [("psum", ("vertical", "horizontal"), "float32", 100_001)]


def test_an_unknown_strategy_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match="strategy: 'tree' is not allowed; give one of psum, torus"):
        allreduce.mean({}, "tree")
