"""Drift of a run on other meshes from the same run on one device: relative difference of the parameters, step by step.

    python benchmarks/other_devices.py

The default recipe with 8 workers of 16 images and a quarter of the channels, in float32, on 8 virtual devices of one process.
Every mesh starts from the same parameters and trains on the same batches, so only the order of additions differs. As a control,
one device starts from parameters that each differ in the last bit. The warm-up starts at a rate of 0.8, because a first step at
0 would change nothing. Writes benchmarks/results/other_devices.json and prints a table.
"""

import jax
import jax.numpy as jnp
import numpy as np
from common import default_step, made_on, markdown, options, read, write

from jaxdp.bench.environment import provenance

RECIPE = ["--model.width", "16", "--schedule.start", "0.8", "--mesh.cpu-devices", "8"]
RECIPE += ["--batch.0.per-worker-batch", "16", "--batch.1.per-worker-batch", "16"]
CONTROL = "1x1, last bits"
SHOWN = (1, 2, 4, 8, 17, 32)


def trained(vertical: int, horizontal: int, last_bits: bool = False) -> list[dict]:
    """Of every step in `SHOWN`: the parameters after it, in float64, and its loss. last_bits: start from other ones."""
    state, step, batch = default_step([*RECIPE, "--mesh.vertical", str(vertical), "--mesh.horizontal", str(horizontal)])
    if last_bits:
        state = state._replace(params=jax.tree.map(lambda leaf: jnp.nextafter(leaf, jnp.inf), state.params))
    found = []
    for number in range(max(SHOWN)):
        state, metrics = step(state, number * batch)
        if number + 1 in SHOWN:
            leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(state.params)]
            found.append({"step": number + 1, "parameters": np.concatenate(leaves), "loss": float(metrics["loss"])})
    return found


def main():
    options(__doc__).parse_args()
    one, rows = trained(1, 1), []
    others = {"1x2": trained(1, 2), "2x4": trained(2, 4), CONTROL: trained(1, 1, last_bits=True)}
    for mesh, other in others.items():
        for here, there in zip(one, other, strict=True):
            apart = np.linalg.norm(there["parameters"] - here["parameters"]) / np.linalg.norm(here["parameters"])
            row = {"mesh": mesh, "step": here["step"], "parameters_apart": float(apart)}
            rows.append(row | {"loss": here["loss"], "loss_apart": abs(there["loss"] - here["loss"])})
    write("other_devices", {"provenance": provenance(("jax", "numpy")), "rows": rows})
    print(table(read("other_devices")))


def table(record: dict) -> str:
    """A line for each mesh, a column for each number of steps."""
    steps = sorted({row["step"] for row in record["rows"]})
    meshes: dict[str, list[str]] = {}
    for row in record["rows"]:
        meshes.setdefault(row["mesh"], []).append(f"{row['parameters_apart']:.1e}")
    return markdown(
        ("mesh", *(f"{step} step{'s' * (step > 1)}" for step in steps)),
        [(mesh, *cells) for mesh, cells in meshes.items()],
        "Norm of the difference from the parameters on one device, divided by their norm. The default recipe with 16 images a "
        "worker and 16 channels in the first ResNet stage, float32.",
        f"By `benchmarks/other_devices.py` on {made_on(record)}.",
    )


if __name__ == "__main__":
    main()
