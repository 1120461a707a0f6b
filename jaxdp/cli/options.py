"""Types of command-line options that several commands share."""

import dataclasses
from typing import Annotated

import tyro

from jaxdp.config import Config

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]  # --name without --no-name
ConfigFields = Annotated[Config, tyro.conf.arg(name="")]  # the fields of Config as flags without a prefix


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start of a run of several processes."""

    cluster: str = "auto"
    """Launcher whose variables describe the processes of the run: auto, none, jax, kubeflow, torchrun, openmpi or slurm"""
    coordinator: str | None = None
    """HOST:PORT of rank 0, with --processes and --rank, instead of a launcher's variables"""
    processes: int | None = None
    """Number of processes of the run, on all hosts"""
    rank: int | None = None
    """Rank of this process, from 0"""


LaunchFields = Annotated[Launch, tyro.conf.arg(name="")]  # the fields of Launch as flags without a prefix
# Flags of config fields that `jaxdp train --help` and `jaxdp plan --help` show; the others are in the help of their group.
EVERYDAY = (
    "--epochs",
    "--seed",
    "--data.source",
    "--data.directory",
    "--model.depth",
    "--model.dtype",
    "--batch.0.global-batch",
    "--optimizer.name",
    "--schedule.learning-rate",
    "--reduce.strategy",
)
