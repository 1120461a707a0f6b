"""That all processes of a run are about to do the same: one configuration, one program, one data set, one directory."""

import dataclasses
import hashlib
import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

import jaxdp
from jaxdp.config import Config, ConfigError
from jaxdp.training.workdir import CONFIG
from jaxdp.validation import flatten

MAY_DIFFER = ("data.directory", "data.threads", "finetune.weights")  # where the same data lie on a host, and its cores
SHARED_SECONDS = 20.0  # within which every host must see a file in a directory that they share
SAMPLES = 8


def check(team, facts: Callable[[], dict[str, str]]) -> None:
    """Raise ConfigError where a process has other facts (name -> value, as text) than rank 0, naming them."""
    if team.processes == 1:
        return
    mine = facts()
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    digests = team.exchange("a digest of the run", digest)
    if len(set(digests)) == 1:
        return
    everywhere = team.exchange("all of the run", mine)
    rank = next(rank for rank, one in enumerate(everywhere) if one != everywhere[0])
    first, other = everywhere[0], everywhere[rank]
    different = [
        f"{name}: {first.get(name)} on rank 0, {other.get(name)} on rank {rank}"
        for name in first.keys() | other.keys()
        if first.get(name) != other.get(name)
    ]
    raise ConfigError(
        f"rank {rank} on {team.hosts[rank]} is about to run something else than rank 0 on {team.hosts[0]} "
        f"({'; '.join(sorted(different))}); start all processes with the same command, code and data"
    )


def facts(config: Config, resume="auto", accept_changes=False) -> dict[str, str]:
    """Name -> value of everything but the data in which the processes of a run must agree, as text."""
    fields = {name: repr(value) for name, value in flatten(dataclasses.asdict(config)).items() if name not in MAY_DIFFER}
    own = {"code of jaxdp": code_digest(), "version of python": platform.python_version()}
    own |= {f"version of {name}": version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")}
    return fields | own | {"--resume": str(resume), "--accept-changes": str(accept_changes)}


def data_facts(datasets) -> dict[str, str]:
    """What tells one training and held-out set from another."""
    return {"training data": data_digest(datasets.train), "held-out data": data_digest(datasets.evaluation)}


def code_digest() -> str:
    """Of all Python files of the package, by name and content."""
    root, found = Path(jaxdp.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def data_digest(source) -> str:
    """The number of images, and a digest of what is known without reading all: names, labels, and some images, spread out."""
    indices = np.unique(np.linspace(0, len(source) - 1, SAMPLES).astype(np.int64))
    images, labels = source.batch(indices, indices)
    files = getattr(source, "source", source)
    found = hashlib.sha256(np.ascontiguousarray(images).tobytes() + np.ascontiguousarray(labels).tobytes())
    found.update(np.asarray(getattr(files, "labels", ()), np.int64).tobytes())
    found.update("\0".join(Path(path).name for path in getattr(files, "paths", ())).encode())
    return f"{len(source)} images, {found.hexdigest()[:16]}"


def check_directory(team, path: Path) -> None:
    """Raise ConfigError where a process does not see the working directory that rank 0 has just written to."""
    if team.processes == 1:
        return
    file = path / CONFIG
    expected = team.share("file in the directory", hashlib.sha256(file.read_bytes()).hexdigest() if team.first else None)
    began = time.monotonic()
    while not (file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == expected):
        if time.monotonic() - began > SHARED_SECONDS:
            raise ConfigError(
                f"--workdir: {str(path)!r} is not allowed; rank {team.rank} on {team.hosts[team.rank]} does not see there what "
                f"rank 0 on {team.hosts[0]} has written; give a directory that all hosts share"
            )
        time.sleep(0.2)
