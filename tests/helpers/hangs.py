"""Heartbeats and stack traces of processes that make no progress."""

from jaxdp.distributed import stack_traces
from jaxdp.distributed.hang_rules import HangLimits
from jaxdp.distributed.status import Heartbeat

LIMITS = HangLimits(30.0, 1800.0)


def stack(frame, waits_for="", name=stack_traces.MAIN):
    return {"name": name, "frames": [frame], "waits_for": waits_for}


WORKING = [stack("train.py:7 in __getitem__")]
WAITING_FOR_RANKS = [stack("jaxdp/distributed/control_channel.py:9 in wait_until", stack_traces.OTHER_RANKS)]
WAITING_FOR_DEVICES = [stack("jax/array.py:9 in _value", stack_traces.DEVICES)]
COMPILING = [
    stack("jaxdp/distributed/preemption.py:9 in wait_for", stack_traces.OTHER_THREAD),
    stack("jax/compiler.py:9 in backend_compile", stack_traces.COMPILER, "compile_0"),
]
IN_CALLBACK = [*WAITING_FOR_DEVICES, stack("train.py:3 in callback", name=stack_traces.NATIVE)]


def beat(position, idle_seconds, activity="step", step=7, *, typical_seconds=0.5, **fields):
    """The heartbeat of a process that has passed three barriers, and `position` activities since."""
    return Heartbeat(
        activity, step, position=(0, 3, position), idle_seconds=idle_seconds, typical_seconds=typical_seconds, **fields
    )
