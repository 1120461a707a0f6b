"""`jaxdp bench allreduce`: every strategy, message size and dtype on the mesh at hand, and which one to take."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.bench.provenance import VIRTUAL, provenance
from jaxdp.config import Config
from jaxdp.parallel import allreduce, cost_model, measure
from jaxdp.parallel.mesh import unfit

SIZES = (16_384, 262_144, 4_194_304, 67_108_864)
DTYPES = ("float32", "bfloat16")
COLOURS = {"psum": "#000000", "ring": "#D55E00", "hierarchical": "#E69F00", "torus": "#0072B2", "parameter_server": "#CC79A7"}


def fit(points: list[tuple[int, float]], strategy: str, vertical: int, horizontal: int) -> dict:
    """Latency (seconds) and bandwidth (bytes a second) of the model for measured (bytes, seconds), by least squares.

    Errors count as shares of the measured times, so that small messages weigh as much as large ones. Neither is negative: one
    that would be is left out of the fit (0, or None for a bandwidth that cannot be told).
    """
    (rounds, volume), *_ = cost_model.terms(strategy, vertical, horizontal)
    design = np.array([[rounds / seconds, volume * size / seconds] for size, seconds in points])
    columns = [0, 1]
    while columns:
        values, *_ = np.linalg.lstsq(design[:, columns], np.ones(len(points)), rcond=None)
        if (values >= 0).all():
            break
        columns.pop(int(np.argmin(values)))
    found = dict.fromkeys((0, 1), 0.0) | dict(zip(columns, map(float, values), strict=True))
    return {"latency": found[0], "bandwidth": 1 / found[1] if found[1] > 0 else None}


def run(config: Config, mesh, gradient, sizes=SIZES, dtypes=DTYPES, repeats: int = 9) -> dict:
    """Median seconds of every strategy for one message of each size and dtype, and for `gradient` as a run would send it.

    gradient: a tree of shapes. sizes: bytes on the wire. The calls of one size alternate in one process; compilation is apart.
    """
    vertical, horizontal = mesh.devices.shape
    names = [name for name in allreduce.STRATEGIES if not unfit(name, mesh.size)]
    rows = []
    for dtype in dtypes:
        for size in sizes:
            elements = max(1, size // jnp.dtype(dtype).itemsize)
            vector = jax.ShapeDtypeStruct((elements,), jnp.dtype(dtype))
            times = max(1, min(20, 1_048_576 // size))
            calls = {name: measure.reduction(mesh, vector, name, None, None, times, config.compile) for name in names}
            for name, seconds in measure.alternated(calls, repeats).items():
                each = sorted(second / times for second in seconds)
                rows.append(
                    {
                        "strategy": name,
                        "dtype": dtype,
                        "bytes": elements * jnp.dtype(dtype).itemsize,
                        "seconds": statistics.median(each),
                        "fastest": each[0],
                        "slowest": each[-1],
                    }
                )
    reduce = config.reduce
    wire = None if reduce.wire_dtype == "float32" else jnp.dtype(reduce.wire_dtype)
    calls = {name: measure.reduction(mesh, gradient, name, wire, reduce.bucket_bytes, compile=config.compile) for name in names}
    whole = {name: statistics.median(seconds) for name, seconds in measure.alternated(calls, repeats).items()}
    width = jnp.dtype(reduce.wire_dtype).itemsize
    return {
        "provenance": provenance(),
        "mesh": [vertical, horizontal],
        "device": mesh.devices.flat[0].device_kind,
        "virtual": mesh.devices.flat[0].platform == "cpu",
        "repeats": repeats,
        "rows": rows,
        "fits": {
            dtype: {
                name: fit(
                    [(r["bytes"], r["seconds"]) for r in rows if (r["strategy"], r["dtype"]) == (name, dtype)],
                    name,
                    vertical,
                    horizontal,
                )
                for name in names
            }
            for dtype in dtypes
            if mesh.size > 1
        },
        "gradient": {
            "bytes": sum(leaf.size for leaf in jax.tree.leaves(gradient)) * width,
            "wire_dtype": reduce.wire_dtype,
            "bucket_bytes": reduce.bucket_bytes,
            "seconds": whole,
        },
        "recommended": min(whole, key=whole.get),
    }


def advice(record: dict) -> str:
    """What to take on this mesh for this gradient, and by how much."""
    seconds, best = record["gradient"]["seconds"], record["recommended"]
    ranked = sorted(seconds, key=seconds.get)
    ahead = seconds[ranked[1]] / seconds[best] if len(ranked) > 1 else 1.0
    against = seconds["psum"] / seconds[best]
    start = f"For this recipe's gradient ({record['gradient']['bytes']:,} bytes, {record['gradient']['wire_dtype']}): "
    if best == "psum":
        return f"{start}plain psum wins, {ahead:.2f} times as fast as {ranked[1]}. --reduce.strategy psum"
    return f"{start}{best} is fastest, {against:.2f} times as fast as psum. --reduce.strategy {best}"


def shown(record: dict):
    """For each dtype a rich table of medians with the fitted latency and bandwidth, one of the whole gradient, the advice."""
    from rich.table import Table

    vertical, horizontal = record["mesh"]
    sizes = sorted({row["bytes"] for row in record["rows"]})
    for dtype, fits in record["fits"].items():
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.title = f"all-reduce of {dtype} on {vertical}x{horizontal} {record['device']}, median milliseconds"
        table.add_column("strategy")
        for name in (*(f"{size:,} B" for size in sizes), "latency", "bandwidth"):
            table.add_column(name, justify="right")
        for strategy, fitted in fits.items():
            cells = {r["bytes"]: r for r in record["rows"] if (r["strategy"], r["dtype"]) == (strategy, dtype)}
            bandwidth = "-" if fitted["bandwidth"] is None else f"{fitted['bandwidth'] / 1e9:.2f} GB/s"
            medians = [f"{1e3 * cells[size]['seconds']:.3f}" for size in sizes]
            table.add_row(strategy, *medians, f"{1e6 * fitted['latency']:.1f} us", bandwidth)
        yield table
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.title = f"the whole gradient in messages of {record['gradient']['bucket_bytes'] or 'any number of'} bytes and more"
    table.add_column("strategy")
    table.add_column("milliseconds", justify="right")
    for name, seconds in sorted(record["gradient"]["seconds"].items(), key=lambda item: item[1]):
        table.add_row(name, f"{1e3 * seconds:.3f}")
    yield table
    yield advice(record)
    if record["virtual"]:
        yield VIRTUAL


def draw(record: dict, path) -> None:
    """Median seconds against message size, one panel a dtype."""
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(row["dtype"] for row in record["rows"]))
    figure = Figure(figsize=(5.2 * len(dtypes), 4), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(dtypes), sharey=True))
    for axes, dtype in zip(panels, dtypes, strict=True):
        for strategy in dict.fromkeys(row["strategy"] for row in record["rows"]):
            mine = [row for row in record["rows"] if (row["strategy"], row["dtype"]) == (strategy, dtype)]
            low = [row["seconds"] - row["fastest"] for row in mine]
            high = [row["slowest"] - row["seconds"] for row in mine]
            axes.errorbar(
                [row["bytes"] for row in mine],
                [row["seconds"] for row in mine],
                [low, high],
                marker="o",
                markersize=3,
                capsize=2,
                color=COLOURS[strategy],
                label=strategy,
            )
        axes.set(xscale="log", yscale="log", xlabel="bytes", title=dtype)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("seconds (median; fastest to slowest)")
    panels[0].legend(frameon=False, fontsize="small")
    figure.suptitle(
        f"All-reduce on {record['mesh'][0]}x{record['mesh'][1]} {record['device']}"
        + (", parts of one CPU: no network" if record["virtual"] else ""),
        fontsize="medium",
    )
    figure.savefig(path, dpi=120)
