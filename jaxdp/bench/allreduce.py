"""`jaxdp bench allreduce`: time of every strategy by message size and dtype on a mesh, and a recommendation."""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.table import Table
from scipy.optimize import nnls

from jaxdp.analysis import network_model
from jaxdp.analysis.tables import table_of
from jaxdp.bench.environment import VIRTUAL_NOTE, provenance
from jaxdp.config import Config
from jaxdp.parallel import allreduce, timing
from jaxdp.strategies import STRATEGIES, unsupported_reason


def fit(points: Sequence[tuple[int, float]], strategy: str, mesh_shape: tuple[int, int]) -> dict[str, float | None]:
    """{"latency" (seconds), "bandwidth" (bytes per second)} of the cost model, by least squares over (bytes, seconds).

    Each candidate algorithm of the strategy is fitted; the fit with which the model, which uses the fastest algorithm, has the
    smallest residual is kept. Errors are relative to the measured times, so that small messages weigh as much as large ones. A
    parameter whose best value would be negative is left out of the fit: latency 0, or bandwidth None.
    """
    costs = network_model.cost_terms(strategy, *mesh_shape)
    designs = np.array([[(cost.rounds / seconds, cost.volume * size / seconds) for size, seconds in points] for cost in costs])
    fits = [_non_negative(design) for design in designs]
    latency, inverse_bandwidth = min(fits, key=lambda values: float(np.sum(((designs @ values).min(0) - 1) ** 2)))
    return {"latency": float(latency), "bandwidth": float(1 / inverse_bandwidth) if inverse_bandwidth > 0 else None}


def _non_negative(design: np.ndarray) -> np.ndarray:
    """The values [2] >= 0 that bring design [points, 2] @ values closest to 1."""
    scale = np.linalg.norm(design, axis=0)  # seconds per round and per byte differ by nine orders
    scale[scale == 0] = 1.0
    values, _ = nnls(design / scale, np.ones(len(design)))
    return values / scale


def run(
    config: Config,
    mesh: Mesh,
    gradient: Any,
    *,
    sizes: Sequence[int],
    dtypes: Sequence[str],
    repeats: int,
) -> dict:
    """Time every strategy for messages of each size and dtype, and for `gradient` in the messages of a run.

    gradient: a tree of shapes; sizes: bytes on the wire. Calls of the same size alternate; compilation is excluded. Every
    result is compared with the exact sum of integers, outside the timed interval; `wrong_calls` counts differences.
    """
    names = [name for name, one in STRATEGIES.items() if one.cost and not unsupported_reason(name, mesh.size)]
    rows = [
        row
        for dtype in dtypes
        for size in sizes
        for row in _time_message(
            config, mesh, names, elements=max(1, size // jnp.dtype(dtype).itemsize), dtype=dtype, repeats=repeats
        )
    ]
    reduce = config.reduce
    reduction = partial(timing.Reduction, mesh, gradient, wire_dtype=allreduce.wire_dtype_of(reduce), config=config)
    calls = {name: reduction(name, bucket_bytes=reduce.bucket_bytes) for name in names}
    times, wrong_calls = timing.time_reductions(calls, repeats)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    inexact = {name for name, count in wrong_calls.items() if count} | {row["strategy"] for row in rows if row["wrong_calls"]}
    return {
        "provenance": provenance(),
        "mesh": list(mesh.devices.shape),
        "device": mesh.devices.flat[0].device_kind,
        "virtual": mesh.devices.flat[0].platform == "cpu",
        "repeats": repeats,
        "rows": rows,
        "fits": _fits(rows, names, mesh),
        "gradient": {
            "bytes": sum(leaf.size for leaf in jax.tree.leaves(gradient)) * jnp.dtype(reduce.wire_dtype).itemsize,
            "wire_dtype": reduce.wire_dtype,
            "bucket_bytes": reduce.bucket_bytes,
            "seconds": medians,
            "wrong_calls": wrong_calls,
        },
        "wrong_sums": sorted(inexact),
        "recommended": min((name for name in medians if name not in inexact), key=medians.__getitem__, default=None),
    }


def _time_message(
    config: Config, mesh: Mesh, names: Sequence[str], *, elements: int, dtype: str, repeats: int
) -> Iterator[dict]:
    """A row for each strategy; small messages are sent several times in a call."""
    size = elements * jnp.dtype(dtype).itemsize
    repetitions = max(1, min(20, 1_048_576 // size))
    vector = jax.ShapeDtypeStruct((elements,), jnp.dtype(dtype))
    reduction = partial(timing.Reduction, mesh, vector, bucket_bytes=None, repetitions=repetitions, config=config)
    calls = {name: reduction(name) for name in names}
    times, wrong_calls = timing.time_reductions(calls, repeats)
    for name, seconds in times.items():
        each = sorted(second / repetitions for second in seconds)
        yield {
            "strategy": name,
            "dtype": dtype,
            "bytes": size,
            "seconds": statistics.median(each),
            "fastest": each[0],
            "slowest": each[-1],
            "wrong_calls": wrong_calls[name],
        }


def _fits(rows: Sequence[dict], names: Sequence[str], mesh: Mesh) -> dict[str, dict[str, dict]]:
    """dtype -> strategy -> `fit`; empty for a single device."""
    fits: dict[str, dict[str, dict]] = {}
    for dtype in dict.fromkeys(row["dtype"] for row in rows) if mesh.size > 1 else ():
        for name in names:
            points = [(row["bytes"], row["seconds"]) for row in rows if (row["strategy"], row["dtype"]) == (name, dtype)]
            fits.setdefault(dtype, {})[name] = fit(points, name, mesh.devices.shape)
    return fits


def advice(record: dict) -> str:
    """One line: the strategy to use for this gradient on this mesh, and its lead."""
    seconds, best = record["gradient"]["seconds"], record["recommended"]
    if best is None:
        return "Every strategy returns wrong sums on these devices: do not train on them."
    seconds = {name: each for name, each in seconds.items() if name not in record["wrong_sums"] or name == "psum"}
    ranked = sorted(seconds, key=seconds.__getitem__)
    lead = seconds[ranked[1]] / seconds[best] if len(ranked) > 1 else 1.0
    gradient = f"For this recipe's gradient ({record['gradient']['bytes']:,} bytes, {record['gradient']['wire_dtype']}): "
    if best == "psum":
        return f"{gradient}psum is fastest, {lead:.2f} times as fast as {ranked[1]}. --reduce.strategy psum"
    return f"{gradient}{best} is fastest, {seconds['psum'] / seconds[best]:.2f} times as fast as psum. --reduce.strategy {best}"


def wrong_sums(record: dict) -> str:
    """One line: the strategies that returned wrong sums, their messages, and how often."""
    calls = record["repeats"] + 1
    cases = [
        f"{row['strategy']}, {row['dtype']}, {row['bytes']:,} B: {row['wrong_calls']} of {calls} calls"
        for row in record["rows"]
        if row["wrong_calls"]
    ]
    cases += [
        f"{name}, full gradient: {count} of {calls} calls" for name, count in record["gradient"]["wrong_calls"].items() if count
    ]
    return f"WRONG SUMS: {'; '.join(cases)}. Do not train with {', '.join(record['wrong_sums'])} on these devices."


def render(record: dict) -> Iterator[Table | str]:
    """A table of medians with fitted latency and bandwidth for each dtype, one for the full gradient, and the advice."""
    vertical, horizontal = record["mesh"]
    sizes = sorted({row["bytes"] for row in record["rows"]})
    for dtype, fits in record["fits"].items():
        rows = []
        for strategy, fitted in fits.items():
            cells = {r["bytes"]: r for r in record["rows"] if (r["strategy"], r["dtype"]) == (strategy, dtype)}
            bandwidth = "-" if fitted["bandwidth"] is None else f"{fitted['bandwidth'] / 1e9:.2f} GB/s"
            medians = [f"{1e3 * cells[size]['seconds']:.3f}" for size in sizes]
            rows.append((strategy, *medians, f"{1e6 * fitted['latency']:.1f} us", bandwidth))
        title = f"all-reduce of {dtype} on {vertical}x{horizontal} {record['device']}, median milliseconds"
        columns = ("strategy", *(f"{size:,} B" for size in sizes), "latency", "bandwidth")
        yield table_of(title, columns, rows, left=("strategy",))
    bucket_bytes = record["gradient"]["bucket_bytes"]
    messages = "one message" if bucket_bytes is None else f"messages of {bucket_bytes:,} bytes and more"
    timed = sorted(record["gradient"]["seconds"].items(), key=lambda item: item[1])
    rows = [(name, f"{1e3 * seconds:.3f}") for name, seconds in timed]
    yield table_of(f"full gradient in {messages}", ("strategy", "milliseconds"), rows, left=("strategy",))
    if record["wrong_sums"]:
        yield wrong_sums(record)
    yield advice(record)
    if record["virtual"]:
        yield VIRTUAL_NOTE
