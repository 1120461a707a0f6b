"""A number for every array of a state, computed where the arrays are: tells replicas, and what a disk gives back, apart."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.parallel.mesh import AXES

_WIDTHS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def _words(leaf):
    if leaf.dtype == jnp.bool_:
        return leaf.ravel().astype(jnp.uint32)
    return lax.bitcast_convert_type(leaf.ravel(), _WIDTHS[leaf.dtype.itemsize]).astype(jnp.uint32)


def _digest(leaf):
    """uint32 [2]: two sums over all words, each mixed with its place by steps that can be undone.

    Therefore one changed word always changes both; several changed words go unseen with a chance of 2^-64.
    """
    words = _words(leaf)
    places = lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B1)
    places ^= places >> 15
    one = (words ^ places) * jnp.uint32(0x85EBCA6B)
    other = (words + places * jnp.uint32(0xC2B2AE35)) * jnp.uint32(0x27D4EB2F)
    return jnp.stack([jnp.sum(one ^ (one >> 15), dtype=jnp.uint32), jnp.sum(other ^ (other >> 13), dtype=jnp.uint32)])


def make_digests(mesh):
    """digests(tree) -> (uint32 [devices, leaves, 2], bool [devices]): of every device's own copy of a replicated tree.

    The bools tell whether all floating-point numbers of the copy are finite.
    """

    def per_device(tree):
        leaves = jax.tree.leaves(tree)
        numbers = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in numbers]).all() if numbers else jnp.bool_(True)
        return lax.all_gather((jnp.stack([_digest(leaf) for leaf in leaves]), finite), AXES)

    everywhere = PartitionSpec()
    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))


def described(tree, digests) -> dict[str, list]:
    """Path of each leaf -> [dtype, shape, digest in hexadecimal]. digests: uint32 [leaves, 2]."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): [str(leaf.dtype), list(leaf.shape), f"{int(one[0]):08x}{int(one[1]):08x}"]
        for (path, leaf), one in zip(paths, np.asarray(digests), strict=True)
    }


def odd_ones_out(digests) -> tuple[list[int], int] | None:
    """(places of the devices whose copies differ from what most have, the first leaf that differs); None where all agree.

    digests: uint32 [devices, leaves, 2].
    """
    digests = np.asarray(digests)
    kinds, which, counts = np.unique(digests.reshape(len(digests), -1), axis=0, return_inverse=True, return_counts=True)
    if len(kinds) == 1:
        return None
    most = int(counts.argmax())
    odd = np.flatnonzero(which.ravel() != most)
    differs = (digests[odd[0]] != kinds[most].reshape(digests.shape[1:])).any(-1)
    return odd.tolist(), int(differs.argmax())
