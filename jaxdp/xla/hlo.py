"""Parser of compiled XLA modules: kernels, their bytes, and the kernels scheduled beside each collective."""

import math
import re
from dataclasses import dataclass, field

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all")
# Instructions that move no data.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "iota", "partition-id"}
FREE |= {"replica-id"}
# Ends of asynchronous operations, which are counted at their start.
ENDS = ("-done", "-update")
COPIES = ("copy-start", "slice-start")  # asynchronous; their bytes count, but they are no kernels
_SHAPE = re.compile(r"\b(" + "|".join(BYTES) + r")\[([0-9,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"^([\w\-]+)\(")


@dataclass(frozen=True)
class Instruction:
    """One line of a module. shape: text of the result type. operands: names. attributes: the text after the operands.

    moved: bytes of operands and result that count; None: all.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    moved: int | None = None

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs: of a fusion, an asynchronous operation, a loop, a conditional."""
        names = re.findall(r"(?:calls|body|to_apply|called_computations)=\{?%?([\w.\-]+)", self.attributes)
        return names + re.findall(r"%([\w.\-]+)", "".join(re.findall(r"branch_computations=\{([^}]*)\}", self.attributes)))

    @property
    def trip_count(self) -> int | None:
        """Iterations of a loop, None if the compiler does not know; 1 for other instructions."""
        if self.opcode != "while":
            return 1
        match = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(match[1]) if match else None


@dataclass
class CompiledCollective:
    """A collective as compiled, of one tensor or of several that the compiler has combined.

    count: executions per step. overlapped_kernels, overlapped_bytes: the kernels scheduled between its start and its end.
    """

    operation: str
    dtype: str
    operand_bytes: int
    groups: tuple[tuple[int, ...], ...]
    count: int
    asynchronous: bool
    overlapped_kernels: int = 0
    overlapped_bytes: int = 0


@dataclass
class DeviceWork:
    """The work of one device in a step. kernel_bytes: operands and results of all kernel executions."""

    kernels: int = 0
    kernel_bytes: int = 0
    collectives: list[CompiledCollective] = field(default_factory=list)


Computations = dict[str, list[Instruction]]  # instructions of each computation, in order


def num_bytes(shape: str) -> int:
    """Bytes of all arrays in the text of a type."""
    return sum(BYTES[dtype] * math.prod(sizes) for dtype, sizes in arrays(shape))


def arrays(shape: str) -> list[tuple[str, list[int]]]:
    """(dtype, dimensions) of all arrays in the text of a type."""
    return [(dtype, [int(n) for n in sizes.split(",") if n]) for dtype, sizes in _SHAPE.findall(shape)]


def parse(text: str) -> tuple[Computations, str]:
    """(computations, name of the entry computation) of the text of an HLO module."""
    computations: Computations = {}
    current, entry = None, ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(_instruction(match[1], match[2]))
    return computations, entry


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, call = rest[:end], rest[end:].lstrip()
    opcode = _OPCODE.findall(call)[0]
    end = _closing(call, len(opcode))
    operands = re.findall(r"%([\w.\-]+)", call[len(opcode) : end])
    return Instruction(name, shape, opcode, tuple(operands), call[end:])


def _closing(text: str, start: int) -> int:
    """The index after the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"unbalanced parentheses: {text[:80]}")


def replica_groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The device groups of a collective, from any of the forms that XLA writes; source-target pairs for a permute."""
    if pairs := re.search(r"source_target_pairs=\{(\{[^=]*?\})\}", attributes):
        return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*(?:\([^)]*\)\s*)?\{([^}]*)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        chosen = re.findall(r"'(\w+)'", named[2])
        order = [i for i, axis in enumerate(sizes) if axis not in chosen] + [list(sizes).index(axis) for axis in chosen]
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())).transpose(order)
        return tuple(map(tuple, ids.reshape(-1, math.prod(sizes[axis] for axis in chosen)).tolist()))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, dimensions, order = ([int(n) for n in part.split(",")] if part else [] for part in iota.groups())
        ids = np.arange(math.prod(dimensions)).reshape(dimensions)
        return tuple(map(tuple, (ids.transpose(order) if order else ids).reshape(shape).tolist()))
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", attributes):
        return tuple(tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    return (tuple(range(devices)),)


def read_schedule(text: str, devices: int) -> DeviceWork:
    """Kernels, bytes and collectives of a scheduled module; loops count as often as they run.

    A loop of unknown length counts once. Raises ValueError if it contains a collective.
    """
    return count_work(*parse(text), devices)


def count_work(computations: Computations, entry: str, devices: int) -> DeviceWork:
    """`read_schedule` of a parsed module."""
    _read(computations, entry, times=1, devices=devices, schedule=(work := DeviceWork()))
    return work


def collective_in(computations: Computations, instruction: Instruction) -> Instruction | None:
    """The collective of an instruction: itself, or the one in the fusion or asynchronous computation that it runs; or None."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in COLLECTIVES:
        return instruction
    if opcode in ("fusion", "async", "call"):
        for name in instruction.called:
            for inner in computations.get(name, ()):
                if inner.opcode.removesuffix("-start") in COLLECTIVES:
                    return inner
    return None


def _read(computations: Computations, name: str, *, times: int, devices: int, schedule: DeviceWork) -> None:
    shapes = {instruction.name: instruction.shape for instruction in computations[name]}
    in_flight: dict[str, CompiledCollective] = {}
    for instruction in computations[name]:
        if instruction.opcode in FREE:
            continue
        if instruction.opcode.endswith(ENDS):
            in_flight.pop(instruction.operands[0], None)
            continue
        if instruction.opcode in ("while", "conditional"):
            before = len(schedule.collectives)
            for called in instruction.called:
                _read(computations, called, times=times * (instruction.trip_count or 1), devices=devices, schedule=schedule)
            if instruction.trip_count is None and len(schedule.collectives) > before:
                raise ValueError(f"the loop {instruction.name} contains a collective, and its number of iterations is unknown")
            continue
        operands = [shapes.get(operand, "") for operand in instruction.operands]
        if inner := collective_in(computations, instruction):
            dtypes = {dtype for operand in operands for dtype, _ in _SHAPE.findall(operand)}
            collective = CompiledCollective(
                inner.opcode.removesuffix("-start"),
                " + ".join(sorted(dtypes)),
                sum(map(num_bytes, operands)),
                replica_groups(inner.attributes, devices),
                times,
                instruction.opcode.endswith("-start"),
            )
            schedule.collectives.append(collective)
            if collective.asynchronous:
                in_flight[instruction.name] = collective
            continue
        size = sum(map(num_bytes, [*operands, instruction.shape])) if instruction.moved is None else instruction.moved
        schedule.kernel_bytes += times * size
        if instruction.opcode in COPIES:
            continue
        schedule.kernels += times
        for collective in in_flight.values():
            collective.overlapped_kernels += 1
            collective.overlapped_bytes += size
