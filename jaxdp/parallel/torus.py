"""Order of the devices of a TPU slice, so that rows and columns of the mesh are rings of neighbors in its network.

The chips of a slice are the points of a grid with two or three axes, and each is linked to its neighbors. A mesh axis is one
axis of the grid, or several axes that one ring visits point by point. Rings do not end at hosts, because the network does not.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxdp.errors import plural

# Axes whose ends a link joins, by device kind. In two dimensions: a whole side of the pod (jax-ml.github.io/scaling-book/tpus).
# In three: every axis of a slice of 4x4x4 cubes (docs.cloud.google.com/tpu/docs/v5p). Other kinds are taken to have none.
POD_SIDE, TWO_DIMENSIONAL = 16, ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
CUBE_SIDE, THREE_DIMENSIONAL = 4, ("TPU v4", "TPU v5", "TPU v5p")


def ring(sides: Sequence[int]) -> list[tuple[int, ...]]:
    """All points of a grid, each one step from the next.

    So is the last from the first if several sides are greater than one and the first of these is even, as in TPU slices.
    """
    if not sides:
        return [()]
    first, (start, *path) = sides[0], ring(sides[1:])
    points = [(index, *start) for index in range(first)]
    for turn, index in enumerate(reversed(range(first))):
        points += [(index, *point) for point in (path[::-1] if turn % 2 else path)]
    return points


def _grid(devices: Sequence[Any]) -> tuple[dict[tuple[int, ...], Any], list[list[int]]] | None:
    """(device by place, the places on each axis) of a TPU slice; None for other devices, several slices and a part of one."""
    if getattr(devices[0], "platform", None) != "tpu":
        return None
    places = [(*device.coords, device.core_on_chip) for device in devices]
    axes = [sorted(set(axis)) for axis in zip(*places, strict=True)]
    at = dict(zip(places, devices, strict=True))
    return (at, axes) if len(at) == len(devices) == math.prod(map(len, axes)) else None


def arrange(devices: Sequence[Any], shape: tuple[int, int]) -> np.ndarray | None:
    """Devices [Y, X] whose columns and rows follow axes of a TPU slice, or None if no axes have these sizes."""
    return next((mesh for mesh in _along_axes(devices) if mesh.shape == shape), None)


def default_rows(devices: Sequence[Any]) -> int | None:
    """Rows of the default mesh of a TPU slice, at most as many as its columns; None for other devices.

    Of the meshes along the axes of the slice, except a single row, it is the one with the fewest hops, and the most square of
    these: 4 rows for 4x8 and for 4x4x4 chips.
    """
    meshes = [mesh for mesh in _along_axes(devices) if len(mesh) <= len(mesh[0])]
    best = min(meshes, key=lambda mesh: (len(mesh) == 1, max(hops(mesh, devices)), -len(mesh)), default=None)
    return None if best is None else len(best)


def _along_axes(devices: Sequence[Any]) -> Iterator[np.ndarray]:
    """Meshes [Y, X] whose columns and rows are rings through one or several axes of a TPU slice; first those of fewer axes."""
    if (grid := _grid(devices)) is None:
        return
    at, values = grid
    sides = [len(axis) for axis in values]
    for chosen in sorted(itertools.product((True, False), repeat=len(sides)), key=sum):  # one axis rather than several
        vertical, horizontal = ([axis for axis, is_one in enumerate(chosen) if is_one == side] for side in (True, False))
        columns, rows = ([sides[axis] for axis in some] for some in (vertical, horizontal))
        points = np.array([y + x for y in ring(columns) for x in ring(rows)])[:, np.argsort([*vertical, *horizontal])]
        ordered = [at[tuple(axis[index] for axis, index in zip(values, point, strict=True))] for point in points]
        yield np.array(ordered, object).reshape(math.prod(columns), math.prod(rows))


def hops(mesh: np.ndarray, devices: Sequence[Any]) -> tuple[int, int]:
    """The most hops between neighbors of a ring, in the columns and in the rows of a mesh. devices: of the slice."""
    sides, kind = _sides(devices), devices[0].device_kind
    is_cubes = kind in THREE_DIMENSIONAL and not any(sides % CUBE_SIDE)
    closed = is_cubes | ((sides == POD_SIDE) & (kind in TWO_DIMENSIONAL))
    places = np.array([device.coords for device in mesh.ravel()]).reshape(*mesh.shape, -1)
    steps = np.abs([places - np.roll(places, -1, mesh_axis) for mesh_axis in (0, 1)])  # [2, Y, X, D], to the next in the ring
    vertical, horizontal = np.where(closed, np.minimum(steps, sides - steps), steps).sum(-1).max((1, 2)).tolist()
    return vertical, horizontal


def _sides(devices: Sequence[Any]) -> np.ndarray:
    return np.ptp([device.coords for device in devices], axis=0) + 1


def describe_layout(mesh: Any, devices: Sequence[Any]) -> str | None:
    """The layout of a mesh on a TPU slice and the hops of its rings, in one line; None for one device and for other devices.

    devices: of the slice.
    """
    (rows, columns), used, first = mesh.devices.shape, mesh.devices.ravel(), devices[0]
    if first.platform != "tpu" or len(used) == 1:
        return None
    if len({getattr(device, "slice_index", 0) for device in used}) > 1:
        return f"mesh {rows}x{columns} on several slices of {first.device_kind}: consecutive devices"
    how = "consecutive devices, because no axes fit" if arrange(used, (rows, columns)) is None else "along its axes"
    rings = zip(("column", "row"), (rows, columns), hops(mesh.devices, devices), strict=True)
    apart = " and ".join(f"{plural(most, 'hop')} apart in a {axis}" for axis, size, most in rings if size > 1)
    part = f"; for a part of a slice XLA may refuse the step: if so, use all {len(devices)} devices"
    where = f"mesh {rows}x{columns} on a {'x'.join(map(str, _sides(devices)))} slice of {first.device_kind}"
    return f"{where}, {how}: neighbors are at most {apart}{part * (len(used) < len(devices))}"
