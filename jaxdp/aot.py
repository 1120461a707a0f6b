"""The training step compiled for GPUs that are not there, by XLA's own compiler for them, and what can be read from it."""

import importlib.util
import os
import time
from collections import defaultdict
from dataclasses import dataclass

from jaxdp.config import ConfigError
from jaxdp.flags import one_of
from jaxdp.parallel.chips import CHIPS, target_config
from jaxdp.parallel.hlo import Schedule, read_schedule
from jaxdp.planning import Plan, PlannedPhase

POINT_TO_POINT = "point to point"
COVER = 10  # kernels that move so many times the bytes of a message take longer than it does on NVLink (4,800 to 450 GB/s)
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclass(frozen=True)
class Compiled:
    """A step as compiled for one device of `hosts` x `gpus_per_host`.

    memory_bytes: arguments, results and temporaries; text: the compiled module.
    """

    chip: str
    hosts: int
    gpus_per_host: int
    phase: PlannedPhase
    jax: str
    seconds: float
    memory_bytes: int
    schedule: Schedule
    text: str


def available() -> str | None:
    """Why this installation cannot compile for a GPU, or None where it can."""
    if any(importlib.util.find_spec(name) for name in PLUGINS):
        return None
    return "XLA's GPU compiler is not installed; get it with the extra cuda13: pip install -e '.[cuda13]' (about 5 GB)"


def compile_for(plan: Plan, phase_index: int, chip: str, hosts: int, gpus_per_host: int) -> Compiled:
    """Compile the step of one phase of `plan` for a cluster of `hosts` x `gpus_per_host` GPUs; no GPU is needed.

    chip: a key of `parallel.chips.CHIPS`. Raises ConfigError for an unknown chip or phase, and where the compiler is missing.
    """
    if chip not in CHIPS:
        raise one_of("--compile-for", chip, CHIPS)
    phases = {phase.index: phase for phase in plan.phases}
    if phase_index not in phases:
        raise ConfigError(f"--phase: {phase_index} is not allowed; the plan has {', '.join(map(str, phases))}")
    if plan.config.reduce.strategy == "auto":
        raise ConfigError(
            "reduce.strategy: 'auto' is not allowed with --compile-for; it is chosen by measuring; give one by name"
        )
    if reason := available():
        raise ConfigError(f"--compile-for: {chip!r} is not allowed; {reason}")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # it would look for the driver
    import jax
    from jax.experimental import topologies

    from jaxdp import models
    from jaxdp.parallel import compilation
    from jaxdp.parallel.mesh import make_mesh
    from jaxdp.training.programs import trace_train_step

    phase = phases[phase_index]
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=target_config(CHIPS[chip]), topology=f"1x{hosts}x{gpus_per_host}"
    )
    mesh = make_mesh(phase.vertical, phase.horizontal, topology.devices)
    model = models.create(plan.config.model, platform="gpu")
    traced = trace_train_step(plan.config, model, (0.0, 1.0), phase, mesh)
    began = time.perf_counter()
    compiled = traced.lower(lowering_platforms=("cuda",)).compile(compilation.options(plan.config.compile, "gpu"))
    seconds = time.perf_counter() - began
    try:
        text = compiled.as_text()
        schedule = read_schedule(text, mesh.size)
    except ValueError as error:
        raise ConfigError(f"--compile-for: the compiled step cannot be accounted for: {error}") from None
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return Compiled(
        chip=chip,
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        phase=phase,
        jax=jax.__version__,
        seconds=seconds,
        memory_bytes=total - memory.alias_size_in_bytes,
        schedule=schedule,
        text=text,
    )


def axis_of(groups, vertical: int, horizontal: int) -> str:
    """The mesh axis along which the groups of a collective lie."""
    devices = range(vertical * horizontal)
    rows = {tuple(devices[row * horizontal : (row + 1) * horizontal]) for row in range(vertical)}
    columns = {tuple(devices[column::horizontal]) for column in range(horizontal)}
    told = {tuple(sorted(group)) for group in groups}
    if told == {tuple(devices)}:
        return "vertical x horizontal"
    return "horizontal" if told == rows else "vertical" if told == columns else POINT_TO_POINT


def _grouped(compiled: Compiled) -> list[dict]:
    """Collectives of one kind, axis and dtype together, in the order of their first."""
    phase, kinds = compiled.phase, defaultdict(list)
    for one in compiled.schedule.collectives:
        axis = axis_of(one.groups, phase.vertical, phase.horizontal)
        devices = len({device for group in one.groups for device in group}) if axis == POINT_TO_POINT else len(one.groups[0])
        kinds[one.operation, axis, devices, one.dtype].append(one)
    return [
        {
            "operation": operation,
            "axis": axis,
            "group": group,
            "dtype": dtype,
            "count": sum(one.count for one in ones),
            "operand_bytes": sum(one.count * one.operand_bytes for one in ones),
            "asynchronous": sum(one.count for one in ones if one.asynchronous),
            "covered_bytes": sum(
                one.count * one.operand_bytes for one in ones if one.beside_bytes >= COVER * one.operand_bytes
            ),
            "beside_something": sum(one.count for one in ones if one.beside),
            "kernels_beside": sum(one.count * one.beside for one in ones),
            "kernel_bytes_beside": sum(one.count * one.beside_bytes for one in ones),
        }
        for (operation, axis, group, dtype), ones in kinds.items()
    ]


def as_dict(compiled: Compiled) -> dict:
    chip = CHIPS[compiled.chip]
    return {
        "chip": chip.name,
        "hosts": compiled.hosts,
        "gpus_per_host": compiled.gpus_per_host,
        "jax": compiled.jax,
        "phase": compiled.phase.index,
        "mesh": [compiled.phase.vertical, compiled.phase.horizontal],
        "compile_seconds": compiled.seconds,
        "memory_bytes": compiled.memory_bytes,
        "device_memory_bytes": chip.memory_bytes,
        "kernels": compiled.schedule.kernels,
        "kernel_bytes": compiled.schedule.kernel_bytes,
        "seconds_to_move_them": compiled.schedule.kernel_bytes / chip.memory_bandwidth,
        "collectives": _grouped(compiled),
    }


def table(compiled: Compiled):
    """Memory, kernels and collectives of a compiled step. A rich table."""
    from rich.table import Table

    told, phase = as_dict(compiled), compiled.phase
    shown = Table(box=None, padding=(0, 2, 0, 0))
    idle = f", {phase.idle_devices} idle, so that rows are no hosts" if phase.idle_devices else ""
    shown.title = (
        f"phase {phase.index} compiled for {compiled.hosts} x {compiled.gpus_per_host} {told['chip']} "
        f"({phase.vertical}x{phase.horizontal}{idle}) by JAX {compiled.jax} in {compiled.seconds:.0f} s; nothing was run"
    )
    fits = "fits" if told["memory_bytes"] <= told["device_memory_bytes"] else "does not fit"
    shown.caption = (
        f"memory a device {told['memory_bytes'] / 1e9:.1f} GB of {told['device_memory_bytes'] / 1e9:.1f} GB: {fits}. "
        f"{told['kernels']:,} kernels with {told['kernel_bytes'] / 1e9:.1f} GB of operands and results: about "
        f"{1e3 * told['seconds_to_move_them']:.1f} ms at the chip's {CHIPS[compiled.chip].memory_bandwidth / 1e12:.2f} TB/s."
    )
    for name in ("collective", "axis", "devices", "dtype", "messages", "operand bytes", "asynchronous", "beside kernels"):
        shown.add_column(name, justify="left" if name in ("collective", "axis", "dtype") else "right")
    for one in told["collectives"]:
        beside = f"{one['kernel_bytes_beside'] / 1e9:.3f} GB ({one['beside_something']})" if one["beside_something"] else "none"
        shown.add_row(
            one["operation"],
            one["axis"],
            str(one["group"]),
            one["dtype"],
            f"{one['count']:,}",
            f"{one['operand_bytes']:,}",
            f"{one['asynchronous']:,}",
            beside,
        )
    return shown
