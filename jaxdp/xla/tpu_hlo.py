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
BYTES = hlo.BYTES | {"token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*):?(?:T\(([\d,]+)\))?([^}]*)\})?")
_MEMORY = re.compile(r"S\(\d+\)")


def hbm_bytes(shape: str) -> int:
    """Bytes of the arrays in the text of a type that are in HBM, padded to tiles. Raises ValueError for an unknown type."""
    total = 0
    for dtype, sizes, minor_first, tile, rest in _ARRAY.findall(shape):
        if dtype not in BYTES:
            raise ValueError(f"unknown type {dtype}")
        padded = [int(n) for n in sizes.split(",") if n]
        axes = [int(axis) for axis in minor_first.split(",") if axis]
        for axis, side in zip(axes, reversed(tile.split(",")), strict=False):  # a tile may have fewer axes
            padded[axis] += -padded[axis] % int(side or 1)
        total += 0 if _MEMORY.search(rest) else BYTES[dtype] * math.prod(padded)
    return total


def read_schedule(text: str, devices: int) -> hlo.DeviceWork:
    """`hlo.read_schedule` of a module for TPUs. kernel_bytes: of operands and results in HBM, and of copies from and to it."""
    computations, entry = hlo.parse(text)
    loops = _iterations(text)
    translated = {name: list(_translated(instructions, computations, loops)) for name, instructions in computations.items()}
    return hlo.count_work(translated, entry, devices)


def _translated(
    instructions: list[hlo.Instruction], computations: hlo.Computations, loops: dict[str, str]
) -> Iterator[hlo.Instruction]:
    """The instructions, with a start and a done for each asynchronous collective, and without it in the kernels between.

    loops: iterations by name of the condition.
    """
    shapes = {instruction.name: instruction.shape for instruction in instructions}
    start_of: dict[str, str] = {}  # name of a value -> name of the start of the collective that the value belongs to
    kernels = set[str]()  # names of those between
    for instruction in instructions:
        new = instruction
        calls = _custom_calls(instruction, computations)
        start = next((start_of[operand] for operand in instruction.operands if operand in start_of), None)
        if instruction.opcode == "custom-call" and calls & NO_DATA:
            new = dataclasses.replace(instruction, opcode="bitcast")
        elif BEGIN in calls:
            start_of[instruction.name] = instruction.name
            new = dataclasses.replace(instruction, opcode="fusion-start")
        elif END in calls and start:
            new = dataclasses.replace(instruction, opcode="fusion-done", operands=(start,))
        elif start and instruction.opcode == "get-tuple-element":
            is_first = re.match(r", index=0\b", instruction.attributes)
            if not (is_first and instruction.operands[0] in kernels):  # which is the kernel's own result
                start_of[instruction.name] = start
        elif start and instruction.opcode == "fusion" and hlo.collective_in(computations, instruction):
            start_of[instruction.name] = start
            kernels.add(instruction.name)
            own = tuple(operand for operand in instruction.operands if operand not in start_of)
            results = _ARRAY.search(instruction.shape)  # first its own, then the collective's
            new = dataclasses.replace(instruction, opcode="kernel", operands=own, shape=results.group() if results else "")
        elif next(iter(instruction.called), "").startswith(SCATTER) and (inner := hlo.collective_in(computations, instruction)):
            new = dataclasses.replace(instruction, opcode="reduce-scatter", attributes=inner.attributes)
        elif instruction.opcode == "while":
            condition = re.findall(r"condition=%([\w.\-]+)", instruction.attributes)[0]
            known = f', "known_trip_count":{{"n":"{loops[condition]}"}}' if condition in loops else ""
            new = dataclasses.replace(instruction, attributes=instruction.attributes + known)
        moved = sum(map(hbm_bytes, [*(shapes.get(operand, "") for operand in new.operands), new.shape]))
        if new.opcode in hlo.COPIES:
            source = shapes.get(new.operands[0], "")
            result = next((part.group() for part in _ARRAY.finditer(new.shape) if part.group() != source), source)
            moved = hbm_bytes(_MEMORY.sub("", result)) * sum(hbm_bytes(memory) > 0 for memory in (source, result))
        yield dataclasses.replace(new, moved=moved)


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
