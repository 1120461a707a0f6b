"""Modules of XLA's TPU compiler, in the terms of `jaxdp.xla.hlo`: asynchronous collectives, and traffic of the HBM alone.

The compiler begins a collective in one fusion and ends it in another, and kernels in between that are fused with it carry it
on. It copies arrays to the vector memory of a chip, "S(1)", before kernels read them there.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from jaxdp.xla import hlo

BEGIN, END = "AsyncCollectiveStart", "AsyncCollectiveDone"  # custom calls
SCATTER = "all-reduce-scatter"  # name of a fusion of an all-reduce and the slice of it that remains: a reduce-scatter
NO_DATA = {"AllocateBuffer", "ConcatBitcast"}
_ARRAY = re.compile(r"\b(" + "|".join(hlo.BYTES) + r")\[([\d,]*)\](?:\{([\d,]*):?(?:T\(([\d,]+)\))?([^}]*)\})?")
_MEMORY = re.compile(r"S\(\d+\)")


def hbm_bytes(shape: str) -> int:
    """Bytes of the arrays in the text of a type that are in HBM, padded to whole tiles."""
    total = 0
    for dtype, sizes, minor_first, tile, rest in _ARRAY.findall(shape):
        padded = [int(n) for n in sizes.split(",") if n]
        axes = [int(axis) for axis in minor_first.split(",") if axis]
        for axis, side in zip(axes, reversed(tile.split(",")), strict=False):  # a tile may have fewer axes
            padded[axis] += -padded[axis] % int(side or 1)
        total += 0 if _MEMORY.search(rest) else hlo.BYTES[dtype] * math.prod(padded)
    return total


def read_schedule(text: str, devices: int) -> hlo.DeviceWork:
    """`hlo.read_schedule` of a module for TPUs. kernel_bytes: of operands and results in HBM, and of copies from and to it."""
    computations, entry = hlo.parse(text)
    loops = _iterations(text)
    plain = {name: list(_plain(instructions, computations, loops)) for name, instructions in computations.items()}
    return hlo.count_work(plain, entry, devices)


def _plain(
    instructions: list[hlo.Instruction], computations: hlo.Computations, loops: dict[str, str]
) -> Iterator[hlo.Instruction]:
    """The instructions, with a start and a done for each asynchronous collective, and without it in the kernels between.

    loops: iterations by name of the condition.
    """
    shapes = {instruction.name: instruction.shape for instruction in instructions}
    carried: dict[str, str] = {}  # name of a value -> name of the start of the collective that the value belongs to
    kernels = set[str]()  # names of those between
    for one in instructions:
        calls = _custom_calls(one, computations)
        start = next((carried[operand] for operand in one.operands if operand in carried), None)
        if one.opcode == "custom-call" and calls & NO_DATA:
            one = dataclasses.replace(one, opcode="bitcast")
        elif BEGIN in calls:
            carried[one.name] = one.name
            one = dataclasses.replace(one, opcode="fusion-start")
        elif END in calls and start:
            one = dataclasses.replace(one, opcode="fusion-done", operands=(start,))
        elif start and one.opcode == "get-tuple-element":
            if one.operands[0] not in kernels or not re.match(r", index=0\b", one.attributes):  # the kernel's own result
                carried[one.name] = start
        elif start and one.opcode == "fusion" and hlo.collective_in(computations, one):
            carried[one.name] = start
            kernels.add(one.name)
            own = tuple(operand for operand in one.operands if operand not in carried)
            results = _ARRAY.search(one.shape)  # first its own, then the collective's
            one = dataclasses.replace(one, opcode="kernel", operands=own, shape=results.group() if results else "")
        elif one.called and one.called[0].startswith(SCATTER) and (inner := hlo.collective_in(computations, one)):
            one = dataclasses.replace(one, opcode="reduce-scatter", attributes=inner.attributes)
        elif one.opcode == "while":
            condition = re.findall(r"condition=%([\w.\-]+)", one.attributes)[0]
            known = f', "known_trip_count":{{"n":"{loops[condition]}"}}' if condition in loops else ""
            one = dataclasses.replace(one, attributes=one.attributes + known)
        moved = sum(map(hbm_bytes, [*(shapes.get(operand, "") for operand in one.operands), one.shape]))
        if one.opcode in hlo.COPIES:
            source = shapes.get(one.operands[0], "")
            result = next((part.group() for part in _ARRAY.finditer(one.shape) if part.group() != source), source)
            moved = hbm_bytes(_MEMORY.sub("", result)) * sum(hbm_bytes(memory) > 0 for memory in (source, result))
        yield dataclasses.replace(one, moved=moved)


def _iterations(text: str) -> dict[str, str]:
    """How often a loop runs, by name of its condition, if it counts from 0 to a constant, as `jax.lax.scan` does."""
    counts = {}
    for computation in text.split("\n}\n"):
        name, limits = re.search(r"^%([\w.\-]+) \(", computation, re.M), re.findall(r" constant\((\d+)\)", computation)
        if name and len(limits) == 1 and re.search(r"ROOT .* compare\(.*direction=LT", computation):
            counts[name[1]] = limits[0]
    return counts


def _custom_calls(instruction: hlo.Instruction, computations: hlo.Computations) -> set[str]:
    """Targets of the custom calls of an instruction and of the computations that it runs."""
    inner = [instruction, *(each for name in instruction.called for each in computations.get(name, ()))]
    return {target for each in inner for target in re.findall(r'custom_call_target="([^"]+)"', each.attributes)}
