"""Gradient aggregation over the two-dimensional mesh: how the gradients of all devices become one mean.

A strategy is a function from a flat vector to its sum over all devices, called inside `shard_map`. `mean` applies one to a
tree: large tensors travel as they are, small ones together in one message.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxdp.parallel.mesh import AXES, HORIZONTAL, VERTICAL


def psum(vector):
    """One all-reduce over all devices, the algorithm left to XLA."""
    return lax.psum(vector, AXES)


def torus(vector):
    """2D-torus all-reduce (Mikami et al., arXiv 1811.05233, section 2.2).

    Reduce-scatter along the horizontal ring, all-reduce of the own part along the vertical ring, all-gather along the
    horizontal ring. The vector is padded to a multiple of the horizontal size.
    """
    width = lax.axis_size(HORIZONTAL)
    padded = jnp.pad(vector, (0, -vector.size % width))
    part = lax.psum_scatter(padded, HORIZONTAL, scatter_dimension=0, tiled=True)
    part = lax.psum(part, VERTICAL)
    return lax.all_gather(part, HORIZONTAL, tiled=True, to="invarying")[: vector.size]


STRATEGIES = {"psum": psum, "torus": torus}
FUSE_BELOW = 16_384  # elements; copying larger tensors into a common buffer costs more than their own collective


def mean(tree, strategy: str, wire_dtype=None):
    """The mean of `tree` over both mesh axes, the same on every device. Call inside `shard_map` over both axes.

    tree: arrays that differ between devices (in JAX's words: varying), of any sizes. strategy: a key of `STRATEGIES`.
    wire_dtype: the dtype in which they travel; None keeps each leaf's. Returned leaves have the dtype they came with.
    Raises ValueError for an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: {strategy!r} is not allowed; give one of {', '.join(STRATEGIES)}")
    reduce, devices = STRATEGIES[strategy], lax.axis_size(AXES)

    def mean_of(array):
        wire = wire_dtype or array.dtype
        return reduce((array.ravel() / devices).astype(wire)).astype(array.dtype).reshape(array.shape)

    leaves, structure = jax.tree.flatten(tree)
    fused = {}
    for place, leaf in enumerate(leaves):
        if leaf.size < FUSE_BELOW:
            fused.setdefault(leaf.dtype, []).append(place)
        else:
            leaves[place] = mean_of(leaf)
    for places in fused.values():
        flat, unravel = ravel_pytree([leaves[place] for place in places])
        for place, leaf in zip(places, unravel(mean_of(flat)), strict=True):
            leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)
