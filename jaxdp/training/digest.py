"""Telling what a disk gives back from what was saved, and one device's copy of a state from another's."""

import zlib
from collections import Counter

import google_crc32c
import jax
import numpy as np


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


def devices_that_differ(tree) -> list:
    """This process's devices whose own copies of a replicated tree are not, bit for bit, what most of them hold.

    All of them where no copy is held by more than half: it then cannot be told which is right.
    """
    copies = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            shard.data.copy_to_host_async()
            copies.setdefault(shard.device, []).append(shard.data)
    reference, *others = copies.values()
    if all(_same_bits(reference, other) for other in others):
        return []
    held = {device: tuple(digest(array) for array in arrays) for device, arrays in copies.items()}
    (common, times), *_ = Counter(held.values()).most_common(1)
    return [device for device, digests in held.items() if digests != common or 2 * times <= len(held)]


def _same_bits(some, others) -> bool:
    return all(np.array_equal(_words(one), _words(other)) for one, other in zip(some, others, strict=True))


def _words(array):
    """The bits of a device's array as whole numbers: -0.0 is not 0.0, and a NaN is itself."""
    host = np.asarray(array)
    return host.reshape(-1).view(f"u{host.itemsize}")
