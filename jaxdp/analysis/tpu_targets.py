"""TPU slices that XLA compiles for without one: names as in Google Cloud and JAX, and published figures of their chips.

A slice such as "v5e:4x8" is a chip and the sides of its grid. JAX sees each chip as one device. Google Cloud's accelerator
types, "v5litepod-32" for this slice, count chips; those of v5p count its two cores, "v5p-8" for 2x2x1.
"""

import math
from dataclasses import dataclass

GIB = 2**30
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


V5E = TpuTarget(
    "TPU v5e",
    kind="TPU v5 lite",
    accelerator="v5litepod",
    cores=1,
    memory_bytes=int(15.75 * GIB),
    memory_bandwidth=819_000_000_000,
    flops=197_000_000_000_000,
    link_bandwidth=50_000_000_000,
    slices=PLANES,
)
V5P = TpuTarget(
    "TPU v5p",
    kind="TPU v5",
    accelerator="v5p",
    cores=2,
    memory_bytes=int(95.74 * GIB),
    memory_bandwidth=2_765_000_000_000,
    flops=459_000_000_000_000,
    link_bandwidth=100_000_000_000,
    slices=CUBES,
)
V6E = TpuTarget(
    "TPU v6e",
    kind="TPU v6 lite",
    accelerator="v6e",
    cores=1,
    memory_bytes=int(31.25 * GIB),
    memory_bandwidth=1_638_000_000_000,
    flops=918_000_000_000_000,
    link_bandwidth=100_000_000_000,
    slices=PLANES,
)
# docs.cloud.google.com/tpu/docs/v5e, v5p and v6e. Links: 400 and 800 GB/s both ways of four, and 1,200 GB/s both ways of six.
# Memory: as libtpu 0.0.42.1 names it in an error; published are 16, 95 and 32.
TPU_TARGETS = {"v5e": V5E, "v5p": V5P, "v6e": V6E}
SLICES = tuple(f"{chip}:{sides}" for chip, target in TPU_TARGETS.items() for sides in target.slices)


def sides_of(name: str | None) -> tuple[int, ...]:
    """The sides of a slice in `SLICES`; () for any other name."""
    return tuple(int(side) for side in name.partition(":")[2].split("x")) if name in SLICES else ()


def _accelerator(name: str) -> str:
    target = TPU_TARGETS[name.partition(":")[0]]
    return f"{target.accelerator}-{target.cores * math.prod(sides_of(name))}"


ACCELERATORS = {_accelerator(name): name for name in SLICES}  # by Google Cloud's name
