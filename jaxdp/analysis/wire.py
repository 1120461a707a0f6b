"""What the devices send in a step, as `jaxdp plan --wire` prints it."""

import dataclasses

from rich.table import Table

from jaxdp import models
from jaxdp.analysis.tables import table_of
from jaxdp.config import RESNET, Config
from jaxdp.parallel.mesh import abstract_mesh
from jaxdp.parallel.traffic import Collective, StepTraffic, find_collectives
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.training.step import without_reduction
from jaxdp.training.step_compiler import trace_train_step


def plan_traffic(plan: Plan) -> list[StepTraffic]:
    """The traffic of the steps of a plan. Phases with the same collectives share an entry."""
    entries: dict[StepTraffic, StepTraffic] = {}
    for phase in plan.phases:
        traffic = step_traffic(plan.config, phase)
        key = dataclasses.replace(traffic, phases=())
        phases = (*entries[key].phases, phase.index) if key in entries else traffic.phases
        entries[key] = dataclasses.replace(traffic, phases=phases)
    return list(entries.values())


def step_traffic(config: Config, phase: PlannedPhase) -> StepTraffic:
    """The collectives of a step of a phase, read from the step traced for a mesh of that shape. Needs no devices."""
    mesh = abstract_mesh(phase.vertical, phase.horizontal)
    traced = trace_train_step(config, models.create(config.model, platform="any"), phase, mesh=mesh)
    found = find_collectives(traced.jaxpr, dict(mesh.shape))
    return StepTraffic(phase.vertical, phase.horizontal, config.reduce.strategy, (phase.index,), tuple(found))


def normalization_messages(plan: Plan) -> list[int]:
    """Bytes of every message that the network itself sends in a step of one micro-batch, in program order.

    These are the messages of synchronized batch normalization, in the forward and the backward pass, read from the step traced
    without a reduction of gradients.
    """
    config = plan.config
    if config.model.name == RESNET and config.model.norm == "per_worker":
        return []
    config = without_reduction(config)
    per_worker = plan.phases[0].per_worker_batch
    phase = dataclasses.replace(plan.phases[0], vertical=1, horizontal=2, accumulation=1, global_batch=2 * per_worker)
    return [message.operand_bytes for message in step_traffic(config, phase).collectives for _ in range(message.count)]


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
    }


def table(traffic: StepTraffic) -> Table | str:
    """A rich table with one row per kind of collective, axis and dtype; a line for one device."""
    kinds: dict[tuple, list[Collective]] = {}
    for collective in traffic.collectives:
        key = (collective.operation, collective.axes, collective.group, collective.dtype, collective.senders is None)
        kinds.setdefault(key, []).append(collective)
    phases = f"phase{'s' * (len(traffic.phases) > 1)} {', '.join(map(str, traffic.phases))}"
    if traffic.devices == 1:
        return f"collectives of a step of {phases}: none on one device"
    title = f"collectives of a step of {phases}: {traffic.strategy} on {traffic.vertical}x{traffic.horizontal} devices"
    rows = list[tuple[str, ...]]()
    for (operation, axes, group, dtype, all_send), members in kinds.items():
        sizes = sorted({collective.operand_bytes for collective in members})
        total = sum(collective.operand_bytes * collective.count for collective in members)
        spread = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        sent = sum(one.sent_bytes * (1 if all_send else len(traffic.senders(one))) for one in members)
        row = (
            operation if all_send else f"{operation}\npoint-to-point",
            axes[0] if len(axes) == 1 else "both",
            str(group),
            dtype,
            f"{sum(collective.count for collective in members):,}",
            f"{total:,} ({spread})" if len(members) > 1 or members[0].count > 1 else f"{total:,}",
            f"{sent:,.0f}" if all_send else f"{sent:,.0f} in total",
        )
        rows.append(row)
    busiest, mean = max(traffic.sent_bytes), sum(traffic.sent_bytes) / traffic.devices
    rows.append(("total", "", str(traffic.devices), "", "", "", f"{busiest:,.0f}"))
    if busiest > 1.001 * mean:
        rows.append(("", "", "", "", "", "mean per device", f"{mean:,.0f}"))
    columns = ("collective", "axis", "devices", "dtype", "calls", "operand bytes", "sent per device")
    return table_of(title, columns, rows, left=("collective", "axis", "dtype"))
