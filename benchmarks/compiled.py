"""XLA's compiled step for each strategy: ResNet-50 in bfloat16, compiled for H200 GPUs.

    python benchmarks/compiled.py      (needs the extra cuda13, no GPU)

Writes benchmarks/results/compiled.json.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from jaxdp.bench.environment import provenance

ROOT = Path(__file__).parent.parent
TODAY = ["--model.dtype", "bfloat16", "--loss-scale.name", "none", "--reduce.wire-dtype", "bfloat16"]
TODAY += ["--optimizer.momentum-rule", "constant"]
EIGHT = ["--hosts", "1", "--gpus-per-host", "8", "--batch.0.global-batch", "2048", "--batch.0.per-worker-batch", "256"]
MANY = ["--hosts", "64", "--gpus-per-host", "8", "--batch.0.global-batch", "131072", "--batch.0.per-worker-batch", "256"]
BUCKETS = ["--reduce.bucket-bytes", "65536"]
AT_THE_END = ["--reduce.no-overlap"]  # with XLA's options as they are by default: it then combines all-reduces
XLA_DEFAULTS = "from jaxdp.cli.main import main; from jaxdp.xla import options; options.TUNED.clear(); main()"
WAYS = {"": [], ", 64 KiB": BUCKETS, ", at the end": AT_THE_END, ", 64 KiB, at the end": [*BUCKETS, *AT_THE_END]}
CASES = [(f"{name}{way}", [*EIGHT, "--reduce.strategy", name, *WAYS[way]]) for name in ("psum", "torus") for way in WAYS]
CASES += [(name, [*EIGHT, "--reduce.strategy", name]) for name in ("hierarchical", "ring")]
CASES += [
    (f"{name}{way}", [*MANY, "--reduce.strategy", name, *WAYS[way]])
    for name in ("psum", "torus")
    for way in ("", ", 64 KiB, at the end")
]


def compiled(flags) -> dict:
    program = ["-c", XLA_DEFAULTS] if AT_THE_END[0] in flags else ["-m", "jaxdp"]
    command = [sys.executable, *program, "plan", "--config", "imagenet_sony_exp1", "--json", "--compile-for", "h200"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *TODAY, *flags], capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.stderr.splitlines()[-1] if done.stderr else "the compilation failed")
    return json.loads(done.stdout)["compiled"]


def main():
    results, made = [], provenance()
    for name, flags in CASES:
        results.append({"name": name} | compiled(flags) | {"flags": flags, "provenance": made})
        print(json.dumps(results[-1] | {"flags": None, "provenance": None}), flush=True)
        (ROOT / "benchmarks/results/compiled.json").write_text(json.dumps(results, indent=1) + "\n")
    print("benchmarks/tables.py compiled prints the table")


if __name__ == "__main__":
    main()
