"""Where a step's time goes: its kernels by kind, what each kind moves and computes, and how long it takes by a profile."""

import math
import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from jaxdp.parallel import hlo

CONVOLUTIONS = ("convolution", "its input gradient", "its weight gradient")
KINDS = (*CONVOLUTIONS, "forward", "backward", "collective", "rest")
_DIMENSIONS = re.compile(r"dim_labels=(\w+)_\w+->(\w+)")


@dataclass(frozen=True)
class Kernel:
    """What one instruction of a compiled step moves and computes each time that it runs.

    side: of the largest map among its operands and results, 0 where there is none; kind: one of KINDS. Forward and backward are
    what is neither convolution nor matrix product; rest are the kernels without maps: optimiser, norms, moments.
    """

    name: str
    side: int
    kind: str
    bytes: int
    flop: float


def of_step(text: str, batch: int) -> list[Kernel]:
    """The kernels of the entry computation of a compiled step. batch: images that each device has in it."""
    computations, entry = hlo.parse(text)
    shapes = {one.name: one.shape for one in computations[entry]}
    return [
        _kernel(one, computations, shapes, batch)
        for one in computations[entry]
        if one.opcode not in hlo.FREE and not one.opcode.endswith(hlo.ENDS)
    ]


def _kernel(one, computations, shapes, batch: int) -> Kernel:
    operands = [shapes.get(name, "") for name in one.operands]
    moved = hlo.num_bytes(one.shape) + sum(map(hlo.num_bytes, operands))
    arrays = [sizes for shape in (one.shape, *operands) for _, sizes in hlo.arrays(shape)]
    side = max((_side(sizes, batch) for sizes in arrays), default=0)
    backward = "transpose(" in one.attributes.split("op_name=")[-1][:200]
    inner = [one, *(each for name in one.called for each in computations.get(name, ()))]
    if hlo.collective_in(computations, one):
        return Kernel(one.name, side, "collective", moved, 0.0)
    if "__cudnn$conv" in one.attributes:
        kind, flop = _of_cudnn(one, [sizes for sizes in arrays if len(sizes) == 4], batch, backward)
        return Kernel(one.name, side, kind, moved, flop)
    for each in inner:
        if each.opcode in ("convolution", "dot"):
            local = shapes if each is one else {other.name: other.shape for other in inner[1:]}
            of_weights, flop = _of_product(each, local, batch)
            kind = CONVOLUTIONS[2] if of_weights else CONVOLUTIONS[backward]
            return Kernel(one.name, side, kind, moved, flop)
    kind = "rest" if side == 0 else "backward" if backward else "forward"
    return Kernel(one.name, side, kind, moved, 0.0)


def _side(sizes: list[int], batch: int) -> int:
    """The side of the maps of an array [B, H, H, C], or of one that has them as rows [B H H, C]; 0 where it has none."""
    if len(sizes) == 4 and sizes[0] == batch and sizes[1] == sizes[2]:
        return sizes[1]
    side = math.isqrt(sizes[0] // batch) if len(sizes) == 2 else 0
    return side if side > 1 and side * side * batch == sizes[0] else 0


def _of_cudnn(one, arrays, batch: int, backward: bool):
    def likely_a_map(sizes):
        return sizes[0] == batch and sizes[1] == sizes[2] > 3, math.prod(sizes)

    kernel, *maps = sorted(arrays[:3], key=likely_a_map)
    output = min(maps, key=lambda sizes: sizes[1])
    flop = 2.0 * math.prod(kernel) * batch * output[1] * output[2]
    return CONVOLUTIONS[2] if "BackwardFilter" in one.attributes else CONVOLUTIONS[backward], flop


def _of_product(one, shapes, batch: int):
    """(whether it sums over the images, as the gradient of weights does, FLOP) of a convolution or matrix product."""
    (_, result), *_ = hlo.arrays(one.shape)
    left = hlo.arrays(shapes.get(one.operands[0], ""))
    left = left[0][1] if left else []
    if one.opcode == "dot":
        sums = [re.search(rf"{hand}_contracting_dims={{(\d+)}}", one.attributes)[1] for hand in ("lhs", "rhs")]
        summed = left[int(sums[0])] if left else 0
        return sums == ["0", "0"], 2.0 * math.prod(result) * summed
    labels, made = _DIMENSIONS.search(one.attributes).groups()
    features = left[labels.index("f")] if left else 0
    taps = math.prod(_window(one, "size")) / math.prod(_window(one, "lhs_dilate"))  # zeros put between are not counted
    # The gradient of weights is a convolution whose kernel is as large as a map, and whose features are the images.
    of_weights = features == batch and _window(one, "size")[0] > result[made.index("0")]
    return of_weights, 2.0 * math.prod(result) * taps * features


def _window(one, what: str) -> list[int]:
    """What a convolution's window says of its dimensions, [1] where it says nothing."""
    told = re.search(rf"{what}=([\dx]+)", one.attributes)
    return [int(n) for n in told[1].split("x")] if told else [1]


def profiled(step, count: int) -> dict[str, float]:
    """Seconds by name of instruction in each of `count` calls of `step`, which returns when the devices are done."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(count):
                step()
        whole = traced(Path(folder))
    return {name: seconds / count for name, seconds in whole.items()}


def traced(folder: Path) -> dict[str, float]:
    """Seconds by name of instruction in the newest trace of JAX's profiler in a folder, which is to have one.

    On a GPU the streams of the first device are read, on a CPU all threads: where several work at a time, their seconds add up.
    """
    import jax

    newest = max(folder.rglob("*.xplane.pb"))
    profile, seconds = jax.profiler.ProfileData.from_file(str(newest)), defaultdict(float)
    devices = sorted(plane.name for plane in profile.planes if plane.name.startswith("/device:GPU"))
    for plane in profile.planes:
        if devices and plane.name != devices[0]:
            continue
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                told = dict(event.stats).get("hlo_op") if devices else None
                seconds[str(told or event.name)] += event.duration_ns / 1e9
    return dict(seconds)


def by_kind(kernels: list[Kernel], seconds: dict[str, float] | None, limits: dict) -> list[dict]:
    """A row for each kind: how many kernels, their bytes, FLOP and seconds, and the fewest seconds that `limits` allow.

    limits: {"bytes_per_second", "flops"}; no kernel is faster than what it moves, nor than what it computes.
    """
    rows = {}
    for one in kernels:
        row = rows.setdefault(one.kind, {"kind": one.kind, "kernels": 0, "bytes": 0, "flop": 0.0, "least_seconds": 0.0})
        row["kernels"] += 1
        row["bytes"] += one.bytes
        row["flop"] += one.flop
        row["least_seconds"] += max(one.bytes / limits["bytes_per_second"], one.flop / limits["flops"])
        if seconds is not None:
            row["seconds"] = row.get("seconds", 0.0) + seconds.get(one.name, 0.0)
    return sorted(rows.values(), key=lambda row: KINDS.index(row["kind"]))
