"""Bytes moved by a training step on a GPU, by ResNet stage and kind of kernel: ResNet-50 in bfloat16, compiled without the GPU.

    python benchmarks/gpu_bytes.py [--batch 256] [--chip h200] [--cases separate folded]   (needs the extra cuda13, no GPU)

For every kernel of the compiled step: the bytes of its operands and results, and the FLOP of convolutions. No kernel is faster
than its bytes at the memory bandwidth, nor than its FLOP at the peak rate; the sum of the larger times is a lower bound of the
step, with the published figures of the GPU. Replaces the rows of the given cases in benchmarks/results/gpu_bytes.json, prints
a table per case.
"""

import argparse
import json
import os
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jaxdp
from jaxdp.analysis import aot
from jaxdp.analysis.gpu_targets import GPU_TARGETS
from jaxdp.bench.environment import provenance
from jaxdp.bench.step import published_ceilings
from jaxdp.xla import kernels

ROOT = Path(__file__).parent.parent
FOLDED = ["--model.batch-norm", "folded"]
CASES = {
    "separate": [],
    "folded": FOLDED,
}
SIDES = {224: "images", 112: "112", 56: "56", 28: "28", 14: "14", 7: "7"}


def measured(case: str, flags, batch: int, chip: str) -> dict:
    words = ["--model.dtype", "bfloat16", "--reduce.strategy", "psum", "--compile.cache", "off", *flags]
    words += ["--batch.0.global-batch", str(batch), "--batch.0.per-worker-batch", str(batch)]
    plan = jaxdp.plan(jaxdp.load_config("imagenet_goyal_256", words), devices=1)
    compiled = aot.compile_for(plan, 0, gpu=chip, hosts=1, gpus_per_host=1)
    limits = published_ceilings(GPU_TARGETS[chip].name, "bfloat16", 1)
    found, table = kernels.kernels_of_step(compiled.text, batch), defaultdict(float)
    for one in found:
        side = next((name for limit, name in sorted(SIDES.items()) if 0 < one.side <= limit + 3), "rest")
        table[side, one.kind] += one.bytes
    rows = kernels.summarize_by_kind(found, None, limits)
    moved, flop, least = (sum(row[what] for row in rows) for what in ("bytes", "flop", "least_seconds"))
    return {
        "case": case,
        "flags": flags,
        "gpu": GPU_TARGETS[chip].name,
        "batch": batch,
        "kernels": len(found),
        "megabytes_an_image": {f"{side} {kind}": part / batch / 1e6 for (side, kind), part in table.items()},
        "all_megabytes_an_image": moved / batch / 1e6,
        "convolutions_gigaflop_an_image": flop / batch / 1e9,
        "limits": limits,
        "bytes_only_images_per_second": batch / (moved / limits["bytes_per_second"]),
        "floor_images_per_second": batch / least,
        "memory_bytes": compiled.memory_bytes,
    }


def write(path: Path, results: list[dict], *, order: list[str]) -> None:
    """Replace the rows of these cases in a file; every row keeps the commit that it was compiled at."""
    made = provenance()
    rows = {}
    if path.exists():
        old = json.loads(path.read_text())
        rows = {row["case"]: {"commit": old["provenance"]["commit"]} | row for row in old["results"] if row["case"] in order}
    rows |= {row["case"]: row | {"commit": made["commit"]} for row in results}
    record = {"provenance": made, "results": [rows[case] for case in order if case in rows]}
    path.write_text(json.dumps(record, indent=1) + "\n")


def shown(result: dict):
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.title = f"{result['case']}: MB an image, batch {result['batch']}, {result['gpu']}"
    limits = result["limits"]
    table.caption = (
        f"{result['kernels']} kernels; {result['convolutions_gigaflop_an_image']:.1f} GFLOP an image in convolutions; at "
        f"{limits['bytes_per_second'] / 1e12:.1f} TB/s and {limits['flops'] / 1e12:.0f} TFLOP/s, the maker's, at most "
        f"{result['floor_images_per_second']:,.0f} images/s"
    )
    for name in ("map", *kernels.KINDS, "all"):
        table.add_column(name, justify="right")
    megabytes = result["megabytes_an_image"]
    for side in [*SIDES.values(), "rest"]:
        values = [megabytes.get(f"{side} {kind}", 0.0) for kind in kernels.KINDS]
        table.add_row(side, *(f"{value:.1f}" if value else "" for value in values), f"{sum(values):.1f}")
    sums = [sum(value for name, value in megabytes.items() if name.endswith(f" {kind}")) for kind in kernels.KINDS]
    table.add_row("all", *(f"{value:.1f}" for value in sums), f"{result['all_megabytes_an_image']:.1f}")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--chip", default="h200")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    args = parser.parse_args()
    results = [measured(case, CASES[case], args.batch, args.chip) for case in args.cases]
    write(ROOT / "benchmarks/results/gpu_bytes.json", results, order=list(CASES))
    from rich.console import Console

    for result in results:
        Console(width=130).print(shown(result))


if __name__ == "__main__":
    main()
