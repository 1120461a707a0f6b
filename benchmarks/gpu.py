"""Measurements on one GPU, in calls of less than ten minutes each, in the recommended order.

    python benchmarks/gpu.py first | changes | flags | batches | modes      (with a GPU; extra peers)

- first: the following calls, in about five minutes and at most ten. Together: run, the default training run; and verify, the
  proofs of `jaxdp doctor --verify`. Then best, the step of jaxdp alternately with two modes of PyTorch; folded, the folded form
  alternately with the separate one; and position, the time of the step by kind of kernel against the measured limits
- changes, flags: the step with one change each, alternately with the unchanged step; a change is adopted if it gains more than
  1 % and more than the spread. Includes the cost of `--compile.deterministic`
- batches: jaxdp and PyTorch with other batch sizes
- modes: PyTorch's other modes; max-autotune compiles for minutes

Each writes gpu_NAME.json to benchmarks/results or --results, case by case, and prints a table. At most four steps of 256 images
are in the memory of the GPU at once, about 65 GB. Compiled programs are stored for the next call (JAX_COMPILATION_CACHE_DIR).
A contender that does not start in time is left out. What was measured before a failure or a limit is written: proofs in
gpu_verify.part, the timed step in gpu_position/step.json.

Install jaxdp (`pip install .`), or set PYTHONPATH to the checkout and to a folder with the installed wheels of pyproject.toml's
dependencies.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from common import RESULTS, ROOT
from step_vs_pytorch import VARIANTS

from jaxdp.bench.environment import provenance
from jaxdp.xla import options

STEP = ["-m", "jaxdp", "bench", "step", "--config", "imagenet_goyal_256", "--model.dtype", "bfloat16"]
STEP += ["--optimizer.label-smoothing", "0.1"]
MORE = {"position": ["--kernels", "--repeats", "5"]}
VERIFY = ["-m", "jaxdp", "doctor", "--verify", "--json"]
SIDE_BY_SIDE = ["benchmarks/step_vs_pytorch.py", "--seconds", "3"]
ONE = "224:imagenet:256"
OURS = {name: flags for name, (flags, _) in VARIANTS.items() if "folded" not in name}
COMPARED = {
    "best": ["jaxdp", "torch-compile", "torch-reduce"],
    "changes": ["jaxdp", *(f"jaxdp:{name}" for name, flags in OURS.items() if not flags)],
    "folded": ["jaxdp", "jaxdp:folded"],
    "flags": ["jaxdp", *(f"jaxdp:{name}" for name, flags in OURS.items() if flags)],
    "modes": ["torch", "torch-reduce", "torch-max"],
    "batches": ["jaxdp", "torch-compile", "torch-reduce"],
}
CASES = {"batches": ["224:imagenet:128", "224:imagenet:400"]}
TOGETHER, ALONE = ("run", "verify"), ("best", "folded", "position")  # of `first`, the most important ones first
SECONDS = {"run": 110, "verify": 110, "best": 170, "folded": 170, "position": 100}  # at most
KILL_AFTER = 5  # more seconds
START_SECONDS = dict.fromkeys(COMPARED, 90) | {"modes": 400}  # of a contender, at most


def started(words, out: Path | None = None) -> None:
    """One command of this checkout; its failure ends the call. out: a file for its stdout, with suffix .part until it ends."""
    print(f"$ python {' '.join(words)}", file=sys.stderr, flush=True)
    searched = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # this checkout first
    there = {"JAX_COMPILATION_CACHE_DIR": str(options.cache_directory())} | os.environ | {"PYTHONPATH": searched}
    part = out.with_suffix(".part") if out else None
    with part.open("wb") if part else nullcontext() as stdout:  # no pipe: its end would be lost if this process were stopped
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=there, check=False, stdout=stdout)
    if part and part.stat().st_size:
        part.replace(out)
    if done.returncode:
        sys.exit(done.returncode)


def sized(case: str) -> list[str]:
    """Flags of a case, SIZE:STEM:BATCH."""
    size, stem, batch = case.split(":")
    sizes = ["--data.image-size", size, "--model.stem", stem]
    return [*sizes, "--batch-size", batch, "--batch.0.global-batch", batch, "--batch.0.per-worker-batch", batch]


def first(results: Path, cases: list[str]) -> None:
    """A call that fails, or exceeds its time, does not keep other calls from running; exits with 1 then."""
    sizes = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # they share the memory of the GPU

    def begin(call: str) -> subprocess.Popen:
        limit = ["timeout", "--kill-after", str(KILL_AFTER), str(SECONDS[call])]
        return subprocess.Popen(
            [*limit, sys.executable, __file__, call, "--results", str(results), "--cases", *cases], env=os.environ | sizes
        )

    codes, running = {}, {}
    try:
        for calls in (TOGETHER, *((call,) for call in ALONE)):
            running = {call: begin(call) for call in calls}
            codes |= {call: process.wait() for call, process in running.items()}
    finally:
        for process in running.values():
            process.terminate()  # after Ctrl-C; `timeout` ends what it has started
    if failed := [f"{call} ({code})" for call, code in codes.items() if code]:
        sys.exit(f"failed: {', '.join(failed)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=("first", "verify", "run", *MORE, *COMPARED))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--cases", nargs="*", help="SIZE:STEM:BATCH, in place of the call's own")
    args = parser.parse_args()
    out = args.results.absolute() / f"gpu_{args.call}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    cases = args.cases or CASES.get(args.call, [ONE])
    with tempfile.TemporaryDirectory() as folder:
        if args.call == "first":
            first(out.parent, args.cases or [])
        elif args.call == "verify":
            started(VERIFY, out)
        elif args.call == "run":
            started(["train.py", "--workdir", folder])
            result = json.loads((Path(folder) / "result.json").read_text())
            out.write_text(json.dumps({"provenance": provenance()} | result, indent=1) + "\n")
        elif args.call in MORE:
            record = out.with_suffix("") / "step.json"
            record.unlink(missing_ok=True)  # of an earlier call
            try:
                started([*STEP, *sized(cases[0]), *MORE[args.call], "--output", str(record.parent)])
            finally:
                if record.exists():
                    record.replace(out)
                    record.parent.rmdir()
        else:
            limit = ["--start-seconds", str(START_SECONDS[args.call])]
            started([*SIDE_BY_SIDE, *limit, "--only", *COMPARED[args.call], "--cases", *cases, "--output", str(out)])


if __name__ == "__main__":
    main()
