"""The default run for three seeds: accuracy, time and throughput of each, from a fresh process without a warm cache.

    python benchmarks/digits_seeds.py [--seeds 0 1 2]

Writes benchmarks/results/digits_seeds.json, and the picture of the first seed's run as docs/digits.png.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxdp.bench.provenance import provenance

ROOT = Path(__file__).parent.parent
KEPT = (
    "accuracy", "top5", "loss", "eval_examples", "steps", "epochs", "wall_seconds", "seconds_to_first_step",
    "training_seconds", "evaluation_seconds", "images_per_second", "devices", "device_kind", "mesh",
)  # fmt: skip


def run(seed: int, workdir: Path) -> dict:
    command = [sys.executable, "train.py", "--seed", str(seed), "--json", "--workdir", str(workdir), "--compile.cache", "off"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    return {"seed": seed} | {name: result[name] for name in KEPT}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    made_with = provenance()
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in arguments.seeds:
            runs.append(run(seed, Path(directory) / str(seed)))
        shutil.copy(Path(directory) / str(arguments.seeds[0]) / "training.png", ROOT / "docs/digits.png")
    out = ROOT / "benchmarks/results/digits_seeds.json"
    out.write_text(json.dumps({"provenance": made_with, "command": "python train.py --seed S", "runs": runs}, indent=1) + "\n")
    print("seed  accuracy  seconds  to first step  images/s")
    for r in runs:
        print(
            f"{r['seed']:4}  {100 * r['accuracy']:6.2f} %  {r['wall_seconds']:7.0f}  {r['seconds_to_first_step']:13.0f}  "
            f"{r['images_per_second']:8.0f}"
        )


if __name__ == "__main__":
    main()
