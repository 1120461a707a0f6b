"""Drift of a run on other meshes from the same run on one device: relative difference of the parameters, step by step.

    python benchmarks/other_devices.py [--steps 32]

The default recipe with 8 workers of 16 images and a quarter of the channels, in float32, on 8 virtual devices of one process.
Every mesh starts from the same parameters and trains on the same batches, so only the order of additions differs. As a control,
one device starts from parameters that each differ in the last bit. The warm-up starts at a rate of 0.8, because a first step at
0 would change nothing. Writes benchmarks/results/other_devices.json and prints a table.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import load_config
from jaxdp.bench.environment import provenance
from jaxdp.data import prefetch
from jaxdp.setup.prepare import make_compiler, prepare
from jaxdp.training import request_flags
from jaxdp.training.state import create_state

ROOT = Path(__file__).parent.parent
RECIPE = ["--model.width", "16", "--schedule.start", "0.8", "--mesh.cpu-devices", "8"]
RECIPE += ["--batch.0.per-worker-batch", "16", "--batch.1.per-worker-batch", "16"]
MESHES = [(1, 1), (1, 2), (2, 4)]
CONTROL = "1x1, last bits"
SHOWN = (1, 2, 4, 8, 17, 32)


def trained(vertical: int, horizontal: int, steps: int, last_bits: bool = False) -> list[dict]:
    """Of every step in `SHOWN`: the parameters after it, in float64, and its loss. last_bits: start from other ones."""
    plan, devices, data = prepare(
        load_config("digits", [*RECIPE, "--mesh.vertical", str(vertical), "--mesh.horizontal", str(horizontal)])
    )
    config, programs, phase = plan.config, make_compiler(plan, devices, data), plan.phases[0]
    mesh = programs.mesh(phase)
    state, step = create_state(config, programs.model, mesh), programs.prepare_train(phase).result()
    if last_bits:
        state = state._replace(params=jax.tree.map(lambda leaf: jnp.nextafter(leaf, jnp.inf), state.params))
    found = []
    for number in range(steps):
        samples = number * phase.global_batch
        batch = prefetch.to_global(
            prefetch.train_batch(data.train, seed=config.seed, first_sample=samples, global_batch=phase.global_batch), mesh
        )
        state, metrics = step(
            state, batch | request_flags.none(mesh), programs.hyperparameters(phase, programs.plan.learning_rate(samples))
        )
        if number + 1 in SHOWN:
            leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(state.params)]
            found.append({"step": number + 1, "parameters": np.concatenate(leaves), "loss": float(metrics["loss"])})
    programs.close()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=max(SHOWN))
    arguments = parser.parse_args()
    one, rows = trained(*MESHES[0], arguments.steps), []
    others = {f"{mesh[0]}x{mesh[1]}": trained(*mesh, arguments.steps) for mesh in MESHES[1:]}
    others[CONTROL] = trained(*MESHES[0], arguments.steps, last_bits=True)
    for mesh, other in others.items():
        for here, there in zip(one, other, strict=True):
            apart = np.linalg.norm(there["parameters"] - here["parameters"]) / np.linalg.norm(here["parameters"])
            row = {"mesh": mesh, "step": here["step"], "parameters_apart": float(apart)}
            rows.append(row | {"loss": here["loss"], "loss_apart": abs(there["loss"] - here["loss"])})
    record = {"provenance": provenance(("jax", "numpy")), "rows": rows}
    (ROOT / "benchmarks/results/other_devices.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


def table(record: dict) -> str:
    """A line for each mesh, a column for each number of steps."""
    steps = sorted({row["step"] for row in record["rows"]})
    heads = [f"{step} step{'s' * (step > 1)}" for step in steps]
    lines = [f"| mesh | {' | '.join(heads)} |", "|---" * (len(steps) + 1) + "|"]
    for mesh in dict.fromkeys(row["mesh"] for row in record["rows"]):
        apart = [row["parameters_apart"] for row in record["rows"] if row["mesh"] == mesh]
        lines.append(f"| {mesh} | {' | '.join(f'{one:.1e}' for one in apart)} |")
    what = (
        "Norm of the difference from the parameters on one device, divided by their norm. The default recipe with 16 images a "
    )
    return "\n".join([*lines, "", f"{what}worker and 16 channels in the first ResNet stage, float32."])


if __name__ == "__main__":
    main()
