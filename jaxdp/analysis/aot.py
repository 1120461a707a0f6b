"""Ahead-of-time compilation of the training step for GPUs that are not installed, with XLA's GPU compiler."""

import importlib.util
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxdp.analysis.gpu_targets import GPU_TARGETS, target_config
from jaxdp.errors import ConfigError, one_of
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.xla.hlo import CompiledCollective, DeviceWork, read_schedule

if TYPE_CHECKING:
    from rich.table import Table

POINT_TO_POINT = "point to point"
# A collective is covered if the kernels scheduled beside it move this many times its bytes: on an H200 they then take longer
# than the transfer over NVLink (4,800 and 450 GB/s).
COVERED_RATIO = 10
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclass(frozen=True)
class CompiledStep:
    """The step compiled for one device of `hosts` x `gpus_per_host`.

    gpu: a key of `GPU_TARGETS`. jax: version. seconds: compile time. memory_bytes: arguments, results and temporaries. text:
    HLO.
    """

    gpu: str
    hosts: int
    gpus_per_host: int
    phase: PlannedPhase
    jax: str
    seconds: float
    memory_bytes: int
    schedule: DeviceWork
    text: str


def unavailable_reason() -> str | None:
    """Why this installation cannot compile for a GPU, or None if it can."""
    if any(importlib.util.find_spec(name) for name in PLUGINS):
        return None
    return "XLA's GPU compiler is not installed (extra cuda13: pip install -e '.[cuda13]', about 5 GB)"


def compile_for(plan: Plan, phase_index: int, *, gpu: str, hosts: int, gpus_per_host: int) -> CompiledStep:
    """Compile the step of a phase of `plan` for a cluster of `hosts` x `gpus_per_host` GPUs; no GPU is needed.

    gpu: a key of `GPU_TARGETS`. Raises ConfigError for an unknown GPU or phase, and if the compiler is not installed.
    """
    if gpu not in GPU_TARGETS:
        raise one_of("--compile-for", gpu, GPU_TARGETS)
    phases = {phase.index: phase for phase in plan.phases}
    if phase_index not in phases:
        raise ConfigError(
            "--phase", phase_index, reason=f"the plan has phases {', '.join(map(str, phases))}", hint="choose one"
        )
    if reason := unavailable_reason():
        raise ConfigError("--compile-for", gpu, reason=reason)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # which requires the driver
    import jax
    from jax.experimental import topologies

    from jaxdp import models
    from jaxdp.parallel.mesh import make_mesh
    from jaxdp.training.step_compiler import trace_train_step
    from jaxdp.xla import options

    phase = phases[phase_index]
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=target_config(GPU_TARGETS[gpu]), topology=f"1x{hosts}x{gpus_per_host}"
    )
    mesh = make_mesh(phase.vertical, phase.horizontal, topology.devices)
    model = models.create(plan.config.model, platform="gpu")
    traced = trace_train_step(plan.config, model, phase, mesh=mesh)
    began = time.perf_counter()
    lowered = traced.lower(lowering_platforms=("cuda",))
    compiler_options = options.compiler_options(plan.config, "gpu")
    with options.without_compilation_cache():  # JAX cannot load a stored program without its GPU
        compiled = lowered.compile(compiler_options)
    seconds = time.perf_counter() - began
    try:
        text = compiled.as_text()
        schedule = read_schedule(text, mesh.size)
    except ValueError as error:
        raise ConfigError("--compile-for", gpu, reason=f"cannot read the compiled step: {error}") from None
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return CompiledStep(
        gpu=gpu,
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        phase=phase,
        jax=jax.__version__,
        seconds=seconds,
        memory_bytes=total - memory.alias_size_in_bytes,
        schedule=schedule,
        text=text,
    )


def axis_of(groups: Sequence[Sequence[int]], vertical: int, horizontal: int) -> str:
    """The mesh axis of a collective's device groups."""
    devices = range(vertical * horizontal)
    rows = {tuple(devices[row * horizontal : (row + 1) * horizontal]) for row in range(vertical)}
    columns = {tuple(devices[column::horizontal]) for column in range(horizontal)}
    members = {tuple(sorted(group)) for group in groups}
    if members == {tuple(devices)}:
        return "vertical x horizontal"
    return "horizontal" if members == rows else "vertical" if members == columns else POINT_TO_POINT


def _grouped(step: CompiledStep) -> list[dict]:
    """The collectives, grouped by operation, axis, group size and dtype."""
    phase = step.phase
    kinds: dict[tuple, list[CompiledCollective]] = defaultdict(list)
    for collective in step.schedule.collectives:
        groups = collective.groups
        axis = axis_of(groups, phase.vertical, phase.horizontal)
        devices = len({device for group in groups for device in group}) if axis == POINT_TO_POINT else len(groups[0])
        kinds[collective.operation, axis, devices, collective.dtype].append(collective)
    return [
        {
            "operation": operation,
            "axis": axis,
            "group": group,
            "dtype": dtype,
            "count": sum(each.count for each in members),
            "operand_bytes": sum(each.count * each.operand_bytes for each in members),
            "asynchronous": sum(each.count for each in members if each.asynchronous),
            "covered_bytes": sum(
                each.count * each.operand_bytes
                for each in members
                if each.overlapped_bytes >= COVERED_RATIO * each.operand_bytes
            ),
            "overlapped": sum(each.count for each in members if each.overlapped_kernels),
            "overlapped_kernels": sum(each.count * each.overlapped_kernels for each in members),
            "overlapped_bytes": sum(each.count * each.overlapped_bytes for each in members),
        }
        for (operation, axis, group, dtype), members in kinds.items()
    ]


def as_dict(step: CompiledStep) -> dict:
    """The compiled step as `jaxdp plan --json` prints it."""
    gpu = GPU_TARGETS[step.gpu]
    return {
        "gpu": gpu.name,
        "hosts": step.hosts,
        "gpus_per_host": step.gpus_per_host,
        "jax": step.jax,
        "phase": step.phase.index,
        "mesh": [step.phase.vertical, step.phase.horizontal],
        "compile_seconds": step.seconds,
        "memory_bytes": step.memory_bytes,
        "device_memory_bytes": gpu.memory_bytes,
        "kernels": step.schedule.kernels,
        "kernel_bytes": step.schedule.kernel_bytes,
        "least_memory_seconds": step.schedule.kernel_bytes / gpu.memory_bandwidth,
        "collectives": _grouped(step),
    }


def table(step: CompiledStep) -> "Table":
    """A rich table of the memory, kernels and collectives of a compiled step."""
    from jaxdp.analysis.tables import table_of

    record, phase = as_dict(step), step.phase
    idle = f", {phase.idle_devices} idle, so rows are not hosts" if phase.idle_devices else ""
    title = (
        f"phase {phase.index} compiled for {step.hosts} x {step.gpus_per_host} {record['gpu']} "
        f"({phase.vertical}x{phase.horizontal}{idle}) by JAX {step.jax} in {step.seconds:.0f} s; nothing was run"
    )
    fits = "fits" if record["memory_bytes"] <= record["device_memory_bytes"] else "does not fit"
    bandwidth = GPU_TARGETS[step.gpu].memory_bandwidth
    caption = (
        f"memory per device: {record['memory_bytes'] / 1e9:.1f} GB of {record['device_memory_bytes'] / 1e9:.1f} GB: {fits}. "
        f"{record['kernels']:,} kernels with {record['kernel_bytes'] / 1e9:.1f} GB of operands and results: at least "
        f"{1e3 * record['least_memory_seconds']:.1f} ms at {bandwidth / 1e12:.2f} TB/s."
    )
    rows = []
    for row in record["collectives"]:
        overlapped = f"{row['overlapped_bytes'] / 1e9:.3f} GB ({row['overlapped']})" if row["overlapped"] else "none"
        numbers = f"{row['count']:,}", f"{row['operand_bytes']:,}", f"{row['asynchronous']:,}", overlapped
        rows.append((row["operation"], row["axis"], str(row["group"]), row["dtype"], *numbers))
    columns = ("collective", "axis", "devices", "dtype", "calls", "operand bytes", "asynchronous", "overlapped kernels")
    return table_of(title, columns, rows, left=("collective", "axis", "dtype"), caption=caption)
