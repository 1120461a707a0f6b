"""Shards of tensors along the rows of the mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxdp.parallel import allreduce, traffic
from jaxdp.parallel.mesh import AXES, abstract_mesh, make_mesh
from jaxdp.parallel.shards import from_parts, own_shard, partition_spec, shard_shape, sums_of_squares_along_rows, to_parts

TENSORS = [(), (1,), (5,), (8,), (0,), (2, 3), (3, 3, 4, 5), (4, 2, 1)]
EVERYWHERE, ROWS = PartitionSpec(), PartitionSpec(AXES)


def tensors():
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in TENSORS]


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_parts_of_a_tensor_are_its_values_in_order_and_zeros(parts):
    whole = tensors()
    in_parts = jax.jit(lambda whole: [to_parts(tensor, parts) for tensor in whole])(whole)
    again = jax.jit(lambda rows: [from_parts(part, shape) for part, shape in zip(rows, TENSORS, strict=True)])(in_parts)
    for tensor, rows, joined in zip(whole, in_parts, again, strict=True):
        assert rows.shape == (parts, shard_shape(tensor.shape, parts)[-1])
        flat = np.asarray(rows).ravel()
        np.testing.assert_array_equal(flat[: tensor.size], np.asarray(tensor).ravel())
        assert not flat[tensor.size :].any()
        np.testing.assert_array_equal(joined, tensor)
        assert len(shard_shape(tensor.shape, parts)) == max(1, tensor.ndim)


@pytest.mark.parametrize(
    ("mesh_shape", "bucket_bytes", "in_one_copy"),
    [((2, 4), None, False), ((2, 4), 64, True), ((1, 8), 64, False), ((8, 1), None, True)],
)
def test_gathered_tensors_equal_the_tensors_that_were_sharded(mesh_shape, bucket_bytes, in_one_copy):
    mesh, whole = make_mesh(*mesh_shape), tensors()

    def there_and_back(whole):
        shards = jax.tree.map(own_shard, whole)
        return allreduce.gather_tensors(shards, whole, "torus", bucket_bytes=bucket_bytes, in_one_copy=in_one_copy)

    mapped = jax.shard_map(there_and_back, mesh=mesh, in_specs=EVERYWHERE, out_specs=EVERYWHERE)
    for ours, expected in zip(jax.jit(mapped)(whole), whole, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_gathered_tensors_travel_in_the_dtype_in_which_they_are_returned():
    """Shards of float32 parameters that a network uses in bfloat16: half of the bytes."""
    mesh, whole = abstract_mesh(1, 4), [jax.ShapeDtypeStruct((8, 3), jnp.bfloat16), jax.ShapeDtypeStruct((5,), jnp.float32)]
    shards = [jax.ShapeDtypeStruct((4 * shard_shape(one.shape, 4)[-1],), jnp.float32) for one in whole]
    gather = partial(allreduce.gather_tensors, tensors=whole, strategy="torus")
    mapped = jax.shard_map(gather, mesh=mesh, in_specs=(ROWS,), out_specs=EVERYWHERE, check_vma=False)
    found = traffic.find_collectives(jax.jit(mapped).trace(shards).jaxpr, dict(mesh.shape))
    assert {(one.dtype, one.operand_bytes) for one in found} == {("bfloat16", 2 * 6), ("float32", 4 * 2)}
    assert [(one.shape, one.dtype) for one in jax.eval_shape(mapped, shards)] == [(one.shape, one.dtype) for one in whole]


@pytest.mark.parametrize(("options", "copies"), [({}, 0), ({"in_one_copy": True}, 1)], ids=["apart", "in one copy"])
def test_parts_of_a_bucket_are_copied_apart_or_at_once(options, copies):
    """A tensor alone in its bucket has nothing to be joined with."""
    mesh, shards = abstract_mesh(1, 4), [jnp.zeros(2), jnp.zeros(1), jnp.zeros(20_000)]
    whole = [jax.ShapeDtypeStruct((4 * shard.size,), jnp.float32) for shard in shards]
    gather = partial(allreduce.gather_tensors, tensors=whole, strategy="torus", **options)
    mapped = jax.shard_map(gather, mesh=mesh, in_specs=(EVERYWHERE,), out_specs=EVERYWHERE, check_vma=False)
    assert str(jax.make_jaxpr(mapped)(shards)).count("optimization_barrier") == copies


@pytest.mark.parametrize(("mesh_shape", "bucket_bytes"), [((2, 4), 64), ((1, 8), None), ((8, 1), 64)])
def test_reduced_shards_are_the_shards_of_the_sum(mesh_shape, bucket_bytes):
    """Integers, so that the sum of NumPy is exact."""
    mesh, random = make_mesh(*mesh_shape), np.random.default_rng(1)
    each = [random.integers(-9, 9, (8, *shape)).astype(np.float32) for shape in TENSORS]

    def reduced(each):
        return allreduce.all_reduce_sum([x[0] for x in each], "torus", bucket_bytes=bucket_bytes, sharded=True)

    specs = [partition_spec(shape) for shape in TENSORS]
    shards = jax.jit(jax.shard_map(reduced, mesh=mesh, in_specs=ROWS, out_specs=specs))(each)
    for ours, values, shape in zip(shards, each, TENSORS, strict=True):
        assert ours.shape == shard_shape(shape, mesh_shape[1], mesh_shape[1])
        np.testing.assert_array_equal(np.asarray(ours).ravel()[: values[0].size], values.sum(0).ravel())


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1), [6, 2, 4, 0, 1, 5, 3], [2, 0], [5, 6]], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_of_squares_along_rows_equal_float64(dtype, order):
    """Of vectors and of tensors with more dimensions, in any order."""
    filled = [tensor.astype(dtype) for tensor in tensors() if tensor.size]
    mesh, whole = make_mesh(2, 4), filled[order] if isinstance(order, slice) else [filled[place] for place in order]

    def squares(whole):
        shards = jax.tree.map(own_shard, whole)
        return sums_of_squares_along_rows(shards, {"again": shards[-1]}, ())

    mapped = jax.shard_map(squares, mesh=mesh, in_specs=EVERYWHERE, out_specs=EVERYWHERE)
    ours, again, empty = jax.jit(mapped)(whole)
    for square, tensor in zip([*ours, again["again"]], [*whole, whole[-1]], strict=True):
        assert float(square) == pytest.approx(float((np.asarray(tensor, np.float64) ** 2).sum()), rel=1e-6)
    assert empty == ()
