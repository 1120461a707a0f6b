"""The kernels of a compiled step: their kind, bytes and FLOP, and their time by a profile."""

import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jaxdp.xla import hlo

GRAPH = re.compile(r"command_buffer_(\d+)")  # name of a CUDA graph in a profile; the number grows in the order of the program
CONVOLUTIONS = ("convolution", "input gradient", "weight gradient")
KINDS = (*CONVOLUTIONS, "forward", "backward", "collective", "rest")
_DIMENSIONS = re.compile(r"dim_labels=(\w+)_\w+->(\w+)")
Shapes = dict[str, str]  # name of an instruction -> text of its result type


@dataclass(frozen=True)
class Kernel:
    """One instruction of a compiled step; bytes and flop count one execution, flop without zeros of `convolve_by_blocks`.

    side: height of the largest feature map among the operands and results, 0 if there is none. kind: one of `KINDS`. forward,
    backward: other kernels of feature maps, among them products of a map with itself. rest: kernels without feature maps
    (optimizer, norms, moments).
    """

    name: str
    side: int
    kind: str
    bytes: int
    flop: float


def kernels_of_step(text: str, batch: int) -> list[Kernel]:
    """The kernels of the entry computation of a compiled step. text: HLO. batch: images per device."""
    computations, entry = hlo.parse(text)
    shapes = {instruction.name: instruction.shape for instruction in computations[entry]}
    return [
        _kernel(instruction, computations, shapes=shapes, batch=batch)
        for instruction in computations[entry]
        if instruction.opcode not in hlo.FREE and not instruction.opcode.endswith(hlo.ENDS)
    ]


def _kernel(
    instruction: hlo.Instruction, computations: dict[str, list[hlo.Instruction]], *, shapes: Shapes, batch: int
) -> Kernel:
    operands = [
        shapes.get(name, "") for name in dict.fromkeys(instruction.operands)
    ]  # a product reads h twice, but moves it once
    num_bytes = hlo.num_bytes(instruction.shape) + sum(map(hlo.num_bytes, operands))
    arrays = [sizes for shape in (instruction.shape, *operands) for _, sizes in hlo.arrays(shape)]
    side = max((_side(sizes, batch) for sizes in arrays), default=0)
    operation = instruction.attributes.partition('op_name="')[2].partition('"')[0]
    backward = "transpose(" in operation
    inner = [instruction, *(each for name in instruction.called for each in computations.get(name, ()))]
    if hlo.collective_in(computations, instruction):
        return Kernel(instruction.name, side, "collective", num_bytes, 0.0)
    if "__cudnn$conv" in instruction.attributes:
        of_weights = "BackwardFilter" in instruction.attributes
        flop = _useful(instruction) * _cudnn_flop([sizes for sizes in arrays if len(sizes) == 4], batch)
        return Kernel(instruction.name, side, _convolution_kind(of_weights, backward), num_bytes, flop)
    for each in inner:
        if each.opcode in ("convolution", "dot"):
            local = shapes if each is instruction else {other.name: other.shape for other in inner[1:]}
            over_rows, flop = _product(each, local, batch)
            if over_rows:
                side = max(side, *(_side_of_rows(sizes, batch) for shape in operands for _, sizes in hlo.arrays(shape)))
            moments = over_rows and "jvp(" in operation and not backward
            kind = "forward" if moments else _convolution_kind(over_rows, backward)
            return Kernel(instruction.name, side, kind, num_bytes, flop)
    kind = "rest" if side == 0 else "backward" if backward else "forward"
    return Kernel(instruction.name, side, kind, num_bytes, 0.0)


def _convolution_kind(of_weights: bool, backward: bool) -> str:
    return CONVOLUTIONS[2] if of_weights else CONVOLUTIONS[backward]


def _side(sizes: list[int], batch: int) -> int:
    """The height H of an array [B, H, H, C], or of the same as rows [B H H, C]; 0 for other arrays."""
    if len(sizes) == 4 and sizes[0] == batch and sizes[1] == sizes[2]:
        return sizes[1]
    return _side_of_rows(sizes, batch) if len(sizes) == 2 else 0


def _side_of_rows(sizes: list[int], batch: int) -> int:
    """The height H of an array whose rows, in any number of dimensions, are B H H; 0 for other arrays."""
    rows = math.prod(sizes[:-1])
    side = math.isqrt(rows // batch)
    return side if side > 1 and side * side * batch == rows else 0


def _cudnn_flop(arrays: list[list[int]], batch: int) -> float:
    """FLOP of a cuDNN convolution. arrays: dimensions of its result and operands: two feature maps and the weights."""

    def map_likelihood(sizes: list[int]) -> tuple[bool, int]:
        return sizes[0] == batch and sizes[1] == sizes[2] > 3, math.prod(sizes)

    weights, *maps = sorted(arrays[:3], key=map_likelihood)
    output = min(maps, key=lambda sizes: sizes[1])
    return 2.0 * math.prod(weights) * batch * output[1] * output[2]


def _product(instruction: hlo.Instruction, shapes: Shapes, batch: int) -> tuple[bool, float]:
    """(whether it sums over the images, as the gradient of weights does, FLOP) of a convolution or matrix product."""
    (_, result), *_ = hlo.arrays(instruction.shape)
    arrays = hlo.arrays(shapes.get(instruction.operands[0], ""))
    left = arrays[0][1] if arrays else []
    if instruction.opcode == "dot":
        pattern = r"{}_contracting_dims={{(\d+)}}"
        of_left, of_right = (int(re.findall(pattern.format(side), instruction.attributes)[0]) for side in ("lhs", "rhs"))
        summed = left[of_left] if left else 0
        return of_left == of_right < len(left) - 1, 2.0 * math.prod(result) * summed
    (labels, result_labels), *_ = _DIMENSIONS.findall(instruction.attributes)
    features = left[labels.index("f")] if left else 0
    # Zeros inserted by a dilation of the input are not counted.
    taps = math.prod(_window(instruction, "size")) / math.prod(_window(instruction, "lhs_dilate"))
    # The gradient of weights is a convolution whose kernel is as large as a feature map and whose features are the images.
    of_weights = features == batch and _window(instruction, "size")[0] > result[result_labels.index("0")]
    return of_weights, 2.0 * math.prod(result) * taps * features * _useful(instruction)


def _useful(instruction: hlo.Instruction) -> float:
    """The share of a convolution's products without the zeros of `convolve_by_blocks`."""
    return 7 * 7 * 3 / (4 * 4 * 16) if "jit(convolve_by_blocks)" in instruction.attributes else 1.0


def _window(instruction: hlo.Instruction, field: str) -> list[int]:
    """A field of a convolution's window, one value per dimension; [1] if it is not set."""
    match = re.search(rf"{field}=([\dx]+)", instruction.attributes)
    return [int(n) for n in match[1].split("x")] if match else [1]


def profile_kernels(step: Callable[[], Any], count: int) -> dict[str, float]:
    """Mean seconds by instruction name over `count` calls of `step`, which must block until the devices are done."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(count):
                step()
        seconds = read_trace(Path(folder))
    return {name: total / count for name, total in seconds.items()}


def read_trace(folder: Path) -> dict[str, float]:
    """Seconds by instruction name in the newest trace of JAX's profiler below a folder.

    Reads the streams of the first GPU, or all threads of a CPU, where the seconds of concurrent threads add up.
    """
    import jax

    newest = max(folder.rglob("*.xplane.pb"))
    profile, seconds = jax.profiler.ProfileData.from_file(str(newest)), defaultdict[str, float](float)
    devices = sorted(plane.name for plane in profile.planes if plane.name.startswith("/device:GPU"))
    for plane in profile.planes:
        if devices and plane.name != devices[0]:
            continue
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                instruction = dict(event.stats).get("hlo_op") if devices else None
                seconds[str(instruction or event.name)] += event.duration_ns / 1e9
    return dict(seconds)


def least_seconds(kernel: Kernel, limits: dict[str, float]) -> float:
    """A kernel is no faster than its bytes at the bandwidth, nor than its FLOP at the peak rate.

    limits: {"bytes_per_second", "flops"}.
    """
    return max(kernel.bytes / limits["bytes_per_second"], kernel.flop / limits["flops"])


def most_above_least(kernels: list[Kernel], seconds: dict[str, float], limits: dict[str, float]) -> list[dict]:
    """The five kernels that lose the most time, compared with the least possible."""
    rows = [
        asdict(kernel) | {"seconds": seconds[kernel.name], "least_seconds": least_seconds(kernel, limits)}
        for kernel in kernels
        if kernel.name in seconds
    ]
    return sorted(rows, key=lambda row: row["least_seconds"] - row["seconds"])[:5]


def summarize_by_kind(kernels: list[Kernel], seconds: dict[str, float] | None, limits: dict[str, float]) -> list[dict]:
    """A row per kind of kernel: number, bytes, FLOP, measured seconds (if `seconds` is given), and least possible seconds.

    limits: see `least_seconds`.
    """
    rows: dict[str, dict] = {}
    for kernel in kernels:
        empty = {"kind": kernel.kind, "kernels": 0, "bytes": 0, "flop": 0.0, "least_seconds": 0.0}
        row = rows.setdefault(kernel.kind, empty)
        row["kernels"] += 1
        row["bytes"] += kernel.bytes
        row["flop"] += kernel.flop
        row["least_seconds"] += least_seconds(kernel, limits)
        if seconds is not None:
            row["seconds"] = row.get("seconds", 0.0) + seconds.get(kernel.name, 0.0)
    return sorted(rows.values(), key=lambda row: KINDS.index(row["kind"]))


def divide_graphs(kernels: list[Kernel], seconds: dict[str, float]) -> dict[str, float]:
    """`seconds` with the time of each CUDA graph divided among its kernels by bytes: a profile shows a graph as a whole.

    The graphs are the kernels between those that have a time of their own, in order; unchanged if that does not fit.
    """
    graphs = sorted(filter(GRAPH.fullmatch, seconds), key=lambda name: int(GRAPH.sub(r"\1", name)))
    runs = [list(run) for timed, run in groupby(kernels, lambda kernel: kernel.name in seconds) if not timed]
    if len(graphs) != len(runs):
        return seconds
    divided = {name: spent for name, spent in seconds.items() if name not in graphs}
    for graph, run in zip(graphs, runs, strict=True):
        moved = max(1, sum(kernel.bytes for kernel in run))
        divided |= {kernel.name: seconds[graph] * kernel.bytes / moved for kernel in run}
    return divided
