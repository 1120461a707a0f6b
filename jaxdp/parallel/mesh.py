"""The two-dimensional device mesh, with the paper's axis names (Mikami et al., arXiv 1811.05233, section 2.2)."""

import math

from jaxdp.config import ConfigError
from jaxdp.config import Mesh as MeshConfig

VERTICAL, HORIZONTAL = "vertical", "horizontal"
AXES = (VERTICAL, HORIZONTAL)
MOST_WORKERS_OF_A_SERVER = 64


def unfit(strategy: str, devices: int) -> str | None:
    """Why an all-reduce strategy cannot run on this many devices, or None where it can."""
    if strategy == "parameter_server" and devices > MOST_WORKERS_OF_A_SERVER:
        return f"one server takes at most {MOST_WORKERS_OF_A_SERVER} devices"
    return None


def most_square(devices: int) -> tuple[int, int]:
    """The factorisation (vertical, horizontal) nearest to a square, the horizontal side not the shorter one."""
    vertical = next(v for v in range(math.isqrt(devices), 0, -1) if devices % v == 0)
    return vertical, devices // vertical


def choose_shape(config: MeshConfig, devices: int, hosts: int = 1) -> tuple[int, int]:
    """(vertical, horizontal) over at most `devices` devices; ConfigError where the config asks for what is not there.

    A side that is given is kept. With neither given: rows are hosts, and on one host the shape is the most square.
    """
    vertical, horizontal = config.vertical, config.horizontal
    if vertical is not None and horizontal is not None:
        if vertical * horizontal > devices:
            raise ConfigError(
                f"mesh: {vertical}x{horizontal} is not allowed; it takes {vertical * horizontal} devices and there are "
                f"{devices}; give a smaller mesh, or on a CPU --mesh.cpu-devices {vertical * horizontal}"
            )
        return vertical, horizontal
    for name, given in (("vertical", vertical), ("horizontal", horizontal)):
        if given is not None:
            if given > devices:
                raise ConfigError(
                    f"mesh.{name}: {given} is not allowed; there are {devices} devices; give at most {devices}, or on a CPU "
                    f"--mesh.cpu-devices {given}"
                )
            if devices % given:
                raise ConfigError(
                    f"mesh.{name}: {given} is not allowed; it must divide the {devices} devices, or give both sides"
                )
            other = devices // given
            return (given, other) if name == "vertical" else (other, given)
    if hosts > 1 and devices % hosts == 0:
        return hosts, devices // hosts
    return most_square(devices)


def make_mesh(vertical: int, horizontal: int, devices=None):
    """A jax Mesh of shape (vertical, horizontal) over the first of `devices` (JAX's own), rows being consecutive devices."""
    import jax
    from jax.sharding import AxisType

    devices = (jax.devices() if devices is None else devices)[: vertical * horizontal]
    return jax.make_mesh((vertical, horizontal), AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def of_every_process(devices: list, used: int, processes: int) -> list:
    """`used` of the devices, equally many of each process. devices: process by process, each with equally many."""
    own, share = len(devices) // processes, used // processes
    return [devices[process * own + place] for process in range(processes) for place in range(share)]


def abstract_mesh(vertical: int, horizontal: int):
    """The same mesh without devices: what is traced for it can be looked at and lowered on any machine."""
    from jax.sharding import AbstractMesh, AxisType

    return AbstractMesh((vertical, horizontal), AXES, axis_types=(AxisType.Auto,) * 2)
