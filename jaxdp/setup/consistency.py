"""Checks that all processes of a run have the same configuration, code, data and run directory."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from jaxdp.config import Config
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import ConfigError, printable
from jaxdp.files import CONFIG, read_regular
from jaxdp.training.result import versions
from jaxdp.validation import flatten

MAY_DIFFER = ("data.directory", "data.threads", "finetune.weights", "storage.directory")  # paths and cores of a host
VISIBLE_SECONDS = 20.0  # within which every host must see a file that rank 0 wrote to a shared directory
DIGEST_SAMPLES = 8
DIGEST_BYTES, GROUP_BYTES = 2**32, 2**24  # of pixels in memory: that are read, and that share a checksum


def check(group: ProcessGroup, fingerprint_of_process: Callable[[], dict[str, str]]) -> None:
    """Raise ConfigError, naming the differences, if a process's fingerprint (name -> value) differs from rank 0's."""
    if group.num_processes == 1:
        return
    local = fingerprint_of_process()
    digest = hashlib.sha256(json.dumps(local, sort_keys=True).encode()).hexdigest()
    digests = group.all_gather_object("the configuration digests", digest)
    if len(set(digests)) == 1:
        return
    by_rank = group.all_gather_object("the configurations of all processes", local)
    rank = next(rank for rank, other in enumerate(by_rank) if other != by_rank[0])
    expected, other = by_rank[0], by_rank[rank]
    differences = [
        f"{printable(name)}: {printable(expected.get(name), 1000)} on rank 0, {printable(other.get(name), 1000)} on rank {rank}"
        for name in expected.keys() | other.keys()
        if expected.get(name) != other.get(name)
    ]
    raise ConfigError(
        "processes",
        reason=f"rank {rank} on {group.hosts[rank]} differs from rank 0 on {group.hosts[0]} ({'; '.join(sorted(differences))})",
        hint="start all processes with the same command, code and data",
    )


def fingerprint(
    config: Config, resume: object = "auto", accept_changes: bool = False, *, schedule_from_now: bool = False
) -> dict[str, str]:
    """Name -> value, as text, of everything but the data that must be equal on all processes of a run."""
    fields = {name: repr(value) for name, value in flatten(dataclasses.asdict(config)).items() if name not in MAY_DIFFER}
    code = {"code of jaxdp": code_digest()} | {f"version of {name}": version for name, version in versions().items()}
    flags = {"--resume": resume, "--accept-changes": accept_changes, "--schedule-from-now": schedule_from_now}
    return fields | code | {flag: str(value) for flag, value in flags.items()}


def code_digest() -> str:
    """Digest of the names and contents of all Python files of the package."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def data_digest(source: Any) -> str:
    """Number of images and a digest of their labels, their names, the pixels in memory, and a few images as read.

    names: `identity()` of a source, equal wherever the data lie. Of pixels beyond DIGEST_BYTES, evenly spaced images count.
    """
    items = getattr(source, "source", None) or source
    indices = np.unique(np.linspace(0, len(source) - 1, DIGEST_SAMPLES).astype(np.int64))
    images, labels = source.batch(indices, indices)
    digest = hashlib.sha256(np.ascontiguousarray(images).tobytes() + np.ascontiguousarray(labels).tobytes())
    labels = np.asarray(getattr(items, "labels", ()))
    digest.update((labels.astype(np.int64) if labels.dtype.kind in "iub" else labels).tobytes())
    if (cumulative := getattr(source, "cumulative", None)) is not None:
        digest.update(cumulative.tobytes())
    if hasattr(items, "identity"):
        digest.update("\0".join(items.identity()).encode("utf-8", "surrogateescape"))
    for each in (source, items):
        if isinstance(pixels := getattr(each, "images", None), np.ndarray) and pixels.dtype == np.uint8:
            digest.update(_checksums(pixels).tobytes())
    return f"{len(source)} images, {digest.hexdigest()[:16]}"


def _checksums(pixels: np.ndarray) -> np.ndarray:
    """CRC32C of groups of images: [groups] uint32. pixels: [N, ...]."""
    pixels = pixels[:: -(-pixels.nbytes // DIGEST_BYTES) or 1]
    rows = max(1, GROUP_BYTES * len(pixels) // max(1, pixels.nbytes))
    groups = (pixels[start : start + rows].tobytes() for start in range(0, len(pixels), rows))
    return np.array([google_crc32c.value(group) for group in groups], np.uint32)


def check_shared_directory(group: ProcessGroup, path: Path) -> None:
    """Raise ConfigError if a process does not see the run directory that rank 0 has written to."""
    if group.num_processes == 1:
        return
    file = path / CONFIG
    digest = hashlib.sha256(read_regular(file)).hexdigest() if group.is_rank0 else None
    expected = group.broadcast_object("file in the directory", digest)
    began = time.monotonic()
    while not (file.exists() and hashlib.sha256(read_regular(file)).hexdigest() == expected):
        if time.monotonic() - began > VISIBLE_SECONDS:
            rank, hosts = group.rank, group.hosts
            raise ConfigError(
                "--workdir",
                str(path),
                reason=f"rank {rank} on {hosts[rank]} does not see the files that rank 0 on {hosts[0]} wrote",
                hint="use a directory that all hosts share",
            )
        time.sleep(0.2)
