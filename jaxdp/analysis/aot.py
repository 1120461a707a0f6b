"""Ahead-of-time compilation of a step for GPUs and TPUs that are not there, with XLA's compilers for them."""

import importlib.metadata
import importlib.util
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxdp.analysis import tpu_targets
from jaxdp.analysis.gpu_targets import GPU_TARGETS, GpuTarget, target_config
from jaxdp.analysis.tpu_targets import ACCELERATORS, SLICES, TPU_TARGETS, TpuTarget
from jaxdp.errors import ConfigError, first_line, one_of
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.xla import hlo, tpu_hlo
from jaxdp.xla.hlo import CompiledCollective, DeviceWork

if TYPE_CHECKING:
    from rich.table import Table

POINT_TO_POINT = "point to point"
# A collective is covered if the kernels scheduled beside it move this many times its bytes: on an H200 they then take longer
# than the transfer over NVLink (4,800 and 450 GB/s).
COVERED_RATIO = 10
PLUGINS = {"gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "tpu": ("libtpu",)}
MISSING = {
    "gpu": "XLA's GPU compiler is not installed (extra cuda13: pip install -e '.[cuda13]', about 5 GB)",
    "tpu": "XLA's TPU compiler is not installed (extra tpu: pip install -e '.[tpu]')",
}
Step = Literal["training", "evaluation"]


@dataclass(frozen=True)
class CompiledStep:
    """The step compiled for one device of `hosts` x `gpus_per_host` GPUs, or of a TPU slice.

    target: a key of `GPU_TARGETS`, or a slice in `SLICES`. compiler: with versions. seconds: compile time. memory_bytes:
    arguments, results and temporaries. flop: without those of GPU libraries. text: HLO.
    """

    step: Step
    target: str
    hosts: int
    gpus_per_host: int
    phase: PlannedPhase
    jax: str
    compiler: str
    seconds: float
    memory_bytes: int
    flop: float
    schedule: DeviceWork
    text: str

    @property
    def chip(self) -> GpuTarget | TpuTarget:
        """The device and its published figures."""
        return GPU_TARGETS.get(self.target) or TPU_TARGETS[self.target.partition(":")[0]]


def unavailable_reason(platform: str = "gpu") -> str | None:
    """Why this installation cannot compile for a platform, "gpu" or "tpu", or None if it can."""
    return None if any(importlib.util.find_spec(name) for name in PLUGINS[platform]) else MISSING[platform]


def check_target(name: str) -> str:
    """A GPU of `GPU_TARGETS` or a slice of `SLICES`, which may also be given as in `ACCELERATORS`.

    Raises ConfigError for another name, and if the compiler is not installed.
    """
    target = ACCELERATORS.get(name, name)
    if target not in GPU_TARGETS and target not in SLICES:
        of_chip = [each for each in SLICES if each.partition(":")[0] == name.partition(":")[0]]
        raise one_of("--compile-for", name, of_chip or [*GPU_TARGETS, *SLICES])
    if reason := unavailable_reason("tpu" if target in SLICES else "gpu"):
        raise ConfigError("--compile-for", name, reason=reason)
    return target


def phase_of(plan: Plan, index: int) -> PlannedPhase:
    """The phase of this index. Raises ConfigError if the plan has none."""
    phases = {phase.index: phase for phase in plan.phases}
    if index not in phases:
        raise ConfigError("--phase", index, reason=f"the plan has phases {', '.join(map(str, phases))}", hint="choose one")
    return phases[index]


def sizes_of(slice_name: str) -> dict[str, int]:
    """Devices and processes of a slice in `SLICES`, and rows of its mesh, for `jaxdp.planning.make_plan`."""
    from jaxdp.parallel.torus import default_rows

    devices = devices_of(slice_name)
    processes = len({device.process_index for device in devices})
    return {"devices": len(devices), "processes": processes, "rows": default_rows(devices) or 1}


def compile_for(
    plan: Plan, phase_index: int, *, target: str, hosts: int = 1, gpus_per_host: int = 1, step: Step = "training"
) -> CompiledStep:
    """Compile a step of a phase of `plan` for a cluster of `hosts` x `gpus_per_host` GPUs, or for a TPU slice.

    No GPU or TPU is needed. target: as for `check_target`; a slice sets the number of hosts. Raises ConfigError for an unknown
    target or phase, if the compiler is not installed, and if the step does not fit into a TPU.
    """
    target, phase = check_target(target), phase_of(plan, phase_index)
    platform = "tpu" if target in SLICES else "gpu"
    import jax

    from jaxdp import models
    from jaxdp.training.step_compiler import mesh_of, trace_evaluation_step, trace_train_step
    from jaxdp.xla import options

    devices = devices_of(target, hosts, gpus_per_host)
    if platform == "tpu":
        hosts = len({device.process_index for device in devices})
        gpus_per_host = len(devices) // hosts
    mesh = mesh_of(phase, devices)
    model = models.create(plan.config.model, platform=platform)
    if step == "training":
        traced = trace_train_step(plan.config, model, phase, mesh=mesh)
    else:
        traced = trace_evaluation_step(plan.config, model, phase.devices * phase.per_worker_batch, mesh=mesh)
    began = time.perf_counter()
    lowered = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,))
    compiler_options = options.compiler_options(plan.config, platform)
    try:
        with options.without_compilation_cache():  # JAX cannot load a stored program without its device
            compiled = lowered.compile(compiler_options)
    except jax.errors.JaxRuntimeError as error:
        hint = f"use all {len(devices)} devices" if phase.idle_devices else ""
        if "RESOURCE_EXHAUSTED" in str(error):
            hint = "use a smaller per_worker_batch" + " or --model.remat" * (step == "training")
        raise ConfigError("--compile-for", target, reason=first_line(error).rstrip("."), hint=hint) from None
    seconds = time.perf_counter() - began
    try:
        text = compiled.as_text()
        schedule = (tpu_hlo if platform == "tpu" else hlo).read_schedule(text, mesh.size)
    except ValueError as error:
        raise ConfigError("--compile-for", target, reason=f"cannot read the compiled step: {error}") from None
    # JAX 0.10 counts none for GPUs that are not there; XLA counts the loop over micro-batches once.
    counted = (compiled.cost_analysis() or {}).get("flops", 0.0)
    memory, versions = compiled.memory_analysis(), f"JAX {jax.__version__}"
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return CompiledStep(
        step=step,
        target=target,
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        phase=phase,
        jax=jax.__version__,
        compiler=f"{versions}, libtpu {importlib.metadata.version('libtpu')}" if platform == "tpu" else versions,
        seconds=seconds,
        memory_bytes=total - memory.alias_size_in_bytes,
        flop=counted * (phase.accumulation if step == "training" else 1),
        schedule=schedule,
        text=text,
    )


def devices_of(target: str, hosts: int = 1, gpus_per_host: int = 1) -> list[Any]:
    """The devices of a GPU cluster or a TPU slice, as JAX describes them to a compiler."""
    import jax
    from jax.experimental import topologies

    if target in GPU_TARGETS:
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # which requires the driver
        config, shape = target_config(GPU_TARGETS[target]), f"1x{hosts}x{gpus_per_host}"
        return topologies.get_topology_desc("", platform="cuda", target_config=config, topology=shape).devices
    one_host = {"v5e:1x1": (1, 1, 1), "v6e:1x1": (1, 1, 1), "v5e:2x4": (2, 4, 1), "v6e:2x4": (2, 4, 1)}  # others: of 2x2 chips
    options = {"chips_per_host_bounds": one_host[target]} if target in one_host else {}
    missing = tpu_targets.ENVIRONMENT.keys() - os.environ.keys()
    os.environ.update({name: tpu_targets.ENVIRONMENT[name] for name in missing})
    try:
        return topologies.get_topology_desc(target, platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError("--compile-for", target, reason=first_line(error), hint="install the extra tpu again") from None
    finally:
        for name in missing:
            del os.environ[name]


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
    chip, moved = step.chip, step.schedule.kernel_bytes
    record = {
        "step": step.step,
        "device": chip.name,
        "target": step.target,
        "hosts": step.hosts,
        "gpus_per_host": step.gpus_per_host,
        "jax": step.jax,
        "compiler": step.compiler,
        "phase": step.phase.index,
        "mesh": [step.phase.vertical, step.phase.horizontal],
        "compile_seconds": step.seconds,
        "memory_bytes": step.memory_bytes,
        "device_memory_bytes": chip.memory_bytes,
        "kernels": step.schedule.kernels,
        "kernel_bytes": moved,
        "least_memory_seconds": moved / chip.memory_bandwidth,
        "collectives": _grouped(step),
    }
    if isinstance(chip, GpuTarget):
        return record
    return record | {"flop": step.flop, "least_compute_seconds": step.flop / chip.flops}


def table(step: CompiledStep) -> "Table":
    """A rich table of the memory, kernels and collectives of a compiled step."""
    from jaxdp.analysis.tables import table_of

    record, phase, chip = as_dict(step), step.phase, step.chip
    idle = f", {phase.idle_devices} idle" if phase.idle_devices else ""
    devices = step.target if isinstance(chip, TpuTarget) else f"{step.hosts} x {step.gpus_per_host} {chip.name}"
    title = (
        f"{step.step} step of phase {phase.index} compiled for {devices} ({phase.vertical}x{phase.horizontal}{idle}) by "
        f"{step.compiler} in {step.seconds:.0f} s; nothing was run"
    )
    fits = "fits" if record["memory_bytes"] <= record["device_memory_bytes"] else "does not fit"
    where = " in HBM" * isinstance(chip, TpuTarget)
    caption = (
        f"memory per device: {record['memory_bytes'] / 1e9:.3g} GB of {record['device_memory_bytes'] / 1e9:.3g} GB: {fits}. "
        f"{record['kernels']:,} kernels with {record['kernel_bytes'] / 1e9:.3g} GB of operands and results{where}: "
        f"{1e3 * record['least_memory_seconds']:.3g} ms at {chip.memory_bandwidth / 1e12:.2f} TB/s."
    )
    if isinstance(chip, TpuTarget):
        seconds = record["least_compute_seconds"]
        caption += f" {record['flop'] / 1e12:.3g} TFLOP: at least {1e3 * seconds:.3g} ms at {chip.flops / 1e12:.0f} TFLOP/s."
    rows = []
    for row in record["collectives"]:
        overlapped = f"{row['overlapped_bytes'] / 1e9:.3g} GB ({row['overlapped']})" if row["overlapped"] else "none"
        numbers = f"{row['count']:,}", f"{row['operand_bytes']:,}", f"{row['asynchronous']:,}", overlapped
        rows.append((row["operation"], row["axis"], str(row["group"]), row["dtype"], *numbers))
    columns = ("collective", "axis", "devices", "dtype", "calls", "operand bytes", "asynchronous", "overlapped kernels")
    return table_of(title, columns, rows, left=("collective", "axis", "dtype"), caption=caption)
