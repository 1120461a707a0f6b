"""Memory of a step: the estimate of `jaxdp plan` compared with what XLA's GPU compiler allocates.

    python benchmarks/memory.py [--chip h100]   (needs the extra cuda13, no GPU; about eight minutes)

Each case is compiled for one GPU with two per-worker batches. Their difference is the memory per image, to which the estimate
of the activations is compared. Writes benchmarks/results/memory.json and prints a table.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jaxdp
from jaxdp.analysis import aot, memory
from jaxdp.analysis.gpu_targets import GPU_TARGETS
from jaxdp.bench.environment import provenance
from jaxdp.sizes import model_summary

ROOT = Path(__file__).parent.parent
BATCHES = 16, 48
CASES = {
    "ResNet-50, bfloat16": ["--model.dtype", "bfloat16"],
    "ResNet-50, float32": [],
    "ResNet-50, bfloat16, remat": ["--model.dtype", "bfloat16", "--model.remat"],
    "ResNet-18, float32": ["--model.depth", "18"],
    "ResNet-152, bfloat16": ["--model.depth", "152", "--model.dtype", "bfloat16"],
}


def measured(case: str, chip: str) -> dict:
    compiled, estimated = [], []
    for batch in BATCHES:
        words = [*CASES[case], "--reduce.strategy", "psum", "--compile.cache", "off"]
        words += ["--batch.0.global-batch", str(batch), "--batch.0.per-worker-batch", str(batch)]
        plan = jaxdp.plan(jaxdp.load_config("imagenet_goyal_256", words), devices=1)
        estimated.append(memory.estimate(plan, model_summary(plan.config)))
        compiled.append(aot.compile_for(plan, 0, gpu=chip, hosts=1, gpus_per_host=1).memory_bytes)
    per_image = (compiled[1] - compiled[0]) / (BATCHES[1] - BATCHES[0])
    return {
        "case": case,
        "gpu": GPU_TARGETS[chip].name,
        "batches": BATCHES,
        "compiled_bytes": compiled,
        "estimated_bytes": [each["total"] for each in estimated],
        "compiled_megabytes_an_image": per_image / 1e6,
        "estimated_megabytes_an_image": estimated[0]["activations_per_image"] / 1e6,
        "ratio": estimated[0]["activations_per_image"] / per_image,
    }


def table(record: dict) -> str:
    lines = ["| network, 224x224 | MB per image, estimated | compiled | GB for 256 images, estimated |", "|---" * 4 + "|"]
    for row in record["results"]:
        fixed = row["estimated_bytes"][0] - row["batches"][0] * 1e6 * row["estimated_megabytes_an_image"]
        total = (fixed + 256e6 * row["estimated_megabytes_an_image"]) / 1e9
        estimated, compiled = row["estimated_megabytes_an_image"], row["compiled_megabytes_an_image"]
        lines.append(f"| {row['case']} | {estimated:.1f} | {compiled:.1f} | {total:.1f} |")
    lines += ["", f"Compiled for an {record['results'][0]['gpu']}; nothing was run on a GPU."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chip", default="h100", choices=GPU_TARGETS)
    chip = parser.parse_args().chip
    results = []
    for case in CASES:
        results.append(measured(case, chip))
        print(
            {name: value for name, value in results[-1].items() if "an_image" in name or name in ("case", "ratio")}, flush=True
        )
    record = {"provenance": provenance(), "results": results}
    (ROOT / "benchmarks/results/memory.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
