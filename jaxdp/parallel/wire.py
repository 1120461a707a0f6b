"""What a step sends: the collectives of a traced program, with axes, dtype, bytes and count."""

import math
from collections import Counter
from dataclasses import dataclass

# Primitives by their names in a jaxpr, which differ with what JAX knows of replication.
OPERATIONS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "ppermute": "permute",
    "all_to_all": "all-to-all",
}


@dataclass(frozen=True)
class Collective:
    """A collective of the step. operand_bytes: what a device puts in, each time; count: times a step, loops included.

    axes: mesh axes; group: devices that exchange with one another. senders: places along `axes` of the devices that send, where
    a permute leaves some out; None: all do.
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
        """Bytes that a sending device sends in a step, by the algorithm that sends least (rings for all but permutes)."""
        share = {
            "all-reduce": 2 * (self.group - 1) / self.group,
            "reduce-scatter": (self.group - 1) / self.group,
            "all-to-all": (self.group - 1) / self.group,
            "all-gather": self.group - 1,
            "permute": 1,
        }[self.operation]
        return self.operand_bytes * share * self.count


def collectives(jaxpr, axis_sizes: dict[str, int]) -> list[Collective]:
    """The collectives of a jaxpr in program order, equal ones counted together; axis_sizes: devices along each mesh axis.

    Those of a scan are multiplied by its length, all branches of a `cond` are listed. Collectives over one device send nothing
    and are left out. Raises ValueError for one in a `while`, of which nobody knows how often it runs.
    """
    found = Counter()
    _walk(getattr(jaxpr, "jaxpr", jaxpr), 1, axis_sizes, found)
    return [Collective(*key[:5], count, key[5]) for key, count in found.items()]


def _walk(jaxpr, times: int | None, axis_sizes, found: Counter) -> None:
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in OPERATIONS:
            axes = params.get("axes", params.get("axis_name"))
            axes = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if isinstance(axis, str))
            group = math.prod(axis_sizes[axis] for axis in axes)
            if group > 1:
                if times is None:
                    raise ValueError(f"{OPERATIONS[name]} in a while loop: how often it runs is not known beforehand")
                senders = tuple(source for source, _ in params["perm"]) if name == "ppermute" else ()
                senders = senders if 0 < len(senders) < group else None
                for operand in equation.invars:
                    size = operand.aval.size * operand.aval.dtype.itemsize
                    found[OPERATIONS[name], axes, group, str(operand.aval.dtype), size, senders] += times
        inside = times
        if name == "scan":
            inside = None if times is None else times * params["length"]
        elif name == "while":
            inside = None
        for value in params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    _walk(part, inside, axis_sizes, found)


def sent_by_device(found: list[Collective], devices: int) -> list[float]:
    """Bytes that each device sends in a step."""
    sent = [sum(one.sent_bytes for one in found if one.senders is None)] * devices
    for one in found:
        for sender in one.senders or ():
            sent[sender] += one.sent_bytes
    return sent


@dataclass(frozen=True)
class Account:
    """What a step sends on a mesh of vertical x horizontal devices."""

    vertical: int
    horizontal: int
    strategy: str
    phases: tuple[int, ...]
    found: tuple[Collective, ...]

    @property
    def devices(self) -> int:
        return self.vertical * self.horizontal

    @property
    def sent(self) -> list[float]:
        return sent_by_device(list(self.found), self.devices)


def masters_only(account: Account) -> dict | None:
    """The hierarchical strategy with one master a row, as Jia et al. have it: bytes sent, beside those of the SPMD program.

    Along a row the others send their vector on to the master and pass the result on, in a chain; the masters alone form the
    vertical ring. In an SPMD program all columns repeat that ring at the same time. None for other strategies.
    """
    if account.strategy != "hierarchical":
        return None
    vector = max(
        sum(one.operand_bytes * one.count for one in account.found if one.axes == (axis,))
        for axis in ("vertical", "horizontal")
    )
    ring = 2 * (account.vertical - 1) / account.vertical * vector
    return {
        "vertical_bytes_all_columns": ring * account.devices,
        "vertical_bytes_masters_only": ring * account.vertical,
        "master_sends": ring + vector * (account.horizontal > 1),
        "others_send_at_most": 2 * vector,
    }


def as_dict(account: Account) -> dict:
    sent = account.sent
    return {
        "phases": list(account.phases),
        "mesh": [account.vertical, account.horizontal],
        "strategy": account.strategy,
        "collectives": [
            {
                "operation": one.operation,
                "axes": list(one.axes),
                "group": one.group,
                "dtype": one.dtype,
                "operand_bytes": one.operand_bytes,
                "count": one.count,
                "senders": len(one.senders) if one.senders else one.group,
                "sent_bytes": one.sent_bytes,
            }
            for one in account.found
        ],
        "sent_bytes_busiest_device": max(sent),
        "sent_bytes_mean_device": sum(sent) / len(sent),
        "masters_only": masters_only(account),
    }


def table(account: Account):
    """One line for each kind of collective, axis and dtype. A rich table."""
    from rich.table import Table

    kinds = {}
    for one in account.found:
        kinds.setdefault((one.operation, one.axes, one.group, one.dtype, one.senders is None), []).append(one)
    shown = Table(box=None, padding=(0, 2, 0, 0))
    which = f"phase{'s' * (len(account.phases) > 1)} {', '.join(map(str, account.phases))}"
    shown.title = f"what a step of {which} sends: {account.strategy} on {account.vertical}x{account.horizontal} devices"
    for name in ("collective", "axis", "devices", "dtype", "messages", "operand bytes", "sent by a device"):
        shown.add_column(name, justify="left" if name in ("collective", "axis", "dtype") else "right")
    for (operation, axes, group, dtype, all_send), ones in kinds.items():
        sizes = sorted({one.operand_bytes for one in ones})
        total = sum(one.operand_bytes * one.count for one in ones)
        spread = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        sent = sum(one.sent_bytes for one in ones)
        shown.add_row(
            operation if all_send else f"{operation}, one to one",
            " x ".join(axes),
            str(group),
            dtype,
            f"{sum(one.count for one in ones):,}",
            f"{total:,} ({spread})" if len(ones) > 1 or ones[0].count > 1 else f"{total:,}",
            f"{sent:,.0f}" if all_send else f"{sent:,.0f} in all",
        )
    busiest, mean = max(account.sent), sum(account.sent) / account.devices
    shown.add_section()
    shown.add_row("in all", "", str(account.devices), "", "", "", f"{busiest:,.0f}")
    if busiest > 1.001 * mean:
        shown.add_row("", "", "", "", "", "mean of the devices", f"{mean:,.0f}")
    if masters := masters_only(account):
        shown.caption = (
            "As an SPMD program every column repeats the vertical exchange, with "
            f"{masters['vertical_bytes_all_columns']:,.0f} bytes in all on that axis; with one master a row (Jia et al.) "
            f"{masters['vertical_bytes_masters_only']:,.0f}. A master sends {masters['master_sends']:,.0f}."
        )
    return shown
