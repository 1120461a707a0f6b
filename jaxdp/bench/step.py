"""`jaxdp bench step`: the training step on generated images, compared with the ceilings of the devices."""

import math
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from jaxdp.analysis.gpu_targets import GPU_TARGETS
from jaxdp.analysis.tables import table_of
from jaxdp.analysis.tpu_targets import TPU_TARGETS
from jaxdp.bench.environment import provenance
from jaxdp.bench.step_runner import StepRunner, build_step, check_strategy, describe
from jaxdp.config import Config
from jaxdp.errors import ConfigError, plural
from jaxdp.parallel import timing
from jaxdp.parallel.mesh import AXES
from jaxdp.sizes import model_summary
from jaxdp.xla import kernels, options

FLOP_PER_MULTIPLY_ADD = 6  # two each for the output, the gradient of the weights, and the gradient of the input
PROFILED_STEPS = 3


def default_batch(config: Config, devices: int) -> int:
    """Images per step: a per-worker batch on each device, or the first phase's global batch if no per-worker batch is set."""
    phase = config.batch[0]
    return devices * phase.per_worker_batch if phase.per_worker_batch else phase.global_batch


def check(config: Config, batch: int, *, devices: int, profile: bool = False) -> None:
    """Raise ConfigError for a step that cannot run on these devices, or that cannot be profiled."""
    unit = devices * max(1, min(config.batch[0].per_worker_batch or 1, batch))
    if batch < 1 or batch % unit:
        nearest = max(unit, round(batch / unit) * unit)
        reason = f"must be a multiple of {unit}"
        raise ConfigError("--batch-size", batch, reason=reason, hint=f"the nearest is {nearest}")
    check_strategy(config, devices)
    if profile and jax.default_backend() == "tpu":
        hint = "for TensorBoard use jaxdp train --logging.profile 10,5"
        raise ConfigError("--kernels", reason="reads profiles of CPUs and GPUs only", hint=hint)
    if profile and config.batch[0].per_worker_batch and batch > unit:
        raise ConfigError(
            "--kernels",
            reason=f"cannot profile {batch // unit} micro-batches, which run in a loop",
            hint=f"give --batch-size {unit}, or another --batch.0.per-worker-batch",
        )


def published_ceilings(device_kind: str, dtype: str, devices: int) -> dict[str, float] | None:
    """{"flops", "bytes_per_second"} of this number of devices according to their vendor; None for unknown devices."""
    for tpu in TPU_TARGETS.values():
        if device_kind == tpu.kind:  # products are of bfloat16 by default, whatever the type of the arrays
            return {"flops": devices * tpu.flops, "bytes_per_second": devices * tpu.memory_bandwidth}
    chip = next((chip for chip in GPU_TARGETS.values() if device_kind in chip.name or chip.name in device_kind), None)
    if chip is None:
        return None
    rate = chip.matrix_rates[{"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]]
    flops = 2 * 4 * chip.cores * rate * chip.matrix_clock_ghz * 1e9
    return {"flops": devices * flops, "bytes_per_second": devices * chip.memory_bandwidth}


def run(
    config: Config,
    mesh: Mesh,
    *,
    batch: int,
    repeats: int = 7,
    seconds: float = 2.0,
    profile: bool = False,
    keep: Callable[[dict], object] = lambda record: None,
) -> dict:
    """Time steps of `batch` images in `repeats` rounds of about `seconds` seconds.

    profile: run a few more steps under JAX's profiler, for a table by
    kind of kernel. keep: takes the record before what follows the timed steps, because the process may end there.
    """
    with options.without_compilation_cache():
        step = build_step(config, mesh, global_batch=batch, strategy=config.reduce.strategy)

    def seconds_per_step(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            out = step()
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / count

    seconds_per_step(2)
    count = max(1, round(seconds / seconds_per_step(1)))
    times = [seconds_per_step(count) for _ in range(repeats)]
    step_seconds = statistics.median(times)
    memory = step.step.memory_analysis()
    memory_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    bytes_accessed = mesh.size * step.step.cost_analysis().get("bytes accessed", 0.0)
    device = mesh.devices.flat[0]
    flop_per_image = FLOP_PER_MULTIPLY_ADD * model_summary(config)["macs"]
    published = published_ceilings(device.device_kind, config.model.dtype, mesh.size)
    ceilings = {"published": published} if published else {}
    record = {
        "provenance": provenance(),
        "config": config.name,
        "model": describe(config),
        "optimizer": config.optimizer.name,
        "strategy": config.reduce.strategy,
        "update": config.reduce.update,
        "device": device.device_kind,
        "mesh": list(mesh.devices.shape),
        "batch": batch,
        "repeats": repeats,
        "steps_a_round": count,
        "step_seconds": step_seconds,
        "fastest": min(times),
        "slowest": max(times),
        "images_per_second": batch / step_seconds,
        "flops": flop_per_image * batch / step_seconds,
        "flop_an_image": flop_per_image,
        "bytes_per_second": bytes_accessed / step_seconds,
        "bytes_an_image": bytes_accessed / batch,
        "ceilings": ceilings,
        "memory_bytes": memory_bytes - memory.alias_size_in_bytes,
        "peak_memory_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "trace_and_compile_seconds": step.compile_seconds,
        "kernels": None,
    }
    keep(record)
    measured = measure_ceilings(mesh, config.model.dtype)
    record["ceilings"] = {"measured": measured} | ceilings
    if profile:
        keep(record)
        record["kernels"] = _profile_kernels(step, mesh, measured, images_per_device=batch // mesh.size)
    return record


def _profile_kernels(step: StepRunner, mesh: Mesh, ceilings: dict[str, float], *, images_per_device: int) -> dict:
    """Time of the step by kind of kernel; see `kernels.summarize_by_kind`."""
    seconds = kernels.profile_kernels(lambda: jax.block_until_ready(step()), PROFILED_STEPS)
    step_kernels = kernels.kernels_of_step(step.step.as_text(), images_per_device)
    seconds = kernels.divide_graphs(step_kernels, seconds)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:  # the profile holds the threads of all CPU devices together
        seconds = {name: spent / mesh.size for name, spent in seconds.items()}
    per_device = {name: limit / mesh.size for name, limit in ceilings.items()}
    rows = kernels.summarize_by_kind(step_kernels, seconds, per_device)
    # On a CPU, profiled functions contain one another, so that a remainder would be meaningless.
    remainder = None if on_cpu else sum(seconds.values()) - sum(row["seconds"] for row in rows)
    above = kernels.most_above_least(step_kernels, seconds, per_device)
    return {"steps": PROFILED_STEPS, "rows": rows, "elsewhere_seconds": remainder, "most_above_least": above}


def render(record: dict) -> Iterator[Table | str]:
    """A table of the measurement, one of the kernels if profiled, and notes."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    mesh = "x".join(map(str, record["mesh"]))
    table.title = f"{record['model']}: {record['batch']:,} images per step on {mesh} {record['device']}, {record['strategy']}"
    rate = {name: record["batch"] / record[name] for name in ("fastest", "slowest")}
    table.add_row("images/s", f"{record['images_per_second']:,.1f}", f"{rate['slowest']:,.1f} to {rate['fastest']:,.1f}")
    if (devices := math.prod(record["mesh"])) > 1:
        table.add_row(
            "images/s per device", f"{record['images_per_second'] / devices:,.1f}", "for --images-per-second of jaxdp plan"
        )
    rounds = f"{record['repeats']} rounds of {plural(record['steps_a_round'], 'step')}"
    table.add_row("step", f"{1e3 * record['step_seconds']:.2f} ms", rounds)
    for name, unit in (("flops", "GFLOP/s"), ("bytes_per_second", "GB/s")):
        shares = [
            f"{100 * record[name] / ceiling[name]:.0f} % of {ceiling[name] / 1e9:,.0f} {kind}"
            for kind, ceiling in record["ceilings"].items()
        ]
        table.add_row(unit, f"{record[name] / 1e9:,.1f}", ", ".join(shares))
    peak = "" if record["peak_memory_bytes"] is None else f"peak use {record['peak_memory_bytes'] / 1e9:.2f} GB"
    table.add_row("memory per device", f"{record['memory_bytes'] / 1e9:.2f} GB", peak)
    table.add_row("trace and compile", f"{record['trace_and_compile_seconds']:.1f} s", "")
    yield table
    if record["kernels"]:
        yield _kernel_table(record["kernels"])
        yield "most above the minimum: " + "; ".join(map(_describe_kernel, record["kernels"]["most_above_least"]))
    yield (
        "FLOP: six per multiply-add of the model. Bytes: XLA's count of what the compiled step reads and writes. "
        "Measured ceilings: a matrix product, and adding to a vector."
    )


def _describe_kernel(row: dict) -> str:
    side = f", {row['side']}x{row['side']}" if row["side"] else ""
    return f"{row['name']} ({row['kind']}{side}), {1e3 * row['seconds']:.2f} ms of {1e3 * row['least_seconds']:.2f}"


def _kernel_table(profile: dict) -> Table:
    title = f"kernels of a device, from a profile of {profile['steps']} steps; minimum: at the measured ceilings"
    columns = ("kind", "kernels", "ms", "minimum ms", "share", "GB", "GB/s", "GFLOP/s")
    table = table_of(title, columns, (), left=("kind",))
    keys = ("kernels", "seconds", "least_seconds", "bytes", "flop")
    total = {key: sum(row[key] for row in profile["rows"]) for key in keys}
    for row in [*profile["rows"], {"kind": "all"} | total]:
        seconds = row["seconds"]
        cells = [f"{row['kernels']:,}", f"{1e3 * seconds:,.2f}", f"{1e3 * row['least_seconds']:,.2f}"]
        if seconds:
            cells += [
                f"{row['least_seconds'] / seconds:.0%}",
                f"{row['bytes'] / 1e9:.2f}",
                f"{row['bytes'] / seconds / 1e9:,.1f}",
                f"{row['flop'] / seconds / 1e9:,.0f}" if row["flop"] else "",
            ]
        table.add_row(row["kind"], *cells)
    if profile["elsewhere_seconds"] is not None:
        table.add_row("unknown kernels", "", f"{1e3 * profile['elsewhere_seconds']:,.2f}")
    return table


MATRIX_SIDE = {"cpu": 2048, "other": 8192}
CALLS = {"cpu": 1, "other": 20}  # between two waits; each takes a noticeable part of a call on a GPU
VECTOR_ELEMENTS = {"cpu": 2**25, "other": 2**29}  # over all devices; larger than any cache


def measure_ceilings(mesh: Mesh, dtype: str, *, repeats: int = 7) -> dict[str, float]:
    """{"flops", "bytes_per_second"}, medians of all devices of a mesh together, each working independently.

    flops: of the product of two square matrices of `dtype`. bytes_per_second: read and written when adding to a long float32
    vector.
    """
    kind = "cpu" if mesh.devices.flat[0].platform == "cpu" else "other"
    side, calls, elements = MATRIX_SIDE[kind], CALLS[kind], VECTOR_ELEMENTS[kind] // mesh.size
    rows = PartitionSpec(AXES)

    def on_each_device(function: Callable, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Callable[[], jax.Array]:
        make_inputs = jax.jit(
            lambda: jax.random.normal(jax.random.key(0), (mesh.size, *shape), dtype), out_shardings=NamedSharding(mesh, rows)
        )
        inputs = make_inputs()
        mapped = jax.jit(jax.shard_map(lambda x: function(x[0])[None], mesh=mesh, in_specs=rows, out_specs=rows))
        compiled = mapped.lower(inputs).compile()

        def call() -> jax.Array:
            for _ in range(calls):
                out = compiled(inputs)
            return out

        return call

    measured = {
        "flops": on_each_device(lambda x: x @ x, (side, side), jnp.dtype(dtype)),
        "bytes_per_second": on_each_device(lambda x: x + 1, (elements,), jnp.float32),
    }
    work = {"flops": 2 * side**3 * mesh.size, "bytes_per_second": 2 * 4 * elements * mesh.size}
    seconds = timing.time_alternately(measured, repeats)
    return {name: calls * work[name] / statistics.median(seconds[name]) for name in measured}
