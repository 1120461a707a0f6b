"""The two-dimensional device mesh, with the axis names of Mikami et al., arXiv 1811.05233, section 2.2.

A mesh of shape (vertical, horizontal) = (Y, X) has Y rows of X devices. Consecutive devices form a row. A collective along the
rows is over the axis `horizontal`: it combines the X devices of each row. A collective along the columns is over the axis
`vertical`: it combines the Y devices of each column. `vertical` and `horizontal` name axes and their sizes; rows and columns
are the groups of devices.

Importing this module does not import JAX.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxdp.config import Mesh as MeshConfig
from jaxdp.errors import ConfigError, plural

if TYPE_CHECKING:
    import jax

VERTICAL, HORIZONTAL = "vertical", "horizontal"
AXES = (VERTICAL, HORIZONTAL)

# Mikami et al., Table 4: GPUs -> (vertical, horizontal). Only 3,456 differs from the most square shape, 54x64.
PUBLISHED_GRIDS = {1024: (32, 32), 2048: (32, 64), 2176: (34, 64), 3456: (48, 72), 4096: (64, 64)}


def most_square(devices: int) -> tuple[int, int]:
    """The factorization (vertical, horizontal) of `devices` that is nearest to a square, with vertical <= horizontal."""
    vertical = next(v for v in range(math.isqrt(devices), 0, -1) if devices % v == 0)
    return vertical, devices // vertical


def default_shape(devices: int) -> tuple[int, int]:
    """(vertical, horizontal) on one host without a configured side: the published grid, or the most square shape."""
    return PUBLISHED_GRIDS.get(devices) or most_square(devices)


def choose_shape(config: MeshConfig, devices: int, rows: int = 1) -> tuple[int, int]:
    """(vertical, horizontal) of a mesh of at most `devices` devices.

    Configured sides are kept. If neither is configured, the mesh has `rows` rows, such as one for each host; `default_shape`
    decides for one row, or if they do not divide the devices. Raises ConfigError if the configured sides do not fit them.
    """
    vertical, horizontal = config.vertical, config.horizontal
    if vertical is not None and horizontal is not None:
        needed = vertical * horizontal
        if min(vertical, horizontal) < 1 or needed > devices:
            raise ConfigError(
                "mesh",
                f"{vertical}x{horizontal}",
                reason=f"needs {plural(needed, 'device')}, {devices} available",
                hint=f"use a smaller mesh, or on a CPU --mesh.cpu-devices {needed}",
            )
        return vertical, horizontal
    for name, side in (("vertical", vertical), ("horizontal", horizontal)):
        if side is not None:
            if not 1 <= side <= devices:
                raise ConfigError(
                    f"mesh.{name}",
                    side,
                    reason=f"{plural(devices, 'device')} available",
                    hint=f"use at most {devices}, or on a CPU --mesh.cpu-devices {side}",
                )
            if devices % side:
                raise ConfigError(
                    f"mesh.{name}", side, reason=f"must divide the number of devices, {devices}", hint="or set both sides"
                )
            other = devices // side
            return (side, other) if name == "vertical" else (other, side)
    if rows > 1 and devices % rows == 0:
        return rows, devices // rows
    return default_shape(devices)


def make_mesh(
    vertical: int | None = None, horizontal: int | None = None, devices: "Sequence[jax.Device] | None" = None
) -> "jax.sharding.Mesh":
    """A mesh with the axes "vertical" (rows) and "horizontal" (devices of a row); consecutive devices form a row.

    vertical, horizontal: the sizes of the axes; None computes them from the number of devices. Without both, each process is a
    row; in a single process the mesh is nearly square. A TPU's rows and columns follow its network (`jaxdp.parallel.torus`).
    devices: the first vertical * horizontal of them are used (default: `jax.devices()`). Raises ConfigError for sizes that do
    not fit the devices.
    """
    import jax
    import numpy as np
    from jax.sharding import AxisType

    from jaxdp.parallel import torus

    devices = jax.devices() if devices is None else devices
    rows = torus.default_rows(devices) or len({device.process_index for device in devices})
    shape = choose_shape(MeshConfig(vertical=vertical, horizontal=horizontal), len(devices), rows)
    used, types = devices[: math.prod(shape)], (AxisType.Auto,) * 2
    if getattr(used[0], "platform", None) == "tpu":  # jax.make_mesh puts neighbors of a 2x4 slice of v5e up to four hops apart
        arranged = torus.arrange(used, shape)
        return jax.sharding.Mesh(np.reshape(used, shape) if arranged is None else arranged, AXES, axis_types=types)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=used)


def devices_of_every_process(devices: list, used: int, processes: int) -> list:
    """`used` of the devices, the same number from each process. devices: ordered by process, the same number for each."""
    per_process, used_per_process = len(devices) // processes, used // processes
    return [devices[process * per_process + index] for process in range(processes) for index in range(used_per_process)]


def abstract_mesh(vertical: int, horizontal: int) -> "jax.sharding.AbstractMesh":
    """The same mesh without devices, for tracing and lowering on any machine."""
    from jax.sharding import AbstractMesh, AxisType

    return AbstractMesh((vertical, horizontal), AXES, axis_types=(AxisType.Auto,) * 2)
