"""Reading a compiled XLA module: its kernels, their bytes, and what runs beside each collective in the schedule."""

import math
import re
from dataclasses import dataclass, field

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
COLLECTIVES = {
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "collective-permute": "permute",
    "all-to-all": "all-to-all",
}
# Instructions that move nothing.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "iota", "partition-id"}
# Of asynchronous operations, whose start is where they are accounted for.
ENDS = ("-done", "-update")
_SHAPE = re.compile(r"\b(" + "|".join(BYTES) + r")\[([0-9,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"^([\w\-]+)\(")


@dataclass(frozen=True)
class Instruction:
    """One line of a module: shape is the text of its result's type, operands are names, attributes the text after them."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def called(self) -> list[str]:
        """Computations that it runs: of a fusion, an asynchronous operation, a loop, a condition."""
        names = re.findall(r"(?:calls|body|to_apply|called_computations)=\{?%?([\w.\-]+)", self.attributes)
        return names + re.findall(r"%([\w.\-]+)", "".join(re.findall(r"branch_computations=\{([^}]*)\}", self.attributes)))

    @property
    def trips(self) -> int | None:
        """How often a loop runs, None where the compiler does not know; 1 for anything else."""
        if self.opcode != "while":
            return 1
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(known[1]) if known else None


@dataclass
class CompiledCollective:
    """A collective as compiled, of one tensor or, where the compiler has combined them, of several.

    beside: kernels that the schedule puts between its start and its end, with their bytes.
    """

    operation: str
    dtype: str
    operand_bytes: int
    groups: tuple[tuple[int, ...], ...]
    count: int = 1
    asynchronous: bool = False
    beside: int = 0
    beside_bytes: int = 0


@dataclass
class Schedule:
    """What a device does in a step. kernel_bytes: operands and results of every kernel, once each time that it runs."""

    kernels: int = 0
    kernel_bytes: int = 0
    collectives: list[CompiledCollective] = field(default_factory=list)


def num_bytes(shape: str) -> int:
    """Bytes of all arrays in the text of a type, layouts left out of account."""
    return sum(BYTES[dtype] * math.prod(sizes) for dtype, sizes in arrays(shape))


def arrays(shape: str) -> list[tuple[str, list[int]]]:
    """(dtype, dimensions) of all arrays in the text of a type."""
    return [(dtype, [int(n) for n in sizes.split(",") if n]) for dtype, sizes in _SHAPE.findall(shape)]


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """(instructions of every computation in their order, name of the entry computation) of an HLO module's text."""
    computations, current, entry = {}, None, None
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            current = computations.setdefault(opened[2], [])
            entry = opened[2] if opened[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(_instruction(found[1], found[2]))
    return computations, entry


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, call = rest[:end], rest[end:].lstrip()
    opcode = _OPCODE.match(call)[1]
    end = _closing(call, len(opcode))
    operands = re.findall(r"%([\w.\-]+)", call[len(opcode) : end])
    return Instruction(name, shape, opcode, tuple(operands), call[end:])


def _closing(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    raise ValueError(f"unbalanced parentheses: {text[:80]}")


def replica_groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices of a collective, from any of the three forms in which XLA writes them; pairs of a permute too."""
    if pairs := re.search(r"source_target_pairs=\{(\{[^=]*?\})\}", attributes):
        return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*(?:\([^)]*\)\s*)?\{([^}]*)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        chosen = re.findall(r"'(\w+)'", named[2])
        order = [i for i, axis in enumerate(sizes) if axis not in chosen] + [list(sizes).index(axis) for axis in chosen]
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())).transpose(order)
        return tuple(map(tuple, ids.reshape(-1, math.prod(sizes[axis] for axis in chosen)).tolist()))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, sizes, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        return tuple(map(tuple, (ids if order is None else ids.transpose(order)).reshape(shape).tolist()))
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", attributes)
    if listed:
        return tuple(tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    return (tuple(range(devices)),)


def read_schedule(text: str, devices: int) -> Schedule:
    """Kernels, bytes and collectives of a scheduled module, loops multiplied out.

    A loop of unknown length counts once. Raises ValueError for one with a collective in it.
    """
    computations, entry = parse(text)
    schedule = Schedule()
    _read(computations, entry, 1, devices, schedule)
    return schedule


def collective_in(computations, instruction: Instruction) -> Instruction | None:
    """The collective that an instruction is, or that the fusion or asynchronous computation it runs consists of."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in COLLECTIVES:
        return instruction
    if opcode in ("fusion", "async", "call"):
        for name in instruction.called:
            for inner in computations.get(name, ()):
                if inner.opcode.removesuffix("-start") in COLLECTIVES:
                    return inner
    return None


def _read(computations, name: str, times: int, devices: int, schedule: Schedule) -> None:
    shapes = {one.name: one.shape for one in computations[name]}
    running = {}
    for one in computations[name]:
        if one.opcode in FREE:
            continue
        if one.opcode.endswith(ENDS):
            running.pop(one.operands[0], None)
            continue
        if one.opcode in ("while", "conditional"):
            before = len(schedule.collectives)
            for called in one.called:
                _read(computations, called, times * (one.trips or 1), devices, schedule)
            if one.trips is None and len(schedule.collectives) > before:
                raise ValueError(
                    f"a collective lies in the loop {one.name}, of which the compiler does not know how often it runs"
                )
            continue
        operand_bytes = sum(num_bytes(shapes.get(operand, "")) for operand in one.operands)
        if inner := collective_in(computations, one):
            dtypes = {dtype for operand in one.operands for dtype, _ in _SHAPE.findall(shapes.get(operand, ""))}
            collective = CompiledCollective(
                COLLECTIVES[inner.opcode.removesuffix("-start")],
                " + ".join(sorted(dtypes)),
                operand_bytes,
                replica_groups(inner.attributes, devices),
                times,
                one.opcode.endswith("-start"),
            )
            schedule.collectives.append(collective)
            if collective.asynchronous:
                running[one.name] = collective
            continue
        size = operand_bytes + num_bytes(one.shape)
        schedule.kernels += times
        schedule.kernel_bytes += times * size
        for collective in running.values():
            collective.beside += 1
            collective.beside_bytes += size
