"""Telling what a disk gives back from what was saved, and one device's copy of a state from another's."""

import zlib

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.parallel.mesh import AXES

_WIDTHS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def digest(array) -> str:
    """Sixteen hexadecimal digits of the bytes of a host array: CRC-32C and CRC-32, which see any burst of 32 bits."""
    data = np.asarray(array).tobytes()
    return f"{google_crc32c.value(data):08x}{zlib.crc32(data):08x}"


def described(tree) -> dict[str, list]:
    """Path of each leaf -> [dtype, shape, digest]; the digest is None for leaves that are only shapes."""
    return {
        jax.tree_util.keystr(path): [str(leaf.dtype), list(leaf.shape), digest(leaf) if isinstance(leaf, np.ndarray) else None]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _words(leaf):
    if leaf.dtype == jnp.bool_:
        return leaf.ravel().astype(jnp.uint32)
    return lax.bitcast_convert_type(leaf.ravel(), _WIDTHS[leaf.dtype.itemsize]).astype(jnp.uint32)


def make_fingerprints(mesh):
    """fingerprints(tree) -> (uint32 [devices, 2], bool [devices]): of every device's own copy of a replicated tree.

    Two sums over all words, each mixed with its place by steps that can be undone: one changed word always changes both,
    several go unseen with a chance of 2^-64. The bools tell whether all floating-point numbers are finite.
    """

    def per_device(tree):
        leaves = jax.tree.leaves(tree)
        words = lax.optimization_barrier(jnp.concatenate([_words(leaf) for leaf in leaves]))  # one loop, not one for each leaf
        numbers = [leaf.ravel() for leaf in leaves if leaf.dtype == jnp.float32]
        finite = jnp.isfinite(jnp.concatenate([jnp.zeros(1), *numbers])).all()
        places = lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B1)
        places ^= places >> 15
        one = (words ^ places) * jnp.uint32(0x85EBCA6B)
        other = (words + places * jnp.uint32(0xC2B2AE35)) * jnp.uint32(0x27D4EB2F)
        sums = [jnp.sum(one ^ (one >> 15), dtype=jnp.uint32), jnp.sum(other ^ (other >> 13), dtype=jnp.uint32)]
        return lax.all_gather((jnp.stack(sums), finite), AXES)

    everywhere = PartitionSpec()
    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))


def odd_ones_out(fingerprints) -> list[int]:
    """The places of the devices whose copies differ from what most have. fingerprints: uint32 [devices, 2]."""
    _, which, counts = np.unique(np.asarray(fingerprints), axis=0, return_inverse=True, return_counts=True)
    return np.flatnonzero(which.ravel() != counts.argmax()).tolist()
