"""`jaxdp bench step`: the training step by itself, on images made on the devices, beside what the devices can do at most."""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from jaxdp.bench import ceilings, kernels
from jaxdp.bench.provenance import provenance
from jaxdp.bench.stepper import check_strategy, described, stepper
from jaxdp.config import Config, ConfigError
from jaxdp.parallel.chips import CHIPS
from jaxdp.planning import model_summary

FLOP_PER_MULTIPLY_ADD = 6  # two forward, two for the gradient of the weights, two for that of the input
STARTS = ("cold", "warm")
PROFILED_STEPS = 3


def batch_for(config: Config, devices: int) -> int:
    """Images of a step: the first phase's global batch, or as many per-worker batches as there are devices."""
    phase = config.batch[0]
    return devices * phase.per_worker_batch if phase.per_worker_batch else phase.global_batch


def check(config: Config, batch: int, devices: int, profile: bool = False) -> None:
    """Raise ConfigError, naming what is wrong, for a step that these devices cannot take, or that is not to be profiled."""
    unit = devices * max(1, min(config.batch[0].per_worker_batch or 1, batch))
    if batch < 1 or batch % unit:
        nearest = max(unit, round(batch / unit) * unit)
        raise ConfigError(f"--batch-size: {batch} is not allowed; it must be a multiple of {unit}; the nearest is {nearest}")
    check_strategy(config, devices, f"on {devices} devices")
    if profile and config.batch[0].per_worker_batch and batch > unit:
        raise ConfigError(
            f"--kernels: True is not allowed with {batch // unit} micro-batches, which are a loop of kernels; give "
            f"--batch-size {unit}, or another --batch.0.per-worker-batch"
        )


def devices_there(config: Config) -> int:
    """How many devices a run of this config has here; JAX, which would take their memory, is not started in this process."""
    code = "import sys; from jaxdp.config import Mesh; from jaxdp.parallel import distributed; "
    code += "print(len(distributed.start(Mesh(cpu_devices=int(sys.argv[1])))))"
    line = [sys.executable, "-c", code, str(config.mesh.cpu_devices or 1)]
    ran = subprocess.run(line, capture_output=True, text=True)
    if ran.returncode:
        reason = (ran.stderr.strip().splitlines() or [f"starting JAX ended with {ran.returncode}"])[-1]
        raise ConfigError(reason.removeprefix("jaxdp.config.ConfigError: "))
    return int(ran.stdout)


def first_steps(config: Config, batch: int) -> dict[str, dict]:
    """{"cold", "warm"}: how long `jaxdp train` of this model takes to its first step, without and with programs in the cache.

    Two commands in processes of their own, each of one step on made-up images; to be called before JAX starts in this process.
    """
    made = {"source": "synthetic", "directory": None, "train_split": "train", "eval_split": None}
    data = dataclasses.replace(config.data, **made, train_examples=batch, eval_examples=batch)
    logging = dataclasses.replace(config.logging, tensorboard=False)
    phase = dataclasses.replace(config.batch[0], global_batch=batch, until_epoch=None)
    schedule = dataclasses.replace(config.schedule, name="cosine", warmup_epochs=0.0, boundaries=())
    config = dataclasses.replace(config, data=data, logging=logging, batch=(phase,), schedule=schedule, epochs=1.0)
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        config = dataclasses.replace(config, compile=dataclasses.replace(config.compile, cache=str(folder / "cache")))
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
        for start in STARTS:
            line = [sys.executable, "-m", "jaxdp", "train", "--config", str(folder / "config.json"), "--json"]
            began = time.monotonic()
            ran = subprocess.run([*line, "--workdir", str(folder / start)], capture_output=True, text=True)
            if ran.returncode:
                raise ConfigError(f"the command of one step ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")
            told = json.loads(ran.stdout)
            seconds[start] = {"to_first_step": told["seconds_to_first_step"], "whole_command": time.monotonic() - began}
    return seconds


def published(device_kind: str, dtype: str, devices: int) -> dict | None:
    """The ceilings that the maker gives for so many of these devices, where they are known here."""
    chip = next((chip for chip in CHIPS.values() if device_kind in chip.name or chip.name in device_kind), None)
    if chip is None:
        return None
    rate = chip.matrix_rates[{"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]]
    flops = 2 * 4 * chip.cores * rate * chip.matrix_clock_ghz * 1e9
    return {"flops": devices * flops, "bytes_per_second": devices * chip.memory_bandwidth}


def run(
    config: Config, mesh, batch: int, repeats: int = 7, seconds: float = 2.0, starts: dict | None = None, profile: bool = False
) -> dict:
    """Time steps of `batch` images in `repeats` rounds of about so many seconds.

    starts: see `first_steps`. profile: take some steps more under JAX's profiler, for a table by kind of kernel.
    """
    with_cache = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    one = stepper(config, mesh, batch, config.reduce.strategy)
    jax.config.update("jax_enable_compilation_cache", with_cache)

    def timed(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            done = one()
        jax.block_until_ready(done)
        return (time.perf_counter() - began) / count

    timed(2)
    count = max(1, round(seconds / timed(1)))
    times = [timed(count) for _ in range(repeats)]
    step_seconds = statistics.median(times)
    memory = one.step.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    moved = mesh.size * one.step.cost_analysis().get("bytes accessed", 0.0)
    device = mesh.devices.flat[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    flop = FLOP_PER_MULTIPLY_ADD * model_summary(config)["macs"]
    limits = {"measured": ceilings.measured(mesh, config.model.dtype)}
    if there := published(device.device_kind, config.model.dtype, mesh.size):
        limits["published"] = there
    return {
        "provenance": provenance(),
        "config": config.name,
        "model": described(config),
        "optimizer": config.optimizer.name,
        "strategy": config.reduce.strategy,
        "device": device.device_kind,
        "mesh": list(mesh.devices.shape),
        "batch": batch,
        "repeats": repeats,
        "steps_a_round": count,
        "step_seconds": step_seconds,
        "fastest": min(times),
        "slowest": max(times),
        "images_per_second": batch / step_seconds,
        "flops": flop * batch / step_seconds,
        "flop_an_image": flop,
        "bytes_per_second": moved / step_seconds,
        "bytes_an_image": moved / batch,
        "ceilings": limits,
        "memory_bytes": needed - memory.alias_size_in_bytes,
        "peak_memory_bytes": peak,
        "trace_and_compile_seconds": one.compile_seconds,
        "first_steps": starts,
        "kernels": _by_kind(one, batch // mesh.size, mesh.size, limits["measured"]) if profile else None,
    }


def _by_kind(one, batch: int, devices: int, limits: dict) -> dict:
    """Where the step's time goes. See `kernels.by_kind`."""
    seconds = kernels.profiled(lambda: jax.block_until_ready(one()), PROFILED_STEPS)
    there = kernels.of_step(one.step.as_text(), batch)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:  # whose devices have their threads in one list
        seconds = {name: spent / devices for name, spent in seconds.items()}
    share = {name: limit / devices for name, limit in limits.items()}
    rows = kernels.by_kind(there, seconds, share)
    elsewhere = sum(seconds.values()) - sum(row["seconds"] for row in rows)
    # On a CPU the profile has functions that contain one another: what is left there tells nothing.
    return {"steps": PROFILED_STEPS, "rows": rows, "elsewhere_seconds": None if on_cpu else elsewhere}


def shown(record: dict):
    """What was measured, as a table and a sentence."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    mesh = "x".join(map(str, record["mesh"]))
    table.title = f"{record['model']}: {record['batch']:,} images a step on {mesh} {record['device']}, {record['strategy']}"
    rate = {name: record["batch"] / record[name] for name in ("fastest", "slowest")}
    table.add_row("images/s", f"{record['images_per_second']:,.1f}", f"{rate['slowest']:,.1f} to {rate['fastest']:,.1f}")
    table.add_row("step", f"{1e3 * record['step_seconds']:.2f} ms", f"{record['repeats']} rounds of {record['steps_a_round']}")
    for name, unit, kind in (("flops", 1e9, "GFLOP/s"), ("bytes_per_second", 1e9, "GB/s")):
        of = [
            f"{100 * record[name] / one[name]:.0f} % of {one[name] / unit:,.0f} {how}"
            for how, one in record["ceilings"].items()
        ]
        table.add_row(kind, f"{record[name] / unit:,.1f}", ", ".join(of))
    peak = "" if record["peak_memory_bytes"] is None else f"{record['peak_memory_bytes'] / 1e9:.2f} GB at most in use"
    table.add_row("memory of a device", f"{record['memory_bytes'] / 1e9:.2f} GB", peak)
    table.add_row("trace and compile", f"{record['trace_and_compile_seconds']:.1f} s", "")
    for start, told in (record["first_steps"] or {}).items():
        table.add_row(f"to the first step, {start} cache", f"{told['to_first_step']:.1f} s", "of jaxdp train")
    yield table
    if record["kernels"]:
        yield _kernel_table(record["kernels"])
    yield (
        "FLOP: six a multiply-add of the model. Bytes: XLA's account of what the compiled step reads and writes. "
        "Measured ceilings: a product of matrices, adding to a vector."
    )


def _kernel_table(told: dict):
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.title = f"a device's kernels, by a profile of {told['steps']} steps; least: at the measured ceilings"
    for name in ("kind", "kernels", "ms", "least ms", "share", "GB", "GB/s", "GFLOP/s"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    whole = {key: sum(row[key] for row in told["rows"]) for key in ("kernels", "seconds", "least_seconds", "bytes", "flop")}
    for row in [*told["rows"], {"kind": "all"} | whole]:
        spent = row["seconds"]
        rates = [f"{row['least_seconds'] / spent:.0%}", f"{row['bytes'] / 1e9:.2f}", f"{row['bytes'] / spent / 1e9:,.1f}"]
        rates += [f"{row['flop'] / spent / 1e9:,.0f}" if row["flop"] else ""]
        cells = f"{row['kernels']:,}", f"{1e3 * spent:,.2f}", f"{1e3 * row['least_seconds']:,.2f}"
        table.add_row(row["kind"], *cells, *(rates if spent else [""] * 4))
    if told["elsewhere_seconds"] is not None:
        table.add_row("of no kernel known", "", f"{1e3 * told['elsewhere_seconds']:,.2f}", *[""] * 5)
    return table


def draw(record: dict, path) -> None:
    """The roofline of these devices, and where the step is under it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    intensity = record["flop_an_image"] / record["bytes_an_image"]
    for (how, one), style in zip(record["ceilings"].items(), ("-", "--"), strict=False):
        ridge = one["flops"] / one["bytes_per_second"]
        places = [min(intensity, ridge) / 8, ridge, 8 * max(intensity, ridge)]
        heights = [min(one["flops"], place * one["bytes_per_second"]) / 1e9 for place in places]
        axes.plot(places, heights, color="#0072B2", linestyle=style, label=f"{how} ceilings")
    axes.plot([intensity], [record["flops"] / 1e9], "o", color="#D55E00", label=f"{record['images_per_second']:,.0f} images/s")
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte moved", ylabel="GFLOP/s")
    axes.set_title(f"{record['model']}\nbatch {record['batch']}, {record['device']}", fontsize="medium")
    axes.grid(True, which="major", color="#e6e6e6")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
