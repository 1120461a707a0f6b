"""The collectives of a traced step: axes, dtype, bytes and count of each, and the bytes that each device sends."""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxdp.xla.jaxprs import inner_jaxprs

if TYPE_CHECKING:
    from rich.table import Table

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

    axes: mesh axes. group: number of devices that exchange with one another. operand_bytes: bytes of one device's operand.
    count: executions per step, loops included. senders: positions along `axes` of the devices that send; None if all do.
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
    omitted. Raises ValueError for a collective in a `while` loop, whose number of iterations is unknown.
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
            group = math.prod(axis_sizes[axis] for axis in axes)
            if group > 1:
                if times is None:
                    raise ValueError(f"{OPERATIONS[name]} in a while loop: the number of iterations is unknown")
                sources = tuple(source for source, _ in params["perm"]) if name == "ppermute" else ()
                senders = sources if 0 < len(sources) < group else None
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
        sent = [sum(collective.sent_bytes for collective in self.collectives if collective.senders is None)] * self.devices
        for collective in self.collectives:
            for sender in collective.senders or ():
                sent[sender] += collective.sent_bytes
        return sent


def masters_only(traffic: StepTraffic) -> dict | None:
    """Bytes sent by the hierarchical strategy with one master per row (Jia et al.) and as an SPMD program; None for others.

    Along a row the other devices forward their vector to the master, and later the result, in a chain; only the masters form
    the vertical ring. In an SPMD program all columns run that ring at the same time.
    """
    if traffic.strategy != "hierarchical":
        return None
    vector = max(
        sum(collective.operand_bytes * collective.count for collective in traffic.collectives if collective.axes == (axis,))
        for axis in ("vertical", "horizontal")
    )
    ring = 2 * (traffic.vertical - 1) / traffic.vertical * vector
    return {
        "vertical_bytes_all_columns": ring * traffic.devices,
        "vertical_bytes_masters_only": ring * traffic.vertical,
        "master_sends": ring + vector * (traffic.horizontal > 1),
        "others_send_at_most": 2 * vector,
    }


def as_dict(traffic: StepTraffic) -> dict:
    """The traffic of a step as `jaxdp plan --json` prints it."""
    sent = traffic.sent_bytes
    return {
        "phases": list(traffic.phases),
        "mesh": [traffic.vertical, traffic.horizontal],
        "strategy": traffic.strategy,
        "collectives": [
            {
                "operation": collective.operation,
                "axes": list(collective.axes),
                "group": collective.group,
                "dtype": collective.dtype,
                "operand_bytes": collective.operand_bytes,
                "count": collective.count,
                "senders": len(collective.senders) if collective.senders else collective.group,
                "sent_bytes": collective.sent_bytes,
            }
            for collective in traffic.collectives
        ],
        "sent_bytes_busiest_device": max(sent),
        "sent_bytes_mean_device": sum(sent) / len(sent),
        "masters_only": masters_only(traffic),
    }


def table(traffic: StepTraffic) -> "Table":
    """A rich table with one row per kind of collective, axis and dtype."""
    from rich.table import Table

    kinds: dict[tuple, list[Collective]] = {}
    for collective in traffic.collectives:
        key = (collective.operation, collective.axes, collective.group, collective.dtype, collective.senders is None)
        kinds.setdefault(key, []).append(collective)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    phases = f"phase{'s' * (len(traffic.phases) > 1)} {', '.join(map(str, traffic.phases))}"
    if traffic.devices == 1:
        table.title = f"collectives of a step of {phases}: none on one device"
        return table
    table.title = f"collectives of a step of {phases}: {traffic.strategy} on {traffic.vertical}x{traffic.horizontal} devices"
    for name in ("collective", "axis", "devices", "dtype", "calls", "operand bytes", "sent per device"):
        is_text, is_bytes = name in ("collective", "axis", "dtype"), name in ("operand bytes", "sent per device")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_bytes)
    for (operation, axes, group, dtype, all_send), members in kinds.items():
        sizes = sorted({collective.operand_bytes for collective in members})
        total = sum(collective.operand_bytes * collective.count for collective in members)
        spread = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        sent = sum(collective.sent_bytes for collective in members)
        table.add_row(
            operation if all_send else f"{operation}\npoint-to-point",
            axes[0] if len(axes) == 1 else "both",
            str(group),
            dtype,
            f"{sum(collective.count for collective in members):,}",
            f"{total:,} ({spread})" if len(members) > 1 or members[0].count > 1 else f"{total:,}",
            f"{sent:,.0f}" if all_send else f"{sent:,.0f} in total",
        )
    busiest, mean = max(traffic.sent_bytes), sum(traffic.sent_bytes) / traffic.devices
    table.add_section()
    table.add_row("total", "", str(traffic.devices), "", "", "", f"{busiest:,.0f}")
    if busiest > 1.001 * mean:
        table.add_row("", "", "", "", "", "mean per device", f"{mean:,.0f}")
    if masters := masters_only(traffic):
        table.caption = (
            "In an SPMD program every column repeats the vertical exchange: "
            f"{masters['vertical_bytes_all_columns']:,.0f} bytes in total on that axis. With one master per row (Jia et al.): "
            f"{masters['vertical_bytes_masters_only']:,.0f} bytes, and a master sends {masters['master_sends']:,.0f}."
        )
    return table
