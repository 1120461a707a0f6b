"""TPU slices that XLA compiles for without one: names as in Google Cloud and JAX, and published figures of their chips.

A slice such as "v5e:4x8" is a chip and the sides of its grid. JAX sees each chip as one device. Google Cloud's accelerator
types, "v5litepod-32" for this slice, count chips; those of v5p count its two cores, "v5p-8" for 2x2x1.
"""

import math
from dataclasses import dataclass

GIB, GIGA, TERA = 2**30, 10**9, 10**12
PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16", "16x16x24")
# Of libtpu: not to ask for a machine's slice, and to start beside other processes that compile.
ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost"}
ENVIRONMENT |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclass(frozen=True)
class TpuTarget:
    """A TPU chip. memory_bytes: HBM that XLA uses. Bandwidths in bytes/s. flops: per second, in bfloat16. slices: their sides.

    kind: JAX's name. accelerator: Google Cloud's name, before the number of cores. link_bandwidth: of one of its links to other
    chips, in one direction.
    """

    name: str
    kind: str
    accelerator: str
    cores: int
    memory_bytes: int
    memory_bandwidth: int
    flops: int
    link_bandwidth: int
    slices: tuple[str, ...]


# docs.cloud.google.com/tpu/docs/v5e, v5p and v6e. Links: 400 and 800 GB/s both ways of four, and 1,200 GB/s both ways of six.
# Memory: as libtpu 0.0.42.1 names it in an error; published are 16, 95 and 32.
TPU_TARGETS = {
    "v5e": TpuTarget("TPU v5e", "TPU v5 lite", "v5litepod", 1, int(15.75 * GIB), 819 * GIGA, 197 * TERA, 50 * GIGA, PLANES),
    "v5p": TpuTarget("TPU v5p", "TPU v5", "v5p", 2, int(95.74 * GIB), 2765 * GIGA, 459 * TERA, 100 * GIGA, CUBES),
    "v6e": TpuTarget("TPU v6e", "TPU v6 lite", "v6e", 1, int(31.25 * GIB), 1638 * GIGA, 918 * TERA, 100 * GIGA, PLANES),
}
SLICES = tuple(f"{chip}:{sides}" for chip, target in TPU_TARGETS.items() for sides in target.slices)


def sides_of(name: str | None) -> tuple[int, ...]:
    """The sides of a slice in `SLICES`; () for any other name."""
    return tuple(int(side) for side in name.partition(":")[2].split("x")) if name in SLICES else ()


def _accelerator(name: str) -> str:
    target = TPU_TARGETS[name.partition(":")[0]]
    return f"{target.accelerator}-{target.cores * math.prod(sides_of(name))}"


ACCELERATORS = {_accelerator(name): name for name in SLICES}  # by Google Cloud's name
