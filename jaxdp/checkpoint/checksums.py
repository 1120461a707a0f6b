"""Array checksums; detection of diverged replicas."""

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import google_crc32c
import jax
import numpy as np


def array_checksum(array: np.typing.ArrayLike) -> str:
    """CRC-32C and CRC-32 of an array's bytes: 16 hexadecimal digits. Any error burst of up to 32 bits changes them."""
    data = np.asarray(array).tobytes()
    return f"{google_crc32c.value(data):08x}{zlib.crc32(data):08x}"


def describe_arrays(tree: Any) -> dict[str, list]:
    """Path of each leaf -> [dtype, shape, checksum]; the checksum is None for leaves that are not NumPy arrays."""
    return {
        jax.tree_util.keystr(path): [
            str(leaf.dtype),
            list(leaf.shape),
            array_checksum(leaf) if isinstance(leaf, np.ndarray) else None,
        ]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def diverged_devices(tree: Any) -> list[jax.Device]:
    """This process's devices whose replicas of a tree differ, bit for bit, from those of the majority.

    Returns all of them if no value is held by more than half: the correct one is then unknown.
    """
    replicas: dict[jax.Device, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            shard.data.copy_to_host_async()
            replicas.setdefault(shard.device, []).append(shard.data)
    reference, *rest = replicas.values()
    if all(_bitwise_equal(reference, arrays) for arrays in rest):
        return []
    checksums = {device: tuple(map(array_checksum, arrays)) for device, arrays in replicas.items()}
    return minority(checksums)


def minority(values: dict) -> list:
    """The keys whose value differs from the most common one; all keys if that one is not held by more than half."""
    (common, count), *_ = Counter(values.values()).most_common(1)
    has_majority = 2 * count > len(values)
    return [key for key, value in values.items() if value != common or not has_majority]


def _bitwise_equal(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> bool:
    return all(np.array_equal(_as_integers(a), _as_integers(b)) for a, b in zip(left, right, strict=True))


def _as_integers(array: jax.Array) -> np.ndarray:
    """The bits of an array as unsigned integers: -0.0 differs from 0.0, and a NaN equals itself."""
    host = np.asarray(array)
    return host.reshape(-1).view(f"u{host.itemsize}")
