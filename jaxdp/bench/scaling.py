"""`jaxdp bench scaling`: the training step on growing numbers of devices, and the time that is not computation.

Exposed communication is the time of the step with its reductions less that of the same step without them, the two alternating.
Waiting is how long the devices wait on average for the slowest one in the step without reductions.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Table

from jaxdp.bench.environment import VIRTUAL_NOTE, provenance
from jaxdp.bench.step_runner import StepRunner, build_with_and_without, check_strategy, describe
from jaxdp.config import Config
from jaxdp.errors import ConfigError, plural
from jaxdp.parallel import timing
from jaxdp.parallel.mesh import choose_shape, make_mesh

MODES = ("strong", "weak")
COLUMNS = (
    "devices",
    "mesh",
    "images per step",
    "step",
    "images/s",
    "speed-up",
    "efficiency",
    "exposed communication",
    "waiting",
)


def _waiting_seconds(step: StepRunner, repeats: int) -> list[float]:
    """Mean time over the devices that each would wait for the slowest, for each of `repeats` steps."""
    waits = []
    with ThreadPoolExecutor(len(jax.local_devices())) as threads:
        for _ in range(repeats):
            jax.block_until_ready(step.state)
            began = time.perf_counter()
            _, metrics = step()

            def seconds_until_ready(shard: jax.Shard, began: float = began) -> float:
                shard.data.block_until_ready()
                return time.perf_counter() - began

            seconds = np.array(list(threads.map(seconds_until_ready, metrics["loss"].addressable_shards)))
            if jax.process_count() > 1:
                from jax.experimental import multihost_utils

                seconds = np.asarray(multihost_utils.process_allgather(seconds)).ravel()
            waits.append(float(seconds.max() - seconds.mean()))
    return waits


def _measure(config: Config, mesh: Mesh, *, global_batch: int, repeats: int) -> dict:
    began = time.perf_counter()
    steps = build_with_and_without(config, mesh, global_batch=global_batch, strategy=config.reduce.strategy)
    compile_seconds = time.perf_counter() - began
    seconds = timing.time_alternately(steps, repeats)
    step_seconds = statistics.median(seconds["with"])
    exposed = step_seconds - statistics.median(seconds["without"]) if mesh.size > 1 else 0.0
    return {
        "devices": mesh.size,
        "mesh": list(mesh.devices.shape),
        "global_batch": global_batch,
        "step_seconds": step_seconds,
        "fastest": min(seconds["with"]),
        "slowest": max(seconds["with"]),
        "without_reduction_seconds": statistics.median(seconds["without"]),
        "images_per_second": global_batch / step_seconds,
        "exposed_communication_seconds": exposed,
        "waiting_seconds": statistics.median(_waiting_seconds(steps["without"], repeats)),
        "compile_seconds": compile_seconds,
    }


def device_counts(devices: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all devices."""
    return tuple(sorted({devices} | {2**power for power in range(devices.bit_length())}))


def check(config: Config, counts: Sequence[int], *, available: int, modes: Sequence[str] = MODES) -> None:
    """Raise ConfigError for numbers of devices on which the step of the config cannot be timed. available: devices."""
    batch, per_worker = config.batch[0].global_batch, config.batch[0].per_worker_batch
    if not counts or list(counts) != sorted(set(counts)) or counts[0] < 1:
        raise ConfigError("--devices", counts, reason="must be growing numbers of devices", hint="for example 1 2 4 8")
    if counts[-1] > available:
        hint = f"on a CPU give --mesh.cpu-devices {counts[-1]}"
        raise ConfigError("--devices", counts[-1], reason=f"only {available} available", hint=hint)
    for count in counts:
        vertical, horizontal = mesh_shape(config, counts, count)
        if vertical * horizontal != count:
            raise ConfigError(
                "mesh",
                f"{vertical}x{horizontal}",
                reason=f"has {plural(vertical * horizontal, 'device')}, not {count}",
                hint="give a mesh of as many devices as the last of --devices, or none",
            )
        unit = count * (per_worker or 1)
        if batch % unit and ("strong" in modes or count == counts[-1]):
            nearest = max(unit, round(batch / unit) * unit)
            reason = f"must be a multiple of {unit} for --devices {count}"
            raise ConfigError("batch.0.global_batch", batch, reason=reason, hint=f"the nearest is {nearest}")
        check_strategy(config, count)


def mesh_shape(config: Config, counts: Sequence[int], count: int) -> tuple[int, int]:
    """(vertical, horizontal): the config's sides for the last number of devices, the default shape for the others."""
    sides = config.mesh if count == counts[-1] else dataclasses.replace(config.mesh, vertical=None, horizontal=None)
    return choose_shape(sides, count)


def run(
    config: Config,
    counts: Sequence[int],
    *,
    repeats: int = 7,
    progress: Callable[[str], None] = lambda text: None,
    modes: Sequence[str] = MODES,
) -> dict:
    """Strong scaling (the recipe's global batch on every number of devices) and weak scaling (a constant batch per device).

    Raises ConfigError; see `check`.
    """
    check(config, counts, available=jax.device_count(), modes=modes)
    batch, most = config.batch[0].global_batch, counts[-1]
    measured: dict[tuple, dict] = {}
    rows = []
    for mode in modes:
        for count in counts:
            global_batch = batch if mode == "strong" else batch // most * count
            mesh = make_mesh(*mesh_shape(config, counts, count))
            key = mesh.devices.shape, global_batch
            if key not in measured:
                progress(f"{mode} scaling on {count} of {plural(most, 'device')}, {plural(global_batch, 'image')} per step ...")
                measured[key] = _measure(config, mesh, global_batch=global_batch, repeats=repeats)
            rows.append({"mode": mode} | measured[key])
    for row in rows:
        first = next(other for other in rows if other["mode"] == row["mode"])
        row["speed_up"] = row["images_per_second"] / first["images_per_second"]
        row["efficiency"] = row["speed_up"] / (row["devices"] / first["devices"])
    return {
        "provenance": provenance(),
        "config": config.name,
        "model": describe(config),
        "strategy": config.reduce.strategy,
        "wire_dtype": config.reduce.wire_dtype,
        "device": jax.devices()[0].device_kind,
        "virtual": jax.devices()[0].platform == "cpu",
        "repeats": repeats,
        "rows": rows,
    }


def render(record: dict) -> Iterator[Table | str]:
    """A table for each mode, and a note if the devices are virtual."""
    for mode in MODES:
        batch = "constant global batch" if mode == "strong" else "constant batch per device"
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.title = f"{mode} scaling, {batch}: {record['model']}, {record['strategy']} in {record['wire_dtype']}"
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for row in (row for row in record["rows"] if row["mode"] == mode):
            exposed, total = row["exposed_communication_seconds"], row["step_seconds"]
            table.add_row(
                str(row["devices"]),
                "x".join(map(str, row["mesh"])),
                f"{row['global_batch']:,}",
                f"{1e3 * total:.1f} ms",
                f"{row['images_per_second']:,.0f}",
                f"{row['speed_up']:.2f}",
                f"{100 * row['efficiency']:.0f} %",
                f"{1e3 * exposed:.1f} ms ({100 * exposed / total:.0f} %)",
                f"{1e3 * row['waiting_seconds']:.1f} ms ({100 * row['waiting_seconds'] / total:.0f} %)",
            )
        yield table
    if record["virtual"]:
        yield VIRTUAL_NOTE


def draw(record: dict, path: str | Path) -> None:
    """Plot speed-up with the ideal, and the components of the step's time, against the number of devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    for mode, color in zip(MODES, ("#0072B2", "#D55E00"), strict=True):
        rows = [row for row in record["rows"] if row["mode"] == mode]
        counts = [row["devices"] for row in rows]
        panels[0].plot(counts, [row["speed_up"] for row in rows], marker="o", color=color, label=mode)
    panels[0].plot(counts, [count / counts[0] for count in counts], color="#999999", linestyle="--", label="ideal")
    panels[0].set(title="speed-up", xlabel="devices", xscale="log", yscale="log")
    panels[0].legend(frameon=False)
    for axes, mode in zip(panels[1:], MODES, strict=True):
        rows = [row for row in record["rows"] if row["mode"] == mode]
        ticks = range(len(rows))
        exposed = [1e3 * max(0.0, row["exposed_communication_seconds"]) for row in rows]
        rest = [1e3 * row["step_seconds"] - milliseconds for row, milliseconds in zip(rows, exposed, strict=True)]
        axes.bar(ticks, rest, color="#56B4E9", label="computation and waiting")
        axes.bar(ticks, exposed, bottom=rest, color="#D55E00", label="exposed communication")
        axes.set(title=f"{mode} scaling: step time", xlabel="devices", ylabel="ms")
        axes.set_xticks(list(ticks), [str(row["devices"]) for row in rows])
        axes.set_ylim(top=1.25 * max(row["step_seconds"] for row in rows) * 1e3)
        axes.legend(frameon=False, fontsize="small", loc="upper left")
    panels[0].set_xticks(counts, [str(count) for count in counts])
    panels[0].set_yticks(counts, [str(count) for count in counts])
    panels[0].minorticks_off()
    figure.suptitle(
        f"{record['model']}, {record['strategy']}, {record['device']}"
        + (", virtual devices of one CPU: no network" if record["virtual"] else ""),
        fontsize="medium",
    )
    figure.savefig(path, dpi=120)
