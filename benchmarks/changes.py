"""The step of a recipe with one change each, taking turns with the step as the recipe has it.

    python benchmarks/changes.py [--config digits] [--batch 128] [--rounds 9] [-- "--reduce.no-overlap" ...]

A change is one or more flags of `jaxdp train`. Writes benchmarks/results/changes_CONFIG.json, or --output, and prints a table.
On several GPUs, what overlapping saves: `--config imagenet_goyal_8k --batch N -- --reduce.no-overlap`.
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path

import turns

AS_IT_IS = "as it is"
CHANGES = (
    "--reduce.bucket-bytes None",
    "--reduce.no-overlap",
    "--reduce.strategy psum",
    "--model.convolution direct",
    "--model.gradients autodiff",
    "--compile.no-tuned",
)


def step_of(recipe: str, flags: list[str], batch: int):
    """(step(count), what was used): the recipe's step on the devices at hand."""
    import jaxdp
    from jaxdp.parallel import distributed

    config = jaxdp.load_config(recipe, flags)
    devices = distributed.start(config.mesh)
    import jax

    from jaxdp.bench.stepper import stepper
    from jaxdp.parallel.mesh import choose_shape, make_mesh

    mesh = make_mesh(*choose_shape(config.mesh, len(devices)), devices)
    one = stepper(config, mesh, batch, config.reduce.strategy)

    def step(count):
        for _ in range(count):
            jax.block_until_ready(one())

    return step, {"mesh": list(mesh.devices.shape), "device": devices[0].device_kind}


def table(record: dict) -> str:
    """Markdown, for docs and terminal alike."""
    rows, batch = record["rows"], record["batch"]
    lines = ["| change | step | slowest to fastest round | images/s | speed |", "|---" * 5 + "|"]
    for name, row in rows.items():
        flags = name if name == AS_IT_IS else f"`{name}`"
        spread = f"{1e3 * row['slowest']:.0f} to {1e3 * row['fastest']:.0f} ms"
        speed = f"{turns.ratio(row, rows[AS_IT_IS]):.2f}"
        lines.append(
            f"| {flags} | {1e3 * row['step_seconds']:.0f} ms | {spread} | {batch / row['step_seconds']:.0f} | {speed} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", default=CHANGES)
    parser.add_argument("--config", default="digits")
    parser.add_argument("--batch", type=int, default=128, help="images of a step, on all devices")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a contender's round")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        turns.serve(partial(step_of, given.config, given.work.split(), given.batch))
        return
    line = [__file__, "--config", given.config, "--batch", str(given.batch)]
    makers = {name: partial(turns.Contender, name, [*line, f"--work={name}"]) for name in given.changes}
    makers = {AS_IT_IS: partial(turns.Contender, AS_IT_IS, [*line, "--work="])} | makers
    rows, failed = turns.taken(makers, given.batch, given.rounds, given.seconds)
    if AS_IT_IS not in rows:
        raise SystemExit(f"nothing to compare with: {failed[AS_IT_IS]}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # from here on this process only asks where it is
    from jaxdp.bench.provenance import provenance

    told = {"config": given.config, "batch": given.batch, "rounds": given.rounds, "rows": rows, "failed": failed}
    record = {"provenance": provenance(), **told}
    out = given.output or turns.ROOT / f"benchmarks/results/changes_{Path(given.config).stem}.json"
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
