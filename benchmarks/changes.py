"""The step of a recipe, with one option changed at a time, timed alternately with the unchanged step.

    python benchmarks/changes.py [--config digits] [--batch 128] [--rounds 9] [-- "--reduce.no-overlap" ...]

A change is one or more flags of `jaxdp train`. Writes benchmarks/results/changes_CONFIG.json and prints a table.
To measure the effect of overlap on several GPUs: `--config imagenet_goyal_8k --batch N -- --reduce.no-overlap`.
"""

import os
from functools import partial
from pathlib import Path

import turns
from common import arguments, markdown, write

UNCHANGED = "unchanged"
CHANGES = (
    "--reduce.bucket-bytes None",
    "--reduce.no-overlap",
    "--reduce.strategy psum",
)


def step_of(recipe: str, flags: list[str], batch: int):
    """(step(count), environment): the recipe's step on the available devices."""
    import jaxdp
    from jaxdp.distributed import runtime

    config = jaxdp.load_config(recipe, flags)
    devices = runtime.start(config.mesh)
    import jax

    from jaxdp.bench.step_runner import build_step
    from jaxdp.parallel.mesh import choose_shape, make_mesh

    mesh = make_mesh(*choose_shape(config.mesh, len(devices)), devices)
    one = build_step(config, mesh, global_batch=batch, strategy=config.reduce.strategy)

    def step(count):
        for _ in range(count):
            jax.block_until_ready(one())

    return step, {"mesh": list(mesh.devices.shape), "device": devices[0].device_kind}


def table(record: dict) -> str:
    rows = []
    for name, row in record["rows"].items():
        rate, speed = record["batch"] / row["step_seconds"], turns.ratio(row, record["rows"][UNCHANGED])
        spread = f"{1e3 * row['slowest']:.0f} to {1e3 * row['fastest']:.0f} ms"
        change = name if name == UNCHANGED else f"`{name}`"
        rows.append((change, f"{1e3 * row['step_seconds']:.0f} ms", spread, f"{rate:.0f}", f"{speed:.2f}"))
    columns = "change", "step", "slowest to fastest round", "images/s", "speed"
    return markdown(columns, rows)


def main():
    args = arguments(__doc__, changes=CHANGES, config="digits", batch=128, rounds=9, seconds=3.0, work=str)
    if args.work:
        flags = [] if args.work == UNCHANGED else args.work.split()
        return turns.serve(partial(step_of, args.config, flags, args.batch))
    line = [__file__, "--config", args.config, "--batch", str(args.batch)]
    makers = {name: partial(turns.Contender, name, [*line, f"--work={name}"]) for name in (UNCHANGED, *args.changes)}
    rows, failed = turns.time_alternately(makers, args.batch, args.rounds, args.seconds)
    if UNCHANGED not in rows:
        raise SystemExit(f"nothing to compare with: {failed[UNCHANGED]}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # this process only reads the versions
    from jaxdp.bench.environment import provenance

    record = {"provenance": provenance(), "config": args.config, "batch": args.batch, "rounds": args.rounds}
    write(f"changes_{Path(args.config).stem}", record | {"rows": rows, "failed": failed}, table)


if __name__ == "__main__":
    main()
