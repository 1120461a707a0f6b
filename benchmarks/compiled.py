"""What XLA makes of each strategy on GPUs that are not there: ResNet-50 in bfloat16, compiled for H200s.

    python benchmarks/compiled.py      (needs the extra cuda13, no GPU)

Writes benchmarks/results/compiled.json and prints a table.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from jaxdp.bench.provenance import provenance

ROOT = Path(__file__).parent.parent
TODAY = ["--model.dtype", "bfloat16", "--loss-scale.name", "none", "--reduce.wire-dtype", "bfloat16"]
TODAY += ["--optimizer.momentum-rule", "constant"]
EIGHT = ["--hosts", "1", "--gpus-per-host", "8", "--batch.0.global-batch", "2048", "--batch.0.per-worker-batch", "256"]
CASES = {
    "psum": [*EIGHT, "--reduce.strategy", "psum"],
    "hierarchical": [*EIGHT, "--reduce.strategy", "hierarchical"],
    "torus": [*EIGHT, "--reduce.strategy", "torus"],
    "ring": [*EIGHT, "--reduce.strategy", "ring"],
    "torus, one message": [*EIGHT, "--reduce.strategy", "torus", "--reduce.bucket-bytes", "None"],
    "torus, Experiment 1": ["--hosts", "272", "--gpus-per-host", "8", "--reduce.strategy", "torus"],
}


def compiled(flags) -> dict:
    command = [sys.executable, "-m", "jaxdp", "plan", "--config", "imagenet_sony_exp1", "--json", "--compile-for", "h200"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *TODAY, *flags], capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.stderr.splitlines()[-1] if done.stderr else "the compilation failed")
    return json.loads(done.stdout)["compiled"]


def main():
    results, made = {}, provenance()
    for name, flags in CASES.items():
        results[name] = compiled(flags) | {"flags": flags, "provenance": made}
        print(name, f"{results[name]['compile_seconds']:.0f} s", flush=True)
    (ROOT / "benchmarks/results/compiled.json").write_text(json.dumps(results, indent=1) + "\n")
    print("| strategy | GPUs | collectives | asynchronous | beside them, GB | kernels | GB moved | memory, GB |")
    print("|---|---|---|---|---|---|---|---|")
    for name, told in results.items():
        total = {key: sum(one[key] for one in told["collectives"]) for key in ("count", "asynchronous", "kernel_bytes_beside")}
        print(
            f"| {name} | {told['hosts']}x{told['gpus_per_host']} | {total['count']} | {total['asynchronous']} "
            f"| {total['kernel_bytes_beside'] / 1e9:.2f} | {told['kernels']} | {told['kernel_bytes'] / 1e9:.1f} "
            f"| {told['memory_bytes'] / 1e9:.1f} |"
        )


if __name__ == "__main__":
    main()
