"""The default run with the optimizer's velocity in float32 and in bfloat16: held-out accuracy by seed, and optimizer state.

    python benchmarks/velocity_dtype.py [--optimizers lars ...] [--seeds 0 1 2 3 4]

The same seed has the same initial weights, order of images and augmentation with both types. Adds to
benchmarks/results/velocity_dtype.json and skips runs already there; prints the table of docs/recipes.md.
"""

import argparse
import json
import tempfile
from pathlib import Path

import jax
from batch_norm_training import compare

import jaxdp
from jaxdp import models
from jaxdp.bench.environment import provenance
from jaxdp.loggers.console import Quiet
from jaxdp.parallel.mesh import make_mesh
from jaxdp.session import Command, run_session
from jaxdp.training.state import abstract_state

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/velocity_dtype.json"
DTYPES = "float32", "bfloat16"
OPTIMIZERS = {
    "lars": [],
    "adamw": ["--optimizer.name", "adamw", "--schedule.learning-rate", "1e-3", "--optimizer.weight-decay", "0.05"],
}


def trained(optimizer: str, dtype: str, seed: int) -> dict:
    flags = [*OPTIMIZERS[optimizer], "--optimizer.velocity-dtype", dtype, "--seed", str(seed)]
    config = jaxdp.load_config("digits", flags)
    with tempfile.TemporaryDirectory() as folder:
        result = run_session(config, Path(folder) / "run", command=Command(screen=Quiet()))
    state = abstract_state(config, models.create(config.model), make_mesh(1, 1))
    facts = {"optimizer": optimizer, "dtype": dtype, "seed": seed, "flags": flags, "eval_examples": result.eval_examples}
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state))
    return facts | {"accuracy": result.accuracy, "loss": result.loss, "optimizer_state_bytes": size}


def record() -> dict:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": []}


def table(measured: dict) -> str:
    lines = ["| optimizer | float32 | bfloat16 | difference in standard errors | optimizer state |", "|---" * 5 + "|"]
    for optimizer in OPTIMIZERS:
        rows = [row for row in measured["runs"] if row["optimizer"] == optimizer]
        sizes = [next(row["optimizer_state_bytes"] for row in rows if row["dtype"] == dtype) / 1e6 for dtype in DTYPES]
        cells = compare(rows, "dtype", DTYPES).cells()
        lines.append(f"| `{optimizer}` | {' | '.join(cells)} | {sizes[0]:.0f} MB, {sizes[1]:.0f} MB |")
    seeds = len({row["seed"] for row in measured["runs"]})
    return "\n".join([*lines, "", f"ResNet-50 on handwritten digits, held-out accuracy: mean and range of {seeds} seeds."])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    done = {(row["optimizer"], row["dtype"], row["seed"]) for row in record()["runs"]}
    for optimizer in args.optimizers:
        for seed in args.seeds:
            for dtype in DTYPES:
                if (optimizer, dtype, seed) in done:
                    continue
                row = trained(optimizer, dtype, seed) | {"provenance": provenance()}
                RESULT.write_text(json.dumps({"runs": [*record()["runs"], row]}, indent=1) + "\n")
                accuracy = f"{100 * row['accuracy']:.2f} %, loss {row['loss']:.4f}"
                print(f"{optimizer}, seed {seed}, {dtype}: {accuracy}", flush=True)
    print(table(record()))


if __name__ == "__main__":
    main()
