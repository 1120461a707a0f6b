"""`jaxdp bench scaling`: the training step on growing numbers of devices, and the time that is not computation.

Exposed communication is the time of a step with its reductions less the time of the same step without them. The two alternate;
the result is the median of the differences, with its confidence interval. Where it includes 0, steps vary by more than
communication costs.
Waiting is how long the devices wait on average for the slowest one in the step without reductions.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Table
from scipy.stats import quantile_test

from jaxdp.analysis.tables import table_of
from jaxdp.bench.environment import VIRTUAL_NOTE, provenance
from jaxdp.bench.step_runner import StepRunner, build_with_and_without, check_strategy, describe
from jaxdp.config import Config
from jaxdp.errors import ConfigError, plural
from jaxdp.parallel import timing
from jaxdp.parallel.mesh import choose_shape, make_mesh

MODES = {"strong": "constant global batch", "weak": "constant batch per device"}
COLUMNS = (
    "devices",
    "mesh",
    "images per step",
    "step",
    "images/s",
    "speed-up",
    "efficiency",
    "exposed communication (interval)",
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


def interval_of_median(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The interval between two of the values that holds the median of their distribution with at least this probability,
    whatever the distribution is; for fewer than six values, from the smallest to the largest."""
    interval = quantile_test(values, p=0.5).confidence_interval(confidence)
    found = float(interval.low), float(interval.high)
    return (min(values), max(values)) if any(map(math.isnan, found)) else found


def exposed_words(row: dict) -> str:
    """The exposed communication of a row with its interval, in milliseconds."""
    exposed, interval = row["exposed_communication_seconds"], row.get("exposed_communication_interval")
    words = f"{1e3 * exposed:.1f} ms"
    return words if interval is None else f"{words} ({1e3 * interval[0]:.1f} to {1e3 * interval[1]:.1f})"


def _measure(config: Config, mesh: Mesh, *, global_batch: int, repeats: int) -> dict:
    began = time.perf_counter()
    steps = build_with_and_without(config, mesh, global_batch=global_batch, strategy=config.reduce.strategy)
    compile_seconds = time.perf_counter() - began
    seconds = timing.time_alternately(steps, repeats)
    step_seconds = statistics.median(seconds["with"])
    differences = [0.0]
    if mesh.size > 1:
        differences = [with_it - without for with_it, without in zip(seconds["with"], seconds["without"], strict=True)]
    return {
        "devices": mesh.size,
        "mesh": list(mesh.devices.shape),
        "global_batch": global_batch,
        "step_seconds": step_seconds,
        "fastest": min(seconds["with"]),
        "slowest": max(seconds["with"]),
        "without_reduction_seconds": statistics.median(seconds["without"]),
        "images_per_second": global_batch / step_seconds,
        "exposed_communication_seconds": statistics.median(differences),
        "exposed_communication_interval": list(interval_of_median(differences)) if mesh.size > 1 else None,
        "waiting_seconds": statistics.median(_waiting_seconds(steps["without"], repeats)),
        "compile_seconds": compile_seconds,
    }


def check(config: Config, counts: Sequence[int], *, available: int) -> None:
    """Raise ConfigError for numbers of devices that cannot run the step of the config. available: devices."""
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
        if batch % unit:
            nearest = max(unit, round(batch / unit) * unit)
            reason = f"must be a multiple of {unit} for --devices {count}"
            raise ConfigError("batch.0.global_batch", batch, reason=reason, hint=f"the nearest is {nearest}")
        check_strategy(config, count)


def mesh_shape(config: Config, counts: Sequence[int], count: int) -> tuple[int, int]:
    """(vertical, horizontal): the config's sides for the last number of devices, else the default shape."""
    sides = config.mesh if count == counts[-1] else dataclasses.replace(config.mesh, vertical=None, horizontal=None)
    return choose_shape(sides, count)


def run(
    config: Config,
    counts: Sequence[int],
    *,
    repeats: int = 7,
    progress: Callable[[str], None] = lambda text: None,
) -> dict:
    """Strong scaling (the recipe's global batch on every number of devices) and weak scaling (a constant batch per device).

    progress: receives a line before and after each measurement. An interrupt after the first measurement ends the benchmark:
    "stopped" of the record is then true, and "rows" are those measured so far. Raises ConfigError; see `check`.
    """
    check(config, counts, available=jax.device_count())
    batch, most = config.batch[0].global_batch, counts[-1]
    measured: dict[tuple, dict] = {}
    rows: list[dict] = []
    stopped = False
    try:
        for number, (mode, count) in enumerate(itertools.product(MODES, counts), 1):
            global_batch = batch if mode == "strong" else batch // most * count
            mesh = make_mesh(*mesh_shape(config, counts, count))
            key = mesh.devices.shape, global_batch
            if key not in measured:
                part = f"{number} of {len(MODES) * len(counts)}: {mode} scaling on {count} of {plural(most, 'device')}"
                progress(f"{part}, {plural(global_batch, 'image')} per step ...")
                measured[key] = _measure(config, mesh, global_batch=global_batch, repeats=repeats)
                progress(f"{part}: {1e3 * measured[key]['step_seconds']:.1f} ms per step")
            rows.append({"mode": mode} | measured[key])
    except KeyboardInterrupt:
        if not rows:
            raise
        stopped = True
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
        "stopped": stopped,
        "rows": rows,
    }


def _cells(row: dict) -> tuple[str, ...]:
    """The texts of a row, by `COLUMNS`."""
    total = row["step_seconds"]
    return (
        str(row["devices"]),
        "x".join(map(str, row["mesh"])),
        f"{row['global_batch']:,}",
        f"{1e3 * total:.1f} ms",
        f"{row['images_per_second']:,.0f}",
        f"{row['speed_up']:.2f}",
        f"{100 * row['efficiency']:.0f} %",
        exposed_words(row),
        f"{1e3 * row['waiting_seconds']:.1f} ms ({100 * row['waiting_seconds'] / total:.0f} %)",
    )


def render(record: dict) -> Iterator[Table | str]:
    """A table for each mode, and notes on the intervals, and if the devices are virtual."""
    for mode in dict.fromkeys(row["mode"] for row in record["rows"]):
        title = f"{mode} scaling, {MODES[mode]}: {record['model']}, {record['strategy']} in {record['wire_dtype']}"
        rows = [_cells(row) for row in record["rows"] if row["mode"] == mode]
        yield table_of(title, COLUMNS, rows, left=())
    if any((interval := row.get("exposed_communication_interval")) and interval[0] <= 0 for row in record["rows"]):
        yield "If an interval includes 0, steps vary by more than communication costs: raise --repeats, or end other programs."
    if record["virtual"]:
        yield VIRTUAL_NOTE
