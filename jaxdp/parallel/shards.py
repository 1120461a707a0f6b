"""Shards of tensors along the rows of the mesh, for a sharded update (Xu et al., arXiv 2004.13336).

A device in column x of a mesh of X columns holds the x-th of X equal parts of every tensor, in the tensor's own order. The last
parts are padded with zeros. A shard has as many dimensions as its tensor (at least one); all but the last have size 1. So a
rule such as "decay tensors with two or more dimensions" also holds for shards.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.parallel.buckets import shard_size
from jaxdp.parallel.mesh import HORIZONTAL


def shard_shape(shape: Sequence[int], parts: int, shard_parts: int = 1) -> tuple[int, ...]:
    """The shape of `shard_parts` consecutive shards of a tensor in `parts` parts; with all of them, the shape on all
    devices."""
    return (1,) * (len(shape) - 1) + (shard_parts * shard_size(shape, parts),)


def partition_spec(shape: Sequence[int]) -> PartitionSpec:
    """The sharding of a tensor whose shards are along the rows of the mesh; one without elements is whole everywhere."""
    if 0 in shape:
        return PartitionSpec()
    return PartitionSpec(*(None,) * (len(shape) - 1), HORIZONTAL)


def to_parts(tensor: jax.Array, parts: int) -> jax.Array:
    """[parts, elements of a shard]: the shards of a tensor, without their leading dimensions."""
    flat = tensor.reshape(-1)
    return jnp.pad(flat, (0, parts * shard_size(tensor.shape, parts) - flat.size)).reshape(parts, -1)


def from_parts(shards: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The tensor of a shape from the result of `to_parts`."""
    return shards.reshape(-1)[: math.prod(shape)].reshape(shape)


def own_shard(tensor: jax.Array) -> jax.Array:
    """This device's shard of a tensor that all devices hold. Call inside `shard_map`."""
    if tensor.size == 0:
        return tensor.reshape(shard_shape(tensor.shape, 1))
    parts = lax.axis_size(HORIZONTAL)
    shard = lax.dynamic_index_in_dim(to_parts(tensor, parts), lax.axis_index(HORIZONTAL), keepdims=False)
    return shard.reshape(shard_shape(tensor.shape, parts))


def sums_of_squares_along_rows(*trees: Any) -> tuple:
    """For each tree, the sum of squares of every tensor, from the shards on the devices: one float32 message along the rows.

    Call inside `shard_map`. Shards are padded with zeros, which add nothing.
    """
    leaves, structure = jax.tree.flatten(trees)
    if not leaves:
        return trees
    leaves = [leaf.astype(jnp.float32) for leaf in leaves]
    vectors = [index for index, leaf in enumerate(leaves) if leaf.ndim == 1]
    others = [index for index, leaf in enumerate(leaves) if leaf.ndim > 1]
    partial_sums = [jnp.stack([jnp.sum(jnp.square(leaves[index])) for index in others])] if others else []
    if vectors:  # as rows of one matrix, so that one kernel sums all of them
        longest = max(leaves[index].size for index in vectors)
        rows = jnp.stack([jnp.pad(leaves[index], (0, longest - leaves[index].size)) for index in vectors])
        partial_sums.append(jnp.sum(jnp.square(lax.optimization_barrier(rows)), axis=1))
    with jax.named_scope("all-reduce"):
        sums = lax.psum(jnp.concatenate(partial_sums), HORIZONTAL)
    return jax.tree.unflatten(structure, [sums[place] for place in np.argsort(others + vectors)])
