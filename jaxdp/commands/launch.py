"""`jaxdp launch`."""

import dataclasses
import sys

from jaxdp.flags import parse


def run(arguments, program):
    @dataclasses.dataclass(frozen=True)
    class Launch:
        """Start the processes of one run on this machine: each line they print is shown behind its rank, and when one fails all
        are ended.

        Examples:
          jaxdp launch --processes 2 -- train.py --mesh.cpu-devices 4
          jaxdp launch --processes 8 --restarts 3 -- train.py --config imagenet_goyal_256
        """

        processes: int
        """how many; GPUs are dealt out evenly among them"""
        restarts: int = 0
        """how often to start again after a failure; a run goes on from its last checkpoint"""

    own, command = arguments, []
    if "--" in arguments:
        place = arguments.index("--")
        own, command = arguments[:place], arguments[place + 1 :]
    chosen = parse(Launch, own, program)
    from jaxdp.launch import launch

    sys.exit(launch(command, chosen.processes, chosen.restarts))
