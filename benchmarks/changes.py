"""The step of a recipe, with one option changed at a time, timed alternately with the unchanged step.

    python benchmarks/changes.py [--config digits] [--base FLAGS] [--batch 128] [--rounds 9] [-- "--reduce.no-overlap" ...]

A change is one or more flags of `jaxdp train`; --base: flags of every step. Writes benchmarks/results/changes_CONFIG.json, or
changes_OUTPUT.json, and prints a table.
To measure the effect of overlap on several GPUs: `--config imagenet_goyal_8k --batch N -- --reduce.no-overlap`.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import turns
from common import made_on, markdown, options, write

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
    return markdown(columns, rows, f"By `benchmarks/changes.py` on {made_on(record)}.")


def main():
    parser = options(__doc__)
    parser.add_argument("changes", nargs="*", default=CHANGES)
    parser.add_argument("--config", default="digits")
    parser.add_argument("--base", default="", help="flags of every step")
    parser.add_argument("--batch", type=int, default=128, help="global batch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds per round of a contender")
    parser.add_argument("--output", help="name of the record, after changes_")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        turns.serve(partial(step_of, args.config, [*args.base.split(), *args.work.split()], args.batch))
        return
    line = [__file__, "--config", args.config, f"--base={args.base}", "--batch", str(args.batch)]
    makers = {name: partial(turns.Contender, name, [*line, f"--work={name}"]) for name in args.changes}
    makers = {UNCHANGED: partial(turns.Contender, UNCHANGED, [*line, "--work="])} | makers
    rows, failed = turns.time_alternately(makers, args.batch, args.rounds, args.seconds)
    if UNCHANGED not in rows:
        raise SystemExit(f"nothing to compare with: {failed[UNCHANGED]}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # this process only reads the versions
    from jaxdp.bench.environment import provenance

    record = {"provenance": provenance(), "config": args.config, "base": args.base, "batch": args.batch, "rounds": args.rounds}
    record |= {"rows": rows, "failed": failed}
    write(f"changes_{args.output or Path(args.config).stem}", record)
    print(table(record))


if __name__ == "__main__":
    main()
