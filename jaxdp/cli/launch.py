"""`jaxdp launch`: start several processes of a run on this machine."""

import dataclasses
import sys

from jaxdp.errors import ConfigError
from jaxdp.flags import UNEXPECTED, parse


@dataclasses.dataclass(frozen=True)
class LaunchCommand:
    """Start several processes of one run on this machine. Output lines are prefixed with the rank; if one process fails, all
    are terminated.

    Examples:
      jaxdp launch --processes 2 -- train.py --mesh.cpu-devices 4
      jaxdp launch --processes 8 --restarts 3 -- train.py --config imagenet_goyal_256
    """

    processes: int
    """Number of processes; GPUs are divided evenly among them"""
    restarts: int = 0
    """Number of restarts after failures; a restarted run resumes from its last checkpoint"""


def run(arguments: list[str], program: str) -> None:
    flags, command = arguments, []
    if "--" in arguments:
        index = arguments.index("--")
        flags, command = arguments[:index], arguments[index + 1 :]
    try:
        options = parse(LaunchCommand, flags, program)
    except ConfigError as error:
        if error.reason == UNEXPECTED:
            raise ConfigError(error.field, reason=UNEXPECTED, hint="put -- before the command") from None
        raise
    from jaxdp.distributed.launch import launch

    sys.exit(launch(command, options.processes, options.restarts))
