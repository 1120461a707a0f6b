"""Choose the hyperparameters of configs/digits.py on a split of the training digits; the held-out ones are not touched.

    python benchmarks/digits_search.py [--seeds 0 1] [--out benchmarks/results/digits_search.json]

Every candidate trains on 1,149 images and is judged on the 288 others of the training set.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from jaxdp.bench.provenance import provenance

ROOT = Path(__file__).parent.parent
SPLIT = ["--data.train-split", "fit", "--data.eval-split", "validation", "--evaluation.every-epochs", "None"]
CANDIDATES = {
    f"{epochs} epochs, {until} of them with the small batch, learning rate {rate}": [
        *("--epochs", str(epochs), "--batch.0.until-epoch", str(until)),
        *("--schedule.learning-rate", str(rate)),
    ]
    for epochs, until, rate in ((12, 8, 12), (10, 6, 8), (10, 6, 12))
}


def run(flags) -> dict:
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, "train.py", "--json", "--workdir", workdir, *SPLIT, *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result = json.loads(done.stdout)
    return {name: result[name] for name in ("accuracy", "loss", "epochs")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/digits_search.json")
    arguments = parser.parse_args()
    rows = []
    for name, flags in CANDIDATES.items():
        runs = [run([*flags, "--seed", str(seed)]) | {"seed": seed} for seed in arguments.seeds]
        rows.append({"candidate": name, "flags": flags, "runs": runs})
        scores = [r["accuracy"] for r in runs]
        losses = [r["loss"] for r in runs]
        print(f"{name:65} accuracy {100 * mean(scores):.2f} %  loss {mean(losses):.4f}", flush=True)
        arguments.out.write_text(json.dumps({"provenance": provenance(), "split": SPLIT, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
