"""Types of command-line options that several commands share."""

import dataclasses
import io
import os
import sys
from typing import IO, Annotated, Any, cast

from typing_extensions import Doc

from jaxdp.config import Config
from jaxdp.errors import ConfigError
from jaxdp.flag_help import asks_for_help
from jaxdp.flags import Arg, flag_value

Switch = Annotated[bool, Arg(negatable=False)]  # --name without --no-name
CheckpointName = Annotated[
    str,
    Doc(
        "Checkpoint to use: result (the newest, or with early stopping the best), newest, best (by `stop.metric`), or its "
        "number of samples as listed by `jaxdp checkpoints`"
    ),
]
ConfigFields = Annotated[Config, Arg(is_prefix=False)]  # the fields of Config as flags without a prefix


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start of a run of several processes."""

    cluster: str = "auto"
    """Launcher whose variables describe the processes of the run: auto, none, jax, kubeflow, torchrun, openmpi, slurm or tpu"""
    coordinator: str | None = None
    """HOST:PORT of rank 0, with --processes and --rank, instead of a launcher's variables"""
    processes: int | None = None
    """Number of processes of the run, on all hosts"""
    rank: int | None = None
    """Rank of this process, from 0"""


def weights_flag(arguments: list[str]) -> str | None:
    """The file of --weights. Raises ConfigError if a flag beside it chooses a run."""
    weights = None if asks_for_help(arguments) else flag_value(arguments, "--weights")
    for flag in ("--workdir", "--checkpoint"):
        if weights is not None and flag_value(arguments, flag) is not None:
            raise ConfigError("--weights", weights, reason=f"not possible with {flag}", hint="give one of them")
    return weights


LaunchFields = Annotated[Launch, Arg(is_prefix=False)]  # the fields of Launch as flags without a prefix
# Flags of config fields that `jaxdp train --help` and `jaxdp plan --help` show; all others are in the help of their group.
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


def stdout_for_the_document() -> IO[str]:
    """The original stdout. The file descriptor is redirected to stderr, because native libraries such as gloo write to it."""
    from jaxdp.cli.main import STDOUT, Output  # which starts the commands

    try:
        number, errors = sys.stdout.fileno(), sys.stderr.fileno()
    except OSError:  # captured by a notebook or a test
        return sys.stdout
    document = io.TextIOWrapper(io.BufferedWriter(cast(Any, Output(os.dup(number), STDOUT))), encoding="utf-8")
    os.dup2(errors, number)
    return document
