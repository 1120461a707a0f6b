"""The default run for three seeds: accuracy, time and throughput of each, in a process of its own. The first compiles its
programs, the others find them in the cache.

    python benchmarks/digits_seeds.py [--seeds 0 1 2]

Writes benchmarks/results/digits_seeds.json, and the picture of the first seed's run as docs/digits.png.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxdp.bench.provenance import provenance

ROOT = Path(__file__).parent.parent
ASKED_FOR = dict(os.environ)
KEPT = (
    "accuracy", "top5", "loss", "eval_examples", "steps", "epochs", "wall_seconds", "seconds_to_first_step",
    "training_seconds", "evaluation_seconds", "images_per_second", "devices", "device_kind", "mesh",
)  # fmt: skip


def run(seed: int, folder: Path) -> dict:
    cache = folder / "cache"
    told = {"seed": seed, "cache": "filled" if cache.exists() else "empty"}
    command = [sys.executable, "train.py", "--seed", str(seed), "--json", "--workdir", str(folder / str(seed))]
    command += ["--compile.cache", str(cache)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=ASKED_FOR)
    result = json.loads(done.stdout)
    return told | {name: result[name] for name in KEPT}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of this process, which only asks where it is
    made_with = provenance()
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in arguments.seeds:
            runs.append(run(seed, Path(directory)))
        shutil.copy(Path(directory) / str(arguments.seeds[0]) / "training.png", ROOT / "docs/digits.png")
    out = ROOT / "benchmarks/results/digits_seeds.json"
    out.write_text(json.dumps({"provenance": made_with, "command": "python train.py --seed S", "runs": runs}, indent=1) + "\n")
    print("seed  cache   accuracy  seconds  to first step  images/s")
    for r in runs:
        times = f"{r['wall_seconds']:7.0f}  {r['seconds_to_first_step']:13.0f}  {r['images_per_second']:8.0f}"
        print(f"{r['seed']:4}  {r['cache']:6}  {100 * r['accuracy']:6.2f} %  {times}")


if __name__ == "__main__":
    main()
