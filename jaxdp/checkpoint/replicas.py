"""Checksums of arrays, and the check of a save that all devices and processes hold the same finite state."""

import hashlib
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import jax
import numpy as np

WHOLE = ""  # in place of the number of a part: the whole state


def array_checksum(array: np.typing.ArrayLike) -> str:
    """CRC-32C and CRC-32 of an array's bytes: 16 hexadecimal digits. Any error burst of up to 32 bits changes them."""
    data = np.asarray(array).tobytes()
    return f"{google_crc32c.value(data):08x}{zlib.crc32(data):08x}"


def describe_arrays(tree: Any) -> dict[str, list]:
    """Path of each leaf -> [dtype, shape, checksum]; the checksum is None for leaves that are not NumPy arrays."""

    def describe(leaf: Any) -> list:
        return [str(leaf.dtype), list(leaf.shape), array_checksum(leaf) if isinstance(leaf, np.ndarray) else None]

    return {jax.tree_util.keystr(path): describe(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def diverged_devices(tree: Any) -> list[jax.Device]:
    """This process's devices whose replica of an array, or of a part of it, is not bit-identical to most replicas.

    If no value of a part is held by more than half of its devices, returns all of them: the correct value is then unknown.
    """
    shards = [leaf.addressable_shards for leaf in jax.tree.leaves(tree)]
    jax.tree.map(lambda shard: shard.data.copy_to_host_async(), shards)
    diverged = set()
    for of_leaf in shards:
        parts: dict[str, dict[jax.Device, np.ndarray]] = defaultdict(dict)
        for shard in of_leaf:
            data = np.asarray(shard.data)  # compared as integers: -0.0 differs from 0.0, and a NaN equals itself
            parts[str(shard.index)][shard.device] = data.reshape(-1).view(f"u{data.itemsize}")
        for replicas in parts.values():
            reference, *others = replicas.values()
            if not all(np.array_equal(reference, other) for other in others):
                diverged |= {*minority({device: array_checksum(data) for device, data in replicas.items()})}
    return sorted(diverged, key=lambda device: device.id)


def part_checksums(tree: Any) -> dict[str, str]:
    """Checksums of this process's parts of the arrays that are sharded along their last axis, by the number of the part."""
    digests: dict[str, Any] = defaultdict(hashlib.sha256)
    for leaf in jax.tree.leaves(tree):
        if not leaf.is_fully_replicated and leaf.size:
            parts = {shard.index[-1].start or 0: shard.data for shard in leaf.addressable_shards}
            for start, data in sorted(parts.items()):
                digests[str(start // data.shape[-1])].update(array_checksum(data).encode())
    return {number: digest.hexdigest() for number, digest in digests.items()}


def minority(values: dict) -> list:
    """The keys whose value differs from the most common value; all keys if no value is held by more than half."""
    counts = Counter(values.values())
    return [key for key, value in values.items() if 2 * counts[value] <= len(values)]


@dataclass
class StateReport:
    """One process's view of the saved state, exchanged as JSON. The last three fields are set when the state is written.

    diverged: names of its devices whose parameters differ from the majority. checksums: of the `WHOLE` state, unless an error
    prevents it, and of parts (see `part_checksums`). bad_images: name -> reason of images that this process skipped. finite: no
    parameter is NaN or infinite. files: name -> [bytes, checksum] of what it has written. error: why it could not write.
    """

    diverged: list[str]
    checksums: dict[str, str]
    bad_images: dict[str, str]
    finite: bool = True
    files: dict[str, list] = field(default_factory=dict)
    error: str | None = None


def rejection_reason(samples: int, reports: list[StateReport], hosts: list[str]) -> str | None:
    """Why the state must not be saved; None if it may. reports and hosts: one for each process, by rank."""
    diverged = [name for report in reports for name in report.diverged]
    diverged = diverged or [f"rank {rank} on {hosts[rank]}" for rank in _diverged_ranks(reports)]
    if diverged:
        detail = "differs from the rest" if len(diverged) == 1 else "differ from one another"
        return (
            f"the devices do not hold the same parameters at samples {samples}: {' and '.join(diverged)} {detail}; no "
            "checkpoint was saved; check the memory and the link of these devices, and that callbacks ask for a save on all "
            "processes"
        )
    if not all(report.finite for report in reports):
        return f"the parameters are not finite at samples {samples}; no checkpoint was saved"
    return None


def _diverged_ranks(reports: list[StateReport]) -> list[int]:
    """The ranks whose state differs from most ranks; if parts differ, the ranks whose part differs from most copies."""
    by_part: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, report in enumerate(reports):
        for part, checksum in report.checksums.items():
            by_part[part][rank] = checksum
    ranks = minority(by_part.pop(WHOLE, {}))
    of_parts = {rank for checksums in by_part.values() for rank in minority(checksums)}
    return sorted(of_parts or ranks) if ranks else []
