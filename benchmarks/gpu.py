"""Measurements on one GPU, in calls of less than ten minutes each, in the recommended order.

    python benchmarks/gpu.py position | pytorch | changes | flags | batches | best | start | run   (with a GPU; extra peers)

- position: the step of jaxdp, and its time by kind of kernel against the measured limits
- pytorch: PyTorch's modes
- changes, flags: the step with one change each, alternately with the unchanged step; a change is adopted if it gains more than
  1 % and more than the spread. Includes the cost of `--compile.deterministic`
- batches: the step with other batch sizes
- best: jaxdp and the two best modes of PyTorch (from `pytorch`), at three batch sizes, alternately
- start: time to the first step, with and without cached programs
- run: the default training run

Each writes gpu_NAME.json (run: the result of the run) to benchmarks/results or --results, case by case, and prints a table.
Compiled programs are stored for the next call (JAX_COMPILATION_CACHE_DIR).
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

from jaxdp.xla import options

ROOT = Path(__file__).parent.parent
STEP = ["-m", "jaxdp", "bench", "step", "--config", "imagenet_goyal_256", "--model.dtype", "bfloat16"]
STEP += ["--batch-size", "256", "--batch.0.per-worker-batch", "256", "--optimizer.label-smoothing", "0.1"]
SIDE_BY_SIDE = ["benchmarks/step_vs_pytorch.py", "--rounds", "5", "--seconds", "3"]
ONE = "224:imagenet:256"
FORMS = ("separate", "folded")  # of batch normalization
STEPS = ["jaxdp", "jaxdp:folded"]
CHANGES = [f"jaxdp:{name}" for name, (flags, _) in VARIANTS.items() if not flags]
FLAGS = [f"jaxdp:{name}" for name, (flags, _) in VARIANTS.items() if flags]
COMPARED = {
    "pytorch": ["--only", "torch", "torch-compile", "torch-reduce", "torch-max", "--cases", ONE],
    "changes": ["--only", "jaxdp", *CHANGES, "--cases", ONE],
    "flags": ["--only", "jaxdp", *FLAGS, "--cases", ONE],
    "batches": [
        "--only",
        *STEPS,
        "--cases",
        *(f"224:imagenet:{batch}" for batch in (128, 256, 400, 512, 1024)),
    ],
    "best": ["--cases", ONE, "224:imagenet:400", "224:imagenet:512"],
}


def started(words) -> None:
    """One command of this checkout; its failure ends the call."""
    print(f"$ python {' '.join(words)}", file=sys.stderr, flush=True)
    there = {"JAX_COMPILATION_CACHE_DIR": str(options.cache_directory("auto"))} | os.environ | {"PYTHONPATH": str(ROOT)}
    if code := subprocess.run([sys.executable, *words], cwd=ROOT, env=there, check=False).returncode:
        sys.exit(code)


def pytorchs_best(results: Path) -> list[str]:
    """The two fastest modes of PyTorch, by the results of `pytorch`."""
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
    args = parser.parse_args()
    out = args.results.absolute() / f"gpu_{args.call}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.call in ("position", "start"):
        more = ["--kernels", "--no-starts"] if args.call == "position" else ["--repeats", "1"]
        for form in FORMS if args.call == "position" else FORMS[:1]:
            with tempfile.TemporaryDirectory() as folder:
                started([*STEP, *more, "--model.batch-norm", form, "--output", folder])
                name = out.name if form == FORMS[0] else f"{out.stem}_{form}.json"
                shutil.copy(Path(folder) / "step.json", out.with_name(name))
    elif args.call == "run":
        with tempfile.TemporaryDirectory() as folder:
            started(["train.py", "--workdir", folder])
            shutil.copy(Path(folder) / "result.json", out)
    else:
        cases = ["--cases", *args.cases] if args.cases else []
        only = ["--only", *STEPS, *pytorchs_best(out.parent)] if args.call == "best" else []
        started([*SIDE_BY_SIDE, *only, *COMPARED[args.call], *cases, "--output", str(out)])


if __name__ == "__main__":
    main()
