"""What there is to measure on one GPU, in calls of under ten minutes each, in the order in which each tells what is next.

    python benchmarks/gpu.py position | pytorch | changes | batches | best | start | run   (with a GPU; extra peers)

- position: our step, and where its time goes by kind of kernel against the measured ceilings
- pytorch: PyTorch's modes, to know its best
- changes: our step with one change each, taking turns with the step as it is: kept if over 1 % and outside the spread; the
  price of `--compile.deterministic` is among them
- batches: our step at other batch sizes
- best: ours and the two modes of PyTorch that `pytorch` found best, at three batch sizes, taking turns
- start: how long a command takes to its first step, without and with compiled programs in the cache
- run: the default training run

Each writes gpu_NAME.json (run: the run's own result) into benchmarks/results, or the directory --results, case by case, and
prints a short table last. Programs that JAX compiles are kept for the next call (JAX_COMPILATION_CACHE_DIR).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from step_vs_pytorch import VARIANTS

from jaxdp.parallel import compilation

ROOT = Path(__file__).parent.parent
STEP = ["-m", "jaxdp", "bench", "step", "--config", "imagenet_goyal_256", "--model.dtype", "bfloat16"]
STEP += ["--batch-size", "256", "--batch.0.per-worker-batch", "256", "--optimizer.label-smoothing", "0.1"]
SIDE_BY_SIDE = ["benchmarks/step_vs_pytorch.py", "--rounds", "5", "--seconds", "3"]
ONE = "224:imagenet:256"
CHANGES = [f"jaxdp:{name}" for name in VARIANTS if name not in ("given-back", "direct")]  # those are a CPU's
COMPARED = {
    "pytorch": ["--only", "torch", "torch-compile", "torch-reduce", "torch-max", "--cases", ONE],
    "changes": ["--only", "jaxdp", *CHANGES, "--cases", ONE],
    "batches": ["--only", "jaxdp", "--cases", *(f"224:imagenet:{batch}" for batch in (128, 256, 400, 512, 1024))],
    "best": ["--cases", ONE, "224:imagenet:400", "224:imagenet:512"],
}


def started(words) -> None:
    """One command of this checkout; its failure ends the call."""
    print(f"$ python {' '.join(words)}", file=sys.stderr, flush=True)
    there = {"JAX_COMPILATION_CACHE_DIR": str(compilation.cache_directory("auto"))} | os.environ | {"PYTHONPATH": str(ROOT)}
    if code := subprocess.run([sys.executable, *words], cwd=ROOT, env=there, check=False).returncode:
        sys.exit(code)


def pytorchs_best(results: Path) -> list[str]:
    """The two modes of PyTorch that were the fastest in what `pytorch` has measured."""
    path = results / "gpu_pytorch.json"
    if not path.exists():
        sys.exit(f"{path}: not there; first run python benchmarks/gpu.py pytorch")
    rows = json.loads(path.read_text())["cases"][0]["rows"]
    return sorted(rows, key=lambda name: rows[name]["step_seconds"])[:2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=("position", *COMPARED, "start", "run"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--cases", nargs="*", help="SIZE:STEM:BATCH, in place of the call's own")
    given = parser.parse_args()
    out = given.results.absolute() / f"gpu_{given.call}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    if given.call in ("position", "start"):
        more = ["--kernels", "--no-starts"] if given.call == "position" else ["--repeats", "1"]
        with tempfile.TemporaryDirectory() as folder:
            started([*STEP, *more, "--output", folder])
            shutil.copy(Path(folder) / "step.json", out)
    elif given.call == "run":
        with tempfile.TemporaryDirectory() as folder:
            started(["train.py", "--workdir", folder])
            shutil.copy(Path(folder) / "result.json", out)
    else:
        cases = ["--cases", *given.cases] if given.cases else []
        only = ["--only", "jaxdp", *pytorchs_best(out.parent)] if given.call == "best" else []
        started([*SIDE_BY_SIDE, *only, *COMPARED[given.call], *cases, "--output", str(out)])


if __name__ == "__main__":
    main()
