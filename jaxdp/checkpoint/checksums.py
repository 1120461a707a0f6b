"""Array checksums; detection of diverged replicas."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

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

    Of sharded arrays, devices with the same part are compared. Returns all devices of a part if no value of it is held by more
    than half: the correct one is then unknown.
    """
    replicas: dict[int, dict[jax.Device, list[jax.Array]]] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            shard.data.copy_to_host_async()
            replicas.setdefault(_part(leaf, shard.index), {}).setdefault(shard.device, []).append(shard.data)
    diverged: set[jax.Device] = set()
    for by_device in replicas.values():
        reference, *rest = by_device.values()
        if not all(_bitwise_equal(reference, arrays) for arrays in rest):
            diverged |= {*minority({device: tuple(map(array_checksum, arrays)) for device, arrays in by_device.items()})}
    return sorted(diverged, key=lambda device: device.id)


WHOLE = -1  # the part of an array that is whole on every device


def _part(array: jax.Array, index: tuple[slice, ...]) -> int:
    """The number of a device's part of an array that is sharded along its last axis, or `WHOLE`. index: of its elements."""
    if array.sharding.is_fully_replicated or array.size == 0:
        return WHOLE
    side = index[-1]
    return (side.start or 0) // ((side.stop or array.shape[-1]) - (side.start or 0))


class Parts(NamedTuple):
    """The parts of sharded arrays that a process's devices hold: their numbers, of `total`; sharded: whether each array is."""

    numbers: tuple[int, ...]
    total: int
    sharded: tuple[bool, ...]


def local_parts(tree: Any) -> Parts:
    """The parts of a tree's sharded arrays that this process's devices hold; none for a tree that is whole on every device."""
    sharded, numbers, count = [], set(), 1
    for leaf in jax.tree.leaves(tree):
        held = {_part(leaf, shard.index) for shard in leaf.addressable_shards} - {WHOLE}
        sharded.append(bool(held))
        if held:
            numbers |= held
            count = leaf.shape[-1] // leaf.addressable_shards[0].data.shape[-1] if leaf.size else count
    return Parts(tuple(sorted(numbers)), count, tuple(sharded))


def part_checksums(host_state: Any, parts: Parts) -> dict[str, str]:
    """Part -> checksum of that part of all sharded arrays, for the parts of this process. host_state: whole NumPy arrays."""
    arrays = [leaf.reshape(-1) for leaf, sharded in zip(jax.tree.leaves(host_state), parts.sharded, strict=True) if sharded]
    checksums = {}
    for number in parts.numbers:
        pieces = (array[number * size : (number + 1) * size] for array in arrays if (size := -(-array.size // parts.total)))
        checksums[str(number)] = hashlib.sha256("".join(map(array_checksum, pieces)).encode()).hexdigest()
    return checksums


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
