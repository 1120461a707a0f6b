"""`jaxdp bench scaling`: the training step on growing numbers of devices, and where its time goes that is not computation.

Exposed communication is the step with its reductions less the same step without them, the two alternated in one process.
Waiting is the time by which the slowest device's own part of the step (no reduction) ends after the others'.
"""

import dataclasses
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jaxdp.bench.provenance import VIRTUAL, provenance
from jaxdp.bench.stepper import Stepper, check_strategy, described, with_and_without
from jaxdp.config import Config, ConfigError
from jaxdp.parallel import measure
from jaxdp.parallel.mesh import choose_shape, make_mesh

MODES = ("strong", "weak")


def _waiting(stepper: Stepper, repeats: int) -> list[float]:
    """Mean over the devices of how long each would wait for the slowest, in seconds, once for each repetition."""
    waits = []
    with ThreadPoolExecutor(len(jax.local_devices())) as threads:
        for _ in range(repeats):
            jax.block_until_ready(stepper.state)
            began = time.perf_counter()
            _, metrics = stepper()

            def arrival(shard, began=began):
                shard.data.block_until_ready()
                return time.perf_counter() - began

            took = np.array(list(threads.map(arrival, metrics["loss"].addressable_shards)))
            if jax.process_count() > 1:
                from jax.experimental import multihost_utils

                took = np.asarray(multihost_utils.process_allgather(took)).ravel()
            waits.append(float(took.max() - took.mean()))
    return waits


def _measured(config: Config, mesh, global_batch: int, repeats: int) -> dict:
    began = time.perf_counter()
    steppers = with_and_without(config, mesh, global_batch, config.reduce.strategy)
    compile_seconds = time.perf_counter() - began
    seconds = measure.alternated(steppers, repeats)
    whole = statistics.median(seconds["with"])
    exposed = whole - statistics.median(seconds["without"]) if mesh.size > 1 else 0.0
    return {
        "devices": mesh.size,
        "mesh": list(mesh.devices.shape),
        "global_batch": global_batch,
        "step_seconds": whole,
        "fastest": min(seconds["with"]),
        "slowest": max(seconds["with"]),
        "without_reduction_seconds": statistics.median(seconds["without"]),
        "images_per_second": global_batch / whole,
        "exposed_communication_seconds": exposed,
        "waiting_seconds": statistics.median(_waiting(steppers["without"], repeats)),
        "compile_seconds": compile_seconds,
    }


def ladder(devices: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all devices."""
    return tuple(sorted({devices} | {2**power for power in range(devices.bit_length())}))


def check(config: Config, counts: tuple[int, ...], available: int, modes=MODES) -> None:
    """Raise ConfigError, naming what is wrong, for a ladder of devices that this config cannot climb here."""
    batch, per_worker = config.batch[0].global_batch, config.batch[0].per_worker_batch
    if not counts or list(counts) != sorted(set(counts)) or counts[0] < 1:
        raise ConfigError(f"--devices: {counts} is not allowed; give growing numbers of devices, for example 1 2 4 8")
    if counts[-1] > available:
        raise ConfigError(
            f"--devices: {counts[-1]} is not allowed; there are {available}; on a CPU give --mesh.cpu-devices {counts[-1]}"
        )
    for count in counts:
        vertical, horizontal = mesh_shape(config, counts, count)
        if vertical * horizontal != count:
            raise ConfigError(
                f"mesh: {vertical}x{horizontal} is not allowed with --devices {count}; it has {vertical * horizontal}; "
                "give a mesh of as many devices as the last of --devices, or none"
            )
        unit = count * (per_worker or 1)
        if batch % unit and ("strong" in modes or count == counts[-1]):
            raise ConfigError(
                f"batch.0.global_batch: {batch} is not allowed with --devices {count}; it must be a multiple of {unit}; "
                f"the nearest is {max(unit, round(batch / unit) * unit)}"
            )
        check_strategy(config, count, f"with --devices {count}")


def mesh_shape(config: Config, counts: tuple[int, ...], count: int) -> tuple[int, int]:
    """The sides that the config gives for the last number of devices, the most square shape for those before it."""
    sides = config.mesh if count == counts[-1] else dataclasses.replace(config.mesh, vertical=None, horizontal=None)
    return choose_shape(sides, count)


def run(config: Config, counts: tuple[int, ...], repeats: int = 7, progress=lambda text: None, modes=MODES) -> dict:
    """Strong scaling (the recipe's batch shared by all) and weak scaling (its share on the most devices, on each).

    The most square mesh of each number of devices, or the sides that the config gives for the last. See `check` for errors.
    """
    check(config, counts, jax.device_count(), modes)
    batch, most = config.batch[0].global_batch, counts[-1]
    done, rows = {}, []
    for mode in modes:
        for count in counts:
            global_batch = batch if mode == "strong" else batch // most * count
            mesh = make_mesh(*mesh_shape(config, counts, count))
            key = mesh.devices.shape, global_batch
            if key not in done:
                progress(f"{mode} scaling on {count} of {most} devices, {global_batch} images a step ...")
                done[key] = _measured(config, mesh, global_batch, repeats)
            rows.append({"mode": mode} | done[key])
    for row in rows:
        first = next(one for one in rows if one["mode"] == row["mode"])
        row["speed_up"] = row["images_per_second"] / first["images_per_second"]
        row["efficiency"] = row["speed_up"] / (row["devices"] / first["devices"])
    return {
        "provenance": provenance(),
        "config": config.name,
        "model": described(config),
        "strategy": config.reduce.strategy,
        "wire_dtype": config.reduce.wire_dtype,
        "device": jax.devices()[0].device_kind,
        "virtual": jax.devices()[0].platform == "cpu",
        "repeats": repeats,
        "rows": rows,
    }


def shown(record: dict):
    """A rich table for each mode, and what the figures are worth."""
    from rich.table import Table

    names = (
        "devices",
        "mesh",
        "images a step",
        "step",
        "images/s",
        "speed-up",
        "efficiency",
        "exposed communication",
        "waiting",
    )
    for mode in MODES:
        what = "the batch shared by all" if mode == "strong" else "the same batch on each"
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.title = f"{mode} scaling, {what}: {record['model']}, {record['strategy']} in {record['wire_dtype']}"
        for name in names:
            table.add_column(name, justify="right")
        for row in (one for one in record["rows"] if one["mode"] == mode):
            exposed, whole = row["exposed_communication_seconds"], row["step_seconds"]
            table.add_row(
                str(row["devices"]),
                "x".join(map(str, row["mesh"])),
                f"{row['global_batch']:,}",
                f"{1e3 * whole:.1f} ms",
                f"{row['images_per_second']:,.0f}",
                f"{row['speed_up']:.2f}",
                f"{100 * row['efficiency']:.0f} %",
                f"{1e3 * exposed:.1f} ms ({100 * exposed / whole:.0f} %)",
                f"{1e3 * row['waiting_seconds']:.1f} ms ({100 * row['waiting_seconds'] / whole:.0f} %)",
            )
        yield table
    if record["virtual"]:
        yield VIRTUAL


def draw(record: dict, path) -> None:
    """Speed-up beside the ideal, and what the step's time consists of, against devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    for mode, colour in zip(MODES, ("#0072B2", "#D55E00"), strict=True):
        rows = [row for row in record["rows"] if row["mode"] == mode]
        counts = [row["devices"] for row in rows]
        panels[0].plot(counts, [row["speed_up"] for row in rows], marker="o", color=colour, label=mode)
    panels[0].plot(counts, [count / counts[0] for count in counts], color="#999999", linestyle="--", label="ideal")
    panels[0].set(title="speed-up", xlabel="devices", xscale="log", yscale="log")
    panels[0].legend(frameon=False)
    for axes, mode in zip(panels[1:], MODES, strict=True):
        rows = [row for row in record["rows"] if row["mode"] == mode]
        places = range(len(rows))
        exposed = [1e3 * max(0.0, row["exposed_communication_seconds"]) for row in rows]
        own = [1e3 * row["step_seconds"] - one for row, one in zip(rows, exposed, strict=True)]
        axes.bar(places, own, color="#56B4E9", label="computation and waiting")
        axes.bar(places, exposed, bottom=own, color="#D55E00", label="exposed communication")
        axes.set(title=f"{mode} scaling: a step", xlabel="devices", ylabel="ms")
        axes.set_xticks(list(places), [str(row["devices"]) for row in rows])
        axes.set_ylim(top=1.25 * max(row["step_seconds"] for row in rows) * 1e3)
        axes.legend(frameon=False, fontsize="small", loc="upper left")
    panels[0].set_xticks(counts, [str(count) for count in counts])
    panels[0].set_yticks(counts, [str(count) for count in counts])
    panels[0].minorticks_off()
    figure.suptitle(
        f"{record['model']}, {record['strategy']}, {record['device']}"
        + (", parts of one CPU: no network" if record["virtual"] else ""),
        fontsize="medium",
    )
    figure.savefig(path, dpi=120)
