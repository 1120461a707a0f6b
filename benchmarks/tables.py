"""The tables of the manual, from benchmarks/results/.

python benchmarks/tables.py          write those on the pages of docs/
python benchmarks/tables.py --check  fail if one of them is out of date
python benchmarks/tables.py NAME...  print tables, such as those of benchmarks/README.md
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cluster"))
import audit
import batch_norm_training
import changes
import chaos
import collectives
import digits_seeds
import fashion_vs_pytorch
import folded_precision
import large_batch
import loader_augmentations as loader_benchmark
import lr_range
import memory
import network
import object_storage_data
import object_storage_runs
import other_devices
import process_failures
import saving
import staleness
import training_vs_pytorch
import turns

from jaxdp.data.sources import inspect
from jaxdp.planning import make_plan
from jaxdp.recipes import find_config, load_config

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def digits() -> str:
    measured = json.loads((RESULTS / "digits_seeds.json").read_text())
    groups: dict[str, list[dict]] = {}
    for row in measured["runs"]:
        kind, code = row["as"], row["code"]
        words = [] if kind == "default" else [kind]
        words += [f"processor with {digits_seeds.vectors_of(row)}"] + [f"code for {code}"] * (code != digits_seeds.NATIVE)
        groups.setdefault(", ".join(words), []).append(row)
    lines = ["| | runs | worst | median | best |", "|---" * 5 + "|"]
    for name, rows in groups.items():
        spread = digits_seeds.spread(rows)
        lines.append(
            f"| {name} | {spread['runs']} | " + " | ".join(f"{spread[key]:.2f} %" for key in ("worst", "median", "best")) + " |"
        )
    timed = [row for row in measured["timed"] if row["recipe"] == "now"]
    if timed:
        lines += ["", "| compilation cache | whole command | first step | images/s in training |", "|---|---|---|---|"]
    for row in timed:
        whole, first = (f"{row[key]:.0f} s" for key in ("wall_seconds", "seconds_to_first_step"))
        lines.append(f"| {row['cache']} | {whole} | {first} | {row['images_per_second']:.0f} |")
    made = measured["runs"][0]["provenance"]
    ending = f"JAX {made['versions']['jax']}"
    if timed:
        row, epochs = timed[0], measured["config"]["epochs"]
        one = row["seconds_to_first_step"] + (row["training_seconds"] + row["evaluation_seconds"]) / epochs
        cores = ", ".join(sorted({str(row["provenance"]["cores"]) for row in timed}))
        ending += f"; durations on {cores} cores, compilation included (one of the {epochs:g} epochs: about {one:.0f} s)"
    split = (
        "The recipe was chosen on the validation split: 1,149 of the 1,437 training images to train, the other 288 to evaluate."
    )
    return "\n".join(
        [
            *lines,
            "",
            "Held-out accuracy of runs with seeds from 0 to 9, by `benchmarks/digits_seeds.py`, on an "
            f"{made['processor']}, Python {made['python']}, {ending}. {split}",
        ]
    )


def made_on(record: dict) -> str:
    made = record["provenance"]
    return f"{made['cores']} cores of an {made['processor']}, Python {made['python']}, JAX {made['versions']['jax']}"


def allreduce() -> str:
    record = json.loads((RESULTS / "allreduce_cpu.json").read_text())
    sizes = sorted({row["bytes"] for row in record["rows"]})
    lines = [
        "| float32 on 2x4, ms | " + " | ".join(f"{size:,} B" for size in sizes) + " | gradient |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for strategy, whole in record["gradient"]["seconds"].items():
        cells = {r["bytes"]: r["seconds"] for r in record["rows"] if (r["strategy"], r["dtype"]) == (strategy, "float32")}
        lines.append(f"| {strategy} | " + " | ".join(f"{1e3 * cells[size]:.3f}" for size in sizes) + f" | {1e3 * whole:.0f} |")
    gradient = record["gradient"]
    return "\n".join(
        [
            *lines,
            "",
            f"Medians of {record['repeats']}; gradient: the {gradient['bytes']:,} bytes of ResNet-50 in the messages of a run. "
            f"Eight virtual devices on {made_on(record)}: memory traffic without a network.",
        ]
    )


def scaling() -> str:
    record = json.loads((RESULTS / "scaling_cifar10_cpu.json").read_text())
    lines = [
        "| scaling | devices | global batch | step | images/s | speed-up | efficiency | exposed communication | waiting |",
        "|---" * 9 + "|",
    ]
    for row in record["rows"]:
        exposed, whole = row["exposed_communication_seconds"], row["step_seconds"]
        lines.append(
            f"| {row['mode']} | {row['devices']} | {row['global_batch']} | {1e3 * whole:.0f} ms "
            f"| {row['images_per_second']:.1f} | {row['speed_up']:.2f} | {100 * row['efficiency']:.0f} % "
            f"| {1e3 * exposed:.0f} ms ({100 * exposed / whole:.0f} %) | {1e3 * row['waiting_seconds']:.0f} ms |"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"{record['model']}, {record['strategy']}; medians of {record['repeats']} on {made_on(record)}. "
            "The devices share two cores, so more devices do not compute faster: a check of correctness, not of network speed.",
        ]
    )


def compiled() -> str:
    results = json.loads((RESULTS / "compiled.json").read_text())
    lines = ["| strategy | GPUs | messages | bytes covered | kernels | GB moved | memory per GPU |", "|---" * 7 + "|"]
    for step in results:
        total = {
            key: sum(collective[key] for collective in step["collectives"])
            for key in ("count", "operand_bytes", "covered_bytes")
        }
        lines.append(
            f"| {step['name']} | {step['hosts']}x{step['gpus_per_host']} | {total['count']} "
            f"| {100 * total['covered_bytes'] / total['operand_bytes']:.0f} % | {step['kernels']:,} "
            f"| {step['kernel_bytes'] / 1e9:.1f} | {step['memory_bytes'] / 1e9:.1f} GB |"
        )
    source = f"compiled by `benchmarks/compiled.py` with JAX {results[0]['jax']}; nothing was run."
    return "\n".join([*lines, "", f"ResNet-50 in bfloat16, 256 images per GPU, {source}"])


def compiled_updates() -> str:
    rows = json.loads((RESULTS / "compiled_updates.json").read_text())
    lines = [
        "| JAX | images per GPU | update | buckets | kernels | GB moved | update and communication | bytes covered | memory |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        alone = row["gradient_alone"]
        kernels, moved = row["kernels"] - alone["kernels"], row["kernel_bytes"] - alone["kernel_bytes"]
        lines.append(
            f"| {row['jax']} | {row['images']} | {row['update']} | {row['buckets']} | {row['kernels']:,} "
            f"| {row['kernel_bytes'] / 1e9:.2f} | {kernels:,} kernels, {moved / 1e9:.2f} GB "
            f"| {100 * row['covered_bytes'] / row['operand_bytes']:.0f} % | {row['memory_bytes'] / 1e9:.2f} GB |"
        )
    return "\n".join([*lines, "", "By `benchmarks/compiled_updates.py`; nothing was run."])


def input_vs_peers() -> str:
    record = json.loads((RESULTS / "input_vs_peers.json").read_text())
    lines = ["| loader | images/s | per core | speed of jaxdp |", "|---|---|---|---|"]
    for name, rate in record["medians"].items():
        ratio = record["medians"]["jaxdp"] / rate
        lines.append(f"| {name} | {rate:,.0f} | {rate / record['workers']:,.0f} | {ratio:.2f} x |")
    versions = record["provenance"]["versions"]
    return "\n".join(
        [
            *lines,
            "",
            f"Medians of {len(record['rates']['jaxdp'])} alternating rounds with {record['workers']} workers, by "
            f"`benchmarks/input_vs_peers.py` on {made_on(record)}, PyTorch {versions['torch']}, Grain {versions['grain']}.",
        ]
    )


def loader_augmentations() -> str:
    record = json.loads((RESULTS / "loader_augmentations.json").read_text())
    ours = {"crop and flip": "unfiltered"}
    lines = ["| random crops and flips, and | torchvision, images/s | jaxdp, images/s | |", "|---|---|---|---|"]
    rates, host = record["medians"], record["medians"]["jaxdp, unfiltered crops"]
    for name, rate in rates.items():
        maker, _, what = name.partition(", ")
        if maker == "torchvision":
            lines.append(f"| {'nothing else' if what in ours else what} | {rate:,.0f} | {host:,.0f} | {host / rate:.1f} x |")
    plain = rates["torchvision, crop and flip"]
    for name in ("bilinear", "bicubic", "random"):
        rate = rates[f"jaxdp, {name} crops"]
        peer = f"{plain:,.0f} | {rate:,.0f} | {rate / plain:.1f} x" if name == "bilinear" else f"| {rate:,.0f} |"
        lines.append(f"| {name} antialiased crops | {peer} |")
    timm, torchvision = record["timm"], record["provenance"]["versions"]["torchvision"]
    version, load = timm["provenance"]["versions"]["timm"], timm["load_average"]
    rates = timm["medians"]
    lines += ["", "| crops with a random filter and flips, and | timm, images/s | jaxdp, images/s | |", "|---|---|---|---|"]
    for name, rate in rates.items():
        maker, _, what = name.partition(", random crops")
        if maker == "timm":
            host = rates["jaxdp, random crops" + what.replace(f", {loader_benchmark.POLICY}", "")]
            lines.append(f"| {what.removeprefix(', ') or 'nothing else'} | {rate:,.0f} | {host:,.0f} | {host / rate:.1f} x |")
    return "\n".join(
        [
            *lines,
            "",
            f"Medians of {len(next(iter(record['rates'].values())))} alternating rounds with {record['workers']} workers, by "
            f"`benchmarks/loader_augmentations.py` on {made_on(record)}, torchvision {torchvision} in PyTorch's DataLoader; "
            f"other programs used the cores, too. The second table, with timm {version}, is of another run, at a load average "
            f"of {load:.0f}: compare rates within a table only.",
        ]
    )


def input_stages() -> str:
    record = json.loads((RESULTS / "input_cpu.json").read_text())
    lines = ["| stage | threads | images/s | per thread |", "|---|---|---|---|"]
    for row in record["rows"]:
        rate, threads = row["images_per_second"], row["threads"]
        lines.append(f"| {row['stage']} | {threads} | {rate:,.0f} | {rate / threads:,.0f} |")
    made = f"JPEGs of {record['file_bytes'] / 1e3:.0f} KB, batches of {record['batch']}; medians of {record['repeats']}"
    made += f"; looking up the samples of a step in epoch 40 of ImageNet takes {1e3 * record['seek_seconds']:.0f} ms"
    return "\n".join([*lines, "", f"{made}; by `jaxdp bench input` on {made_on(record)}."])


def of(table, script: str, part: str | None = None, result: str | None = None):
    """The table that a script makes of its results, or of a part of them. result: file name, if not that of the script."""

    def made() -> str:
        record = json.loads((RESULTS / f"{result or Path(script).stem}.json").read_text())
        return f"{table(record)}\n\nBy `benchmarks/{script}` on {made_on(record[part] if part else record)}."

    return made


def training() -> str:
    record = json.loads((RESULTS / "batch_norm_training.json").read_text())
    made = made_on(record["runs"][0])
    return f"{batch_norm_training.table(record)}\n\nBy `benchmarks/batch_norm_training.py` on {made}."


def fashion() -> str:
    record = json.loads((RESULTS / "fashion_vs_pytorch.json").read_text())
    made = made_on(record["runs"][0])
    return f"{fashion_vs_pytorch.table(record)}\n\nBy `benchmarks/fashion_vs_pytorch.py` on {made}."


def folded_on_cpu() -> str:
    record = json.loads((RESULTS / "batch_norm_cpu.json").read_text())
    lines = ["| image, stem, batch | separate, images/s | folded to separate |", "|---|---|---|"]
    for one in record["cases"]:
        size, stem, batch = one["case"].split(":")
        rows = one["rows"]
        speed, ratio = rows["jaxdp"]["images_per_second"], rows["jaxdp:folded"]["to_jaxdp"]
        lines.append(f"| {size}x{size}, {stem}, {batch} | {speed:.1f} | {ratio:.2f} |")
    made = (
        f"medians of {record['cases'][0]['rounds']} paired rounds, by `benchmarks/step_vs_pytorch.py --only jaxdp jaxdp:folded`"
    )
    return "\n".join([*lines, "", f"ResNet-50 in float32: {made} on {made_on(record)}."])


def large_batches() -> str:
    record = json.loads((RESULTS / "large_batch.json").read_text())
    lars = ", ".join(f"{rate:g} at {batch}" for batch, rate in record["rates"]["lars"].items())
    rates = f"Learning rates: SGD {record['rates']['sgd']:g} at {large_batch.SMALLEST} images; LARS {lars}"
    return f"{large_batch.table(record['rows'])}\n\n{rates}. By `benchmarks/large_batch.py` on {made_on(record)}."


def stale_gradients() -> str:
    record = json.loads((RESULTS / "staleness.json").read_text())
    return f"{staleness.table(record)}\n\nBy `benchmarks/staleness.py` on {made_on(record)}."


def exact() -> str:
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("collectives_*.json"))]
    largest = {}
    for row in (row for record in records for row in record["rows"]):
        largest[row["layout"]] = max(row["bytes"], largest.get(row["layout"], 0))
    sizes = ", ".join(f"{size / 1e6:.0f} MB on {layout}" for layout, size in largest.items())
    caption = f"Wrong calls, by processes x devices per process; messages from 64 KB to {sizes}."
    lines = [collectives.counts_table(records), "", caption]
    lines += ["", collectives.speed_table(records[0]), ""]
    lines += ["Time of the whole torus relative to the form in use (median over layouts and meshes)."]
    return "\n".join([*lines, "", f"By `benchmarks/collectives.py` on {'; '.join(map(made_on, records))}."])


NAMES = {"jaxdp": "jaxdp", "jaxdp-linen": "plain Flax", "torch": "PyTorch", "torch-compile": "PyTorch, compiled"}
NAMES |= {"jaxdp:given-back": "jaxdp, malloc trimming"}
NAMES |= {"torch-reduce": "PyTorch, reduce-overhead", "torch-max": "PyTorch, max-autotune"}
NAMES |= {"torch:kept": "PyTorch, no malloc trimming", "torch-compile:kept": "PyTorch, compiled, no malloc trimming"}


def step() -> str:
    record = json.loads((RESULTS / "step_vs_pytorch.json").read_text())
    lines = [
        "| images | stem | batch | step | images/s | slowest to fastest round | relative to PyTorch |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in record["cases"]:
        size, stem, batch = one["case"].split(":")
        for name, row in one["rows"].items():
            spread = f"{int(batch) / row['slowest']:.1f} to {int(batch) / row['fastest']:.1f}"
            rate, ratio = f"{row['images_per_second']:.1f}", f"{row['to_pytorchs_best']:.2f}"
            lines.append(f"| {size}x{size} | {stem} | {batch} | {NAMES[name]} | {rate} | {spread} | {ratio} |")
    version = next(row["torch"] for row in record["cases"][0]["rows"].values() if "torch" in row)
    rounds = record["cases"][0]["rounds"]
    made = f"Medians of {rounds} rounds by `benchmarks/step_vs_pytorch.py` on {made_on(record)}, PyTorch {version}."
    return "\n".join([*lines, "", made])


def speed() -> str:
    record = json.loads((RESULTS / "step_vs_pytorch.json").read_text())
    columns = (
        "images",
        "stem",
        "batch",
        "images/s",
        "relative to PyTorch",
        "to PyTorch without malloc trimming",
        "to plain Flax",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for one in record["cases"]:
        size, stem, batch = one["case"].split(":")
        ours = one["rows"]["jaxdp"]
        kept = min(turns.ratio(ours, row) for name, row in one["rows"].items() if name.endswith(":kept"))
        ratios = ours["to_pytorchs_best"], kept, turns.ratio(ours, one["rows"]["jaxdp-linen"])
        cells = f"{size}x{size}", stem, batch, f"{ours['images_per_second']:.1f}", *(f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| {' | '.join(cells)} |")
    made = "float32; medians of the ratios of paired rounds, to the faster of PyTorch's modes; on "
    made += f"{made_on(record)}. No GPU was available."
    return "\n".join([*lines, "", made])


def start() -> str:
    record = json.loads((RESULTS / "step_cpu.json").read_text())
    lines = ["| compilation cache | first step | whole command |", "|---|---|---|"]
    for name, row in record["first_steps"].items():
        lines.append(f"| {name} | {row['to_first_step']:.1f} s | {row['whole_command']:.1f} s |")
    return "\n".join([*lines, "", f"By `jaxdp bench step` on {made_on(record)}."])


def gpu() -> str:
    record = json.loads((RESULTS / "gpu_bytes.json").read_text())
    kinds = ("convolution", "input gradient", "weight gradient", "forward", "backward", "rest")
    lines = ["| step | " + " | ".join(kinds) + " | total | kernels | images/s at most |", "|---" * (len(kinds) + 4) + "|"]
    for one in record["results"]:
        megabytes = one["megabytes_an_image"]
        sums = [sum(value for name, value in megabytes.items() if name.split(" ", 1)[-1] == kind) for kind in kinds]
        sums[-1] = megabytes["rest rest"]
        cells = " | ".join(f"{value:.1f}" for value in sums)
        lines.append(
            f"| {one['case']} | {cells} | {one['all_megabytes_an_image']:.1f} | {one['kernels']:,} "
            f"| {one['floor_images_per_second']:,.0f} |"
        )
    limits, made = record["results"][0]["limits"], record["provenance"]["versions"]["jax"]
    return "\n".join(
        [
            *lines,
            "",
            f"Upper bound: every kernel at the published {limits['bytes_per_second'] / 1e12:.1f} TB/s and "
            f"{limits['flops'] / 1e12:.0f} TFLOP/s. Compiled with JAX {made}; nothing was run.",
        ]
    )


def one_device() -> str:
    record = json.loads((RESULTS / "step_changes.json").read_text())
    changes = {"given-back": "freed memory goes back to the system", "direct": "direct convolutions"}
    changes |= {"autodiff": "the gradients that JAX derives", "untuned": "no XLA options"}
    cases = [one["case"].split(":") for one in record["cases"]]
    lines = ["| change | " + " | ".join(f"{size}x{size}, {stem}, batch {batch}" for size, stem, batch in cases) + " |"]
    lines += ["|---" * (len(cases) + 1) + "|"]
    for name, change in changes.items():
        ratios = (one["rows"][f"jaxdp:{name}"]["to_jaxdp"] for one in record["cases"])
        lines.append(f"| {change} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    made = f"Speed relative to the unchanged step; medians of {record['cases'][0]['rounds']} paired rounds, by"
    return "\n".join([*lines, "", f"{made} `benchmarks/step_vs_pytorch.py --only` on {made_on(record)}."])


MIRRORED = " (mean of an image and its mirror image, which jaxdp does not evaluate)"
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
    lines = ["| goal | recipe | epochs | published top-1 | hours on 8 GPUs |", "|---|---|---|---|---|"]
    for command, (goal, accuracy) in GOALS.items():
        name, *flags = command.split()
        with contextlib.redirect_stderr(io.StringIO()):
            config = load_config(name, flags)
        plan = make_plan(config, examples=inspect(config)[1], devices=8)
        hours = plan.training_hours(RATE * (224 / config.data.image_size) ** 2)
        published = accuracy or re.search(r"Published: ([\d.]+ %)", find_config(name).read_text())[1]
        shown = "`" + command.replace(" --", "` `--", 1) + "`"
        lines.append(f"| {goal} | {shown} | {config.epochs:g} | {published} | {hours:.2g} |")
    return "\n".join(
        [
            *lines,
            "",
            f"Hours: at an assumed {RATE:,} images/s of 224x224 on each GPU, in proportion to the pixels, without evaluation "
            "and augmentation. jaxdp has not trained these recipes; the accuracies are their sources'.",
        ]
    )


ON_PAGES = {
    "docs/large_batch.md": {"large_batch": large_batches, "staleness": stale_gradients},
    "docs/performance.md": {"speed": speed, "gpu": gpu},
    "docs/recipes.md": {"goals": goals},
}
MEASUREMENTS = {  # of benchmarks/README.md, which is filled when the manual is built
    "digits": digits,
    "step": step,
    "fashion": fashion,
    "optimizers": of(training_vs_pytorch.optimizers_table, "training_vs_pytorch.py"),
    "one_device": one_device,
    "changes": of(changes.table, "changes.py", result="changes_digits"),
    "precision": of(folded_precision.table, "folded_precision.py"),
    "folded_on_cpu": folded_on_cpu,
    "steps": of(training_vs_pytorch.table, "training_vs_pytorch.py"),
    "training": training,
    "memory": of(memory.table, "memory.py"),
    "lr_range": of(lr_range.table, "lr_range.py"),
    "start": start,
    "allreduce": allreduce,
    "scaling": scaling,
    "compiled": compiled,
    "compiled_updates": compiled_updates,
    "changes_update": of(changes.table, "changes.py", result="changes_update"),
    "updates": of(network.updates_table, "cluster/network.py", "updates"),
    "network": of(network.bytes_table, "cluster/network.py", "bytes"),
    "exact": exact,
    "audit": of(audit.table, "audit.py"),
    "stages": input_stages,
    "input": input_vs_peers,
    "loader": loader_augmentations,
    "devices": of(other_devices.table, "other_devices.py"),
    "chaos": of(chaos.table, "chaos.py"),
    "object_storage_data": of(object_storage_data.table, "object_storage_data.py"),
    "object_reads": of(object_storage_data.reads_table, "object_storage_data.py"),
    "object_storage_runs": of(object_storage_runs.table, "object_storage_runs.py"),
    "saving": of(saving.table, "saving.py"),
    "process_failures": of(process_failures.table, "process_failures.py"),
    "cuts": of(network.cuts_table, "cluster/network.py", "cuts"),
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
    if "--check" in arguments and stale:
        sys.exit(f"{', '.join(stale)}: out of date; run python benchmarks/tables.py")


if __name__ == "__main__":
    main()
