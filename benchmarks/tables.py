"""The tables of the manual, from benchmarks/results/.

python benchmarks/tables.py          write those on the pages of docs/
python benchmarks/tables.py --check  fail if one of them is out of date
python benchmarks/tables.py NAME...  print tables, such as the tables of benchmarks/README.md
"""

import contextlib
import functools
import io
import operator
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cluster"))
import accuracy
import audit
import changes
import chaos
import collectives
import compiled
import digits_seeds
import folded_precision
import large_batch
import loaders
import lr_range
import mutations
import network
import staleness
import startup
import step_vs_pytorch
import training_vs_pytorch
import turns
from common import RESULTS, ROOT, made_on, markdown, read

from jaxdp.data.sources import inspect
from jaxdp.planning import make_plan
from jaxdp.recipes import find_config, load_config


def allreduce(record: dict) -> str:
    sizes = sorted({row["bytes"] for row in record["rows"]})
    gradient, rows = record["gradient"], []
    for strategy, whole in gradient["seconds"].items():
        cells = {r["bytes"]: r["seconds"] for r in record["rows"] if (r["strategy"], r["dtype"]) == (strategy, "float32")}
        rows.append((strategy, *(f"{1e3 * cells[size]:.3f}" for size in sizes), f"{1e3 * whole:.0f}"))
    return markdown(
        ("float32 on 2x4, ms", *(f"{size:,} B" for size in sizes), "gradient"),
        rows,
        f"Medians of {record['repeats']}; gradient: the {gradient['bytes']:,} bytes of ResNet-50 in the messages of a run. "
        f"Eight virtual devices on {made_on(record)}: memory traffic without a network.",
    )


def stages(record: dict) -> str:
    rows = []
    for row in record["rows"]:
        rate, threads = row["images_per_second"], row["threads"]
        rows.append((row["stage"], str(threads), f"{rate:,.0f}", f"{rate / threads:,.0f}"))
    return markdown(
        ("stage", "threads", "images/s", "per thread"),
        rows,
        f"JPEGs of {record['file_bytes'] / 1e3:.0f} KB, batches of {record['batch']}; medians of {record['repeats']}; by "
        f"`jaxdp bench input` on {made_on(record)}.",
    )


def step(record: dict) -> str:
    version = next(row["torch"] for row in record["cases"][0]["rows"].values() if "torch" in row)
    made = f"Medians of {record['cases'][0]['rounds']} rounds by `benchmarks/step_vs_pytorch.py` on {made_on(record)}"
    return step_vs_pytorch.table(record, f"{made}, PyTorch {version}.")


def speed(record: dict) -> str:
    rows = []
    for one in record["cases"]:
        size, stem, batch = one["case"].split(":")
        ours = one["rows"]["jaxdp"]
        kept = min(turns.ratio(ours, row) for name, row in one["rows"].items() if name.endswith(":kept"))
        ratios = ours["to_pytorchs_best"], kept, turns.ratio(ours, one["rows"]["jaxdp-linen"])
        shown = (f"{ratio:.2f}" for ratio in ratios)
        rows.append((f"{size}x{size}", stem, batch, f"{ours['images_per_second']:.1f}", *shown))
    columns = (
        "images",
        "stem",
        "batch",
        "images/s",
        "relative to PyTorch",
        "to PyTorch without malloc trimming",
        "to plain Flax",
    )
    made = "float32; medians of the ratios of paired rounds, to the faster of PyTorch's modes; on "
    return markdown(columns, rows, f"{made}{made_on(record)}.")


def speed_on_gpu() -> str:
    """Beside PyTorch, and the folded form beside the separate one if it was measured."""
    found = (read("gpu_best"), "PyTorch", "to_pytorchs_best"), (read("gpu_folded"), "jaxdp", "to_jaxdp")
    return "\n\n".join(gpu_steps(*one) for one in found if one[0])


def gpu_steps(record: dict, base: str, ratio: str) -> str:
    """Steps on a GPU. base: what their speed is relative to; ratio: its name in a row."""
    case = record["cases"][0]
    shown = [
        (
            step_vs_pytorch.TITLES.get(name, name),
            f"{row['images_per_second']:,.0f}",
            "" if row[ratio] is None else f"{row[ratio]:.2f}",
        )
        for name, row in case["rows"].items()
    ]
    shown += [(step_vs_pytorch.TITLES.get(name, name), why, "") for name, why in case["failed"].items()]
    size, _, batch = case["case"].split(":")
    of_modes = "relative to the faster of these modes; " if base == "PyTorch" else ""
    made = f"{size}x{size}, batch {batch}, bfloat16, {of_modes}medians of {case['rounds']} rounds on {made_on(record)}"
    torch = [f", PyTorch {row['torch']}" for row in case["rows"].values() if "torch" in row][:1]
    return markdown(("step", "images/s", f"relative to {base}"), shown, f"{made}{''.join(torch)}.")


def gpu_kernels(record: dict) -> str:
    """The step's time by kind of kernel, if it was profiled."""
    rows = [
        (
            row["kind"],
            f"{row['kernels']:,}",
            f"{1e3 * row['seconds']:.1f}",
            f"{row['bytes'] / 1e9:.1f}",
            f"{row['bytes'] / row['seconds'] / 1e12:.2f}" if row["seconds"] else "",
            f"{row['flop'] / row['seconds'] / 1e12:.0f}" if row["flop"] and row["seconds"] else "",
        )
        for row in (record["kernels"] or {"rows": ()})["rows"]
    ]
    made = f"{record['batch']} images in bfloat16, {1e3 * record['step_seconds']:.1f} ms a step, on {made_on(record)}"
    if published := record["ceilings"].get("published"):
        made += f"; published: {published['bytes_per_second'] / 1e12:.2f} TB/s, {published['flops'] / 1e12:.0f} TFLOP/s"
    return markdown(("kind", "kernels", "ms", "GB", "TB/s", "TFLOP/s"), rows, f"{made}. By `benchmarks/gpu.py position`.")


def gpu_run() -> str:
    run, checks = read("gpu_run"), read("gpu_verify")
    return (
        f"`jaxdp doctor --verify`: {len(checks['proofs'])} checks, {len(checks['failed'])} failed, {checks['seconds']:.0f} s; "
        f"the default run: {100 * run['accuracy']:.2f} % in {run['wall_seconds']:.0f} s, {run['seconds_to_first_step']:.0f} s "
        f"to the first step; both at the same time on {made_on(checks)}."
    )


def folded_on_cpu(record: dict) -> str:
    rows = []
    for one in record["cases"]:
        size, stem, batch = one["case"].split(":")
        rate, ratio = one["rows"]["jaxdp"]["images_per_second"], one["rows"]["jaxdp:folded"]["to_jaxdp"]
        rows.append((f"{size}x{size}, {stem}, {batch}", f"{rate:.1f}", f"{ratio:.2f}"))
    return markdown(
        ("image, stem, batch", "separate, images/s", "folded to separate"),
        rows,
        f"ResNet-50 in float32: medians of {record['cases'][0]['rounds']} paired rounds, by `benchmarks/step_vs_pytorch.py "
        f"--only jaxdp jaxdp:folded` on {made_on(record)}.",
    )


def one_device(record: dict) -> str:
    options = {"given-back": "freed memory goes back to the system", "direct": "direct convolutions"}
    options |= {"autodiff": "the gradients that JAX derives", "untuned": "no XLA options"}
    cases = [one["case"].split(":") for one in record["cases"]]
    rows = [
        (option, *(f"{one['rows'][f'jaxdp:{name}']['to_jaxdp']:.2f}" for one in record["cases"]))
        for name, option in options.items()
    ]
    return markdown(
        ("change", *(f"{size}x{size}, {stem}, batch {batch}" for size, stem, batch in cases)),
        rows,
        f"Speed relative to the unchanged step; medians of {record['cases'][0]['rounds']} paired rounds, by "
        f"`benchmarks/step_vs_pytorch.py --only` on {made_on(record)}.",
    )


MIRRORED = " (with `jaxdp evaluate --flip`)"
GOALS = {  # flags of a recipe -> (goal, published top-1 if it is not the recipe's)
    "imagenet_ffcv_16": ("a first run, in minutes", f"73.8 %{MIRRORED}"),
    "imagenet_mosaic_mild --epochs 28.8 --schedule.warmup-epochs 8": ("76 % in the fewest epochs", None),
    "imagenet_goyal_8k": ("the run that papers compare with, in large batches", "76.26 %"),
    "imagenet_ffcv_16 --epochs 88 --batch.0.until-epoch 71 --schedule.warmup-epochs 2": (
        "78 % in the fewest hours",
        f"78.4 %{MIRRORED}",
    ),
    "imagenet_rsb_a3": ("78 % in 100 epochs of strong augmentation", None),
    "imagenet_rsb_a2": ("almost 80 %", None),
    "imagenet_rsb_a1": ("more than 80 %", None),
    "imagenet_torchvision_v2": ("the most", None),
}
RATE = 2_500  # images of 224x224 a second on each GPU, assumed


def goals() -> str:
    """Recipes by goal: epochs, published accuracy, and hours on 8 GPUs from the plan."""
    rows = []
    for command, (goal, top1) in GOALS.items():
        name, *flags = command.split()
        with contextlib.redirect_stderr(io.StringIO()):
            config = load_config(name, flags)
        plan = make_plan(config, examples=inspect(config)[1], devices=8)
        hours = plan.training_hours(RATE * (224 / config.data.image_size) ** 2)
        published = top1 or re.search(r"Published: ([\d.]+ %)", find_config(name).read_text())[1]
        shown = "`" + command.replace(" --", "` `--", 1) + "`"
        rows.append((goal, shown, f"{config.epochs:g}", published, f"{hours:.2g}"))
    return markdown(
        ("goal", "recipe", "epochs", "published top-1", "hours on 8 GPUs"),
        rows,
        f"Hours: at an assumed {RATE:,} images/s of 224x224 on each GPU, in proportion to the pixels, without evaluation "
        "and augmentation. jaxdp has not trained these recipes; the accuracies are their sources'.",
    )


def of(name: str, table: Callable[[dict], str], script: str = "", *part: str | int) -> Callable[[], str]:
    """The table that a function makes of the record of this name. script: adds what made the record, or a part of it."""

    def made() -> str:
        record = read(name)
        by = f"\n\nBy `benchmarks/{script}` on {made_on(functools.reduce(operator.getitem, part, record))}." if script else ""
        return table(record) + by

    return made


def exact() -> str:
    return collectives.table([read(path.stem) for path in sorted(RESULTS.glob("collectives_*.json"))])


ON_PAGES = {
    "docs/large_batch.md": {
        "large_batch": of("large_batch", large_batch.table),
        "staleness": of("staleness", staleness.table, "staleness.py"),
    },
    "docs/performance.md": {
        "speed": of("step_vs_pytorch", speed),
        "speed_on_gpu": speed_on_gpu,
        "gpu": of("gpu_bytes", compiled.bytes_table),
    },
    "docs/recipes.md": {"goals": goals},
}
MEASUREMENTS = {  # of benchmarks/README.md, which is filled when the manual is built
    "digits": of("digits_seeds", digits_seeds.table),
    "step": of("step_vs_pytorch", step),
    "gpu_run": gpu_run,
    "gpu_kernels": of("gpu_position", gpu_kernels),
    "fashion": of("fashion_vs_pytorch", accuracy.pytorch_table, "accuracy.py", "runs", 0),
    "optimizers": of("training_vs_pytorch", training_vs_pytorch.optimizers_table, "training_vs_pytorch.py"),
    "one_device": of("step_changes", one_device),
    "changes": of("changes_digits", changes.table, "changes.py"),
    "precision": of("folded_precision", folded_precision.table, "folded_precision.py"),
    "folded_on_cpu": of("batch_norm_cpu", folded_on_cpu),
    "steps": of("training_vs_pytorch", training_vs_pytorch.table, "training_vs_pytorch.py"),
    "training": of("batch_norm_training", accuracy.forms_table, "accuracy.py", "runs", 0),
    "memory": of("memory", compiled.memory_table, "compiled.py"),
    "lr_range": of("lr_range", lr_range.table, "lr_range.py"),
    "startup": of("startup", startup.table),
    "allreduce": of("allreduce_cpu", allreduce),
    "compiled": of("compiled", compiled.strategies_table),
    "compiled_updates": of("compiled_updates", compiled.updates_table),
    "compiled_tpu": of("compiled_tpu", compiled.tpu_table),
    "network": of("network", network.steps_table, "cluster/network.py", "steps"),
    "network_bytes": of("network", network.bytes_table),
    "exact": exact,
    "audit": of("audit", audit.table, "audit.py"),
    "stages": of("input_cpu", stages),
    "input": of("input_vs_peers", loaders.decoders_table),
    "cores": of("input_cores", loaders.cores_table),
    "loader": of("loader_augmentations", loaders.augmentations_table),
    "chaos": of("chaos", chaos.table, "chaos.py"),
    "cuts": of("network", network.cuts_table, "cluster/network.py", "cuts"),
    "mutations": of("mutations", mutations.table, "mutations.py"),
}


def filled(text: str, tables: dict) -> str:
    """The text of a page with the part between each pair of markers replaced."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: made by benchmarks/tables.py -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + table() + "\n" + end + rest.split(end, 1)[1]
    return text


def main():
    arguments = sys.argv[1:]
    if names := [name for name in arguments if name != "--check"]:
        print("\n\n".join(MEASUREMENTS[name]() for name in names))
        return
    stale = []
    for page, tables in ON_PAGES.items():
        path = ROOT / page
        old = path.read_text()
        new = filled(old, tables)
        if new != old:
            stale.append(page)
        if "--check" not in arguments:
            path.write_text(new)
    if "--check" in arguments:
        for table in MEASUREMENTS.values():
            table()  # raises if a script no longer fits its record
    if "--check" in arguments and stale:
        sys.exit(f"{', '.join(stale)}: out of date; run python benchmarks/tables.py")


if __name__ == "__main__":
    main()
