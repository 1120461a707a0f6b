"""The collectives of a traced step: axes, dtype, bytes and count of each, and the bytes that each device sends."""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp.errors import ConfigError
from jaxdp.parallel.forward_dtypes import inner_jaxprs
from jaxdp.parallel.mesh import AXES

# Primitives by their names in a jaxpr, which depend on what JAX knows about replication.
OPERATIONS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
}


@dataclass(frozen=True)
class Collective:
    """A collective of a step.

    axes: mesh axes, the first one outermost. group: number of devices that exchange with one another. operand_bytes: bytes of
    one device's operand. count: executions per step, loops included. senders: positions along `axes` of the devices that send;
    None if all do.
    """

    operation: str
    axes: tuple[str, ...]
    group: int
    dtype: str
    operand_bytes: int
    count: int
    senders: tuple[int, ...] | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes that a sending device sends per step, by the algorithm that sends least (rings, except for permutes)."""
        share = {
            "all-reduce": 2 * (self.group - 1) / self.group,
            "reduce-scatter": (self.group - 1) / self.group,
            "all-to-all": (self.group - 1) / self.group,
            "all-gather": self.group - 1,
            "collective-permute": 1,
        }[self.operation]
        return self.operand_bytes * share * self.count


def find_collectives(jaxpr: Any, axis_sizes: dict[str, int]) -> list[Collective]:
    """The collectives of a jaxpr in program order; equal ones are counted together. axis_sizes: devices along each mesh axis.

    Counts inside a scan are multiplied by its length; all branches of a `cond` are listed. Collectives over one device are
    omitted. Raises ConfigError for a collective in a `while` loop, whose number of iterations is unknown.
    """
    counts: Counter[Collective] = Counter()
    _count(getattr(jaxpr, "jaxpr", jaxpr), 1, axis_sizes=axis_sizes, counts=counts)
    return [dataclasses.replace(collective, count=count) for collective, count in counts.items()]


def _count(jaxpr: Any, times: int | None, *, axis_sizes: dict[str, int], counts: Counter[Collective]) -> None:
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in OPERATIONS:
            axes = params.get("axes", params.get("axis_name"))
            axes = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if isinstance(axis, str))
            if name == "ppermute":  # JAX numbers its devices in the order of the mesh, whatever the order of the axes
                axes = tuple(axis for axis in axis_sizes if axis in axes)
            for group, senders in _exchanges(params, math.prod(axis_sizes[axis] for axis in axes)):
                if times is None:
                    reason, hint = "the number of iterations is unknown", "use jax.lax.scan"
                    raise ConfigError(f"{OPERATIONS[name]} in a while loop", reason=reason, hint=hint)
                for operand in equation.invars:
                    size = operand.aval.size * operand.aval.dtype.itemsize
                    counts[Collective(OPERATIONS[name], axes, group, str(operand.aval.dtype), size, 1, senders)] += times
        inner_times = times
        if name == "scan":
            inner_times = None if times is None else times * params["length"]
        elif name == "while":
            inner_times = None
        for inner in inner_jaxprs(equation):
            _count(inner, inner_times, axis_sizes=axis_sizes, counts=counts)


def _exchanges(params: dict[str, Any], devices: int) -> list[tuple[int, tuple[int, ...] | None]]:
    """(`group`, `senders`) of each `Collective` of a primitive over so many devices. A device sends nothing to itself."""
    if devices == 1:
        return []
    if "perm" in params:
        sources = tuple(sorted(source for source, receiver in params["perm"] if source != receiver))
        return [(devices, None if len(sources) == devices else sources)] if sources else []
    members: dict[int, list[int]] = {}  # positions, by the size of their group
    for group in params.get("axis_index_groups") or [range(devices)]:
        members.setdefault(len(group), []).extend(group)
    return [
        (size, None if len(positions) == devices else tuple(sorted(positions)))
        for size, positions in members.items()
        if size > 1
    ]


def primitives(jaxpr: Any) -> set[str]:
    """The names of all primitives of a jaxpr, including those inside loops and calls."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    names = {equation.primitive.name for equation in jaxpr.eqns}
    return names.union(*(primitives(inner) for equation in jaxpr.eqns for inner in inner_jaxprs(equation)))


@dataclass(frozen=True)
class StepTraffic:
    """The collectives of a step on a mesh of vertical x horizontal devices. phases: indices of the phases that have them."""

    vertical: int
    horizontal: int
    strategy: str
    phases: tuple[int, ...]
    collectives: tuple[Collective, ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.vertical * self.horizontal

    @property
    def sent_bytes(self) -> list[float]:
        """Bytes that each device sends per step."""
        sent = np.zeros(self.devices)
        for collective in self.collectives:
            sent[self.senders(collective)] += collective.sent_bytes
        return sent.tolist()

    def senders(self, collective: Collective) -> list[int]:
        """The devices that send in a collective: in every group, the devices at its positions along its axes."""
        mesh = np.arange(self.devices).reshape(self.vertical, self.horizontal)
        axes = [AXES.index(axis) for axis in collective.axes]
        positions = math.prod(mesh.shape[axis] for axis in axes)
        by_position = np.moveaxis(mesh, axes, range(len(axes))).reshape(positions, -1)
        return by_position[range(positions) if collective.senders is None else collective.senders, :].ravel().tolist()
