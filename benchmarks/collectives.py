"""Exactness of collectives over several CPU processes: sums of integers, which float32 represents exactly, compared bit by bit.

    python benchmarks/collectives.py [--only torus ...] [--layouts 2x1 2x2] [--sizes 524288 ...] [--calls 20] [--sessions 3]

On CPUs with `jax.distributed`, gloo runs the collectives, even between devices of one process. Every session starts new
processes (layout: processes x devices of each) and calls every collective with messages of every size. A call is wrong if one
element on one device differs from the sum. In addition to the strategies, the torus runs with both forms of its
reduce-scatter: with JAX 0.10 `lax.psum_scatter` is wrong (https://github.com/jax-ml/jax/issues/40830). The forms alternate call
by call. Adds to benchmarks/results/collectives_JAX.json.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from statistics import median

from common import ROOT, arguments, made_on, markdown, read, write
from helpers.object_storage import free_port

LAYOUTS = ["1x8", "2x1", "2x2", "4x1", "2x4"]
SIZES = [65_536, 524_288, 2_097_152, 8_388_608, 25_165_824, 104_857_600]
MOST_BYTES = 2 * 2**30  # largest call, over all devices, that a session repeats


def forms():
    """By name: a function from each device's vector to the sum over all devices, called inside `shard_map`."""
    import jax.numpy as jnp
    from jax import lax

    from jaxdp.parallel import allreduce, reduce_scatter
    from jaxdp.parallel.mesh import HORIZONTAL, VERTICAL
    from jaxdp.strategies import STRATEGIES

    def scattered(scatter):
        def reduce(vector):
            shard = scatter(jnp.pad(vector, (0, -vector.size % lax.axis_size(HORIZONTAL))))
            whole = lax.all_gather(lax.psum(shard, VERTICAL), HORIZONTAL, tiled=True, to="invarying")
            return whole[: vector.size]

        return reduce

    def strategy(name):
        return lambda vector: allreduce.all_reduce_sum([vector], name, bucket_bytes=None)[0]

    scatters = {"psum_scatter": reduce_scatter.psum_scatter, "all-to-all and sum": reduce_scatter.all_to_all_sum}
    of_torus = {f"torus with {name}": scattered(scatter) for name, scatter in scatters.items()}
    return of_torus | {name: strategy(name) for name in STRATEGIES}


def member(rank: int, processes: int, devices: int, port: int, names: list[str], sizes: list[int], calls: int) -> None:
    """One process of a session. Rank 0 prints a line a form and size: JSON with calls, wrong calls and median seconds."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxdp.parallel.mesh import AXES, make_mesh, most_square

    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"localhost:{port}", processes, rank)
    count, wanted = processes * devices, {name: forms()[name] for name in names}
    for vertical in sorted({1, processes, most_square(count)[0], count // 2}):
        mesh = make_mesh(vertical, count // vertical)
        for size in sizes:
            elements = size // 4 + 3  # not a multiple of the devices
            largest = 2**24 // (count * (count + 1) // 2 + 8 * count)
            pattern = np.random.default_rng(size).integers(1, largest, elements).astype(np.int64)
            row = jnp.asarray(pattern.astype(np.float32))
            everywhere = NamedSharding(mesh, PartitionSpec())
            shared = jax.make_array_from_process_local_data(everywhere, np.asarray(row))
            first, programs = jax.make_array_from_process_local_data(everywhere, np.int32(0)), {}
            for name, reduce in wanted.items():

                def call(row, turn, reduce=reduce):
                    return reduce(row * (1 + lax.axis_index(AXES) + turn).astype(row.dtype))[None]

                specs = {"in_specs": (PartitionSpec(), PartitionSpec()), "out_specs": PartitionSpec(AXES), "check_vma": False}
                programs[name] = jax.jit(jax.shard_map(call, mesh=mesh, **specs)).lower(shared, first).compile()
            multihost_utils.sync_global_devices("compiled")  # gloo waits 30 s for a process that comes late
            times = max(1, min(calls, MOST_BYTES // (size * count)))
            wrong, seconds = dict.fromkeys(names, 0), {name: [] for name in names}
            for turn in range(times):
                number = jax.make_array_from_process_local_data(everywhere, np.int32(turn % 8))
                expected = pattern * sum(1 + device + turn % 8 for device in range(count))
                for name, program in programs.items():
                    began = time.perf_counter()
                    out = jax.block_until_ready(program(shared, number))
                    seconds[name].append(time.perf_counter() - began)
                    wrong[name] += any((np.asarray(shard.data)[0] != expected).any() for shard in out.addressable_shards)
                    del out
            worst = np.max(multihost_utils.process_allgather(np.array(list(wrong.values()))).reshape(-1, len(names)), axis=0)
            for name, count_wrong in zip(names, worst, strict=True):
                if rank == 0:  # the first call connects
                    line = {"form": name, "mesh": [vertical, count // vertical], "bytes": size, "calls": times}
                    timed = sorted(seconds[name][1:] or seconds[name])
                    line |= {"wrong": int(count_wrong), "seconds": timed[len(timed) // 2]}
                    print(json.dumps(line), flush=True)


def session(layout: str, names, sizes, calls: int) -> list[dict]:
    """All forms and sizes in new processes."""
    processes, devices = map(int, layout.split("x"))
    port = free_port()
    flags = ["--sizes", *map(str, sizes), "--calls", str(calls), "--only", *names]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--member", f"{rank},{processes},{devices},{port}", *flags],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank in range(processes)
    ]
    printed = running[0].communicate()[0]
    if any(one.wait() for one in running):
        raise SystemExit(f"a process of the session {layout} failed")
    return [json.loads(line) | {"layout": layout} for line in printed.splitlines() if line.startswith("{")]


def counts_table(records: list[dict], *below: str) -> str:
    """Wrong calls by form and layout, from records of several versions of JAX."""
    layouts = [layout for layout in LAYOUTS if any(row["layout"] == layout for record in records for row in record["rows"])]
    rows = []
    for record in records:
        for form in dict.fromkeys(row["form"] for row in record["rows"]):
            cells = []
            for layout in layouts:
                mine = [row for row in record["rows"] if (row["form"], row["layout"]) == (form, layout)]
                cells.append(f"{sum(row['wrong'] for row in mine):,} of {sum(row['calls'] for row in mine):,}" if mine else "")
            rows.append((form, record["provenance"]["versions"]["jax"], *cells))
    return markdown(("collective", "JAX", *layouts), rows, *below)


def speed_table(record: dict) -> str:
    """Time of the torus with each form of its reduce-scatter, relative to the form in use."""
    used = "torus with all-to-all and sum"
    seconds = {}
    for row in record["rows"]:
        if row["form"].startswith("torus with") and row["mesh"][1] > 1 and row["layout"] != "1x8":
            place = seconds.setdefault(row["form"], {}).setdefault(row["bytes"], {})
            place.setdefault((row["layout"], *row["mesh"]), []).append(row["seconds"])
    rows = []
    for form, sizes in seconds.items():
        ratios = [
            median(median(taken) / median(seconds[used][size][place]) for place, taken in places.items())
            for size, places in sizes.items()
        ]
        rows.append((form.removeprefix("torus with "), *(f"{ratio:.2f}" for ratio in ratios)))
    return markdown(("form of the reduce-scatter", *(f"{size:,} B" for size in seconds[used])), rows)


def table(records: list[dict]) -> str:
    largest = {}
    for row in (row for record in records for row in record["rows"]):
        largest[row["layout"]] = max(row["bytes"], largest.get(row["layout"], 0))
    sizes = ", ".join(f"{size / 1e6:.0f} MB on {layout}" for layout, size in largest.items())
    return counts_table(
        records,
        f"Wrong calls, by processes x devices per process; messages from 64 KB to {sizes}.",
        speed_table(records[0]),
        "Time of the whole torus relative to the form in use (median over layouts and meshes).",
        f"By `benchmarks/collectives.py` on {'; '.join(map(made_on, records))}.",
    )


def main():
    given = arguments(__doc__, only=[*forms()], layouts=LAYOUTS, sizes=SIZES, calls=20, sessions=3, member=str)
    if given.member:
        return member(*map(int, given.member.split(",")), given.only, given.sizes, given.calls)
    import jax

    from jaxdp.bench.environment import provenance

    name = f"collectives_{jax.__version__}"
    rows = read(name, {"rows": []})["rows"]
    for number, layout in itertools.product(range(given.sessions), given.layouts):
        found = session(layout, given.only, given.sizes, given.calls)
        rows += found
        write(name, {"provenance": provenance(), "rows": rows})
        for form in given.only:
            mine = [row for row in found if row["form"] == form]
            wrong, calls = sum(row["wrong"] for row in mine), sum(row["calls"] for row in mine)
            print(f"session {number} {layout} {form:28} wrong {wrong:4} of {calls:5}", flush=True)


if __name__ == "__main__":
    main()
