"""What folding saves layer by layer: the step compiled for an H200 with one group of equal 1x1 convolutions folded at a time.

    python benchmarks/gpu_layers.py     (needs the extra cuda13, no GPU)

ResNet-50 in bfloat16 with batch 256, compared with the step that folds nothing but keeps the folded form's barrier at the entry
of a stage. See gpu_bytes.py for the counts. Writes benchmarks/results/gpu_layers.json, prints the table of docs.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import gpu_bytes
import jax

from jaxdp.bench.environment import provenance
from jaxdp.models import resnet

RESULT = gpu_bytes.ROOT / "benchmarks/results/gpu_layers.json"
# (input channels, output channels): (side of the result, last convolutions of blocks, downsampling shortcuts)
GROUPS = {
    (64, 256): (56, 3, 1),
    (128, 512): (28, 4, 0),
    (256, 512): (28, 0, 1),
    (256, 1024): (14, 6, 0),
    (512, 1024): (14, 0, 1),
    (512, 2048): (7, 3, 0),
    (1024, 2048): (7, 0, 1),
}
NOTHING = (0, 0)


def measured(group: tuple[int, int]) -> dict:
    resnet.MOST_FOLDED_CHANNELS = 1024
    plain = resnet.Conv.folds_from
    resnet.Conv.folds_from = lambda conv, channels, rows: (channels, conv.features) == group and plain(conv, channels, rows)
    found = gpu_bytes.measured(f"{group[0]} to {group[1]}", gpu_bytes.FOLDED, 256, "h200")
    kept = "case", "gpu", "batch", "kernels", "all_megabytes_an_image"
    return {"channels": list(group)} | {name: found[name] for name in kept}


def table(record: dict) -> str:
    lines = ["| folded | result | layers | MB per image, saved | a layer | kernels, added | a layer |", "|---" * 7 + "|"]
    base, *rows = record["results"]
    for row in rows:
        side, last, shortcuts = GROUPS[tuple(row["channels"])]
        kinds = [f"{last} last convolutions"] * (last > 0) + [f"{shortcuts} shortcut"] * (shortcuts > 0)
        saved = base["all_megabytes_an_image"] - row["all_megabytes_an_image"]
        added, layers = row["kernels"] - base["kernels"], last + shortcuts
        lines.append(
            f"| {row['channels'][0]:,} to {row['channels'][1]:,} channels | {side}x{side} | {', '.join(kinds)} "
            f"| {saved:.1f} | {saved / layers:.1f} | {added} | {added / layers:.1f} |"
        )
    step = f"{base['kernels']} kernels and {base['all_megabytes_an_image']:.1f} MB per image"
    lines += ["", f"Compared with the separate form with the folded form's barrier at the entry of a stage: {step}."]
    return "\n".join(lines)


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    # A process for each: a patch stays.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as one_by_one:
        results = list(one_by_one.map(measured, [NOTHING, *GROUPS]))
    RESULT.write_text(json.dumps({"provenance": provenance(), "results": results}, indent=1) + "\n")
    print(table(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
