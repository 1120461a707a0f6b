"""The training step of ResNet-50, compiled by XLA for GPUs and TPUs that are not there; nothing is run.

    python benchmarks/compiled.py strategies | updates | bytes | memory      (extra cuda13, no GPU)
    python benchmarks/compiled.py tpu | tpu_recipes                          (extra tpu, no TPU)

- strategies: messages of each strategy and what they overlap with, on 8 and on 512 H200 GPUs
- updates: a replicated and a sharded update on a 2x4 mesh of H200 GPUs; update and communication are what the step has more
  than its gradient on one device, which is compiled separately. Replaces the rows of the installed JAX
- bytes: bytes of operands and results of every kernel, and FLOP of convolutions, on one H100. No kernel is faster than its
  bytes at the memory bandwidth, nor than its FLOP at the peak rate; the sum of the larger times is a lower bound of the step.
  --change names what this checkout has more than the rows before it; --forms are of batch normalization
- memory: the estimate of `jaxdp plan` compared with what XLA allocates on one H100. The difference of two batches is the memory
  per image
- tpu: a small ResNet with every strategy, form of update and normalization, dtype and phase, on TPU slices
- tpu_recipes: ResNet-50 of published recipes on a slice of 2x4 TPU v5e; takes long. Both replace rows of one record

Each writes its record in benchmarks/results/.
"""

import dataclasses
import json
import math
import os
from collections import defaultdict
from typing import NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from common import arguments, markdown, read, write
from jax.experimental import topologies
from jax.sharding import PartitionSpec

import jaxdp
from jaxdp import models
from jaxdp.analysis import aot, memory
from jaxdp.analysis.gpu_targets import GPU_TARGETS, target_config
from jaxdp.analysis.tpu_targets import sides_of
from jaxdp.bench.environment import provenance
from jaxdp.bench.step import published_ceilings
from jaxdp.config import at_image_size
from jaxdp.errors import ConfigError
from jaxdp.parallel.mesh import AXES, make_mesh
from jaxdp.planning import Plan, make_plan
from jaxdp.sizes import model_summary
from jaxdp.strategies import STRATEGIES as NAMES
from jaxdp.training.step import make_layout, step_gradient, without_reduction
from jaxdp.training.step_compiler import abstract_arguments
from jaxdp.xla import hlo, kernels
from jaxdp.xla import options as xla_options

GPU = "h200"
SONY = ["--model.dtype", "bfloat16", "--optimizer.loss-scale", "none", "--reduce.wire-dtype", "bfloat16"]
SONY += ["--optimizer.momentum-rule", "constant"]
BUCKETS = ["--reduce.bucket-bytes", "65536"]
AT_THE_END = ["--reduce.no-overlap"]  # with XLA's default options: it then combines all-reduces
WAYS = {"": [], ", 64 KiB": BUCKETS, ", at the end": AT_THE_END, ", 64 KiB, at the end": [*BUCKETS, *AT_THE_END]}
STRATEGIES = [(strategy, way, 1) for strategy in ("psum", "torus") for way in WAYS]
STRATEGIES += [("hierarchical", "", 1), ("ring", "", 1)]
STRATEGIES += [(strategy, way, 64) for strategy in ("psum", "torus") for way in ("", ", 64 KiB, at the end")]
IMAGES = 16, 32, 256  # on each GPU, of `updates`
SIDES = {224: "images", 112: "112", 56: "56", 28: "28", 14: "14", 7: "7"}
MEMORY_BATCHES = 16, 48
NETWORKS = {
    "ResNet-50, bfloat16": ["--model.dtype", "bfloat16"],
    "ResNet-50, float32": [],
    "ResNet-50, bfloat16, remat": ["--model.dtype", "bfloat16", "--model.remat"],
    "ResNet-18, float32": ["--model.depth", "18"],
    "ResNet-152, bfloat16": ["--model.depth", "152", "--model.dtype", "bfloat16"],
}
TWO_BLOCKS = 6
TORUS = ["--reduce.strategy", "torus"]
SMALL = ["--data.image-size", "64", "--data.stored-size", "None", "--data.augmentation", "none", "--model.width", "16"]


class TpuStep(NamedTuple):
    flags: list[str]
    recipe: str = "imagenet_mlperf_3264"
    target: str = "v5e:2x4"
    phase: int = 0
    step: str = "training"


TPU_STEPS = {name: TpuStep(["--reduce.strategy", name]) for name in NAMES}
TPU_STEPS |= {
    "torus, bfloat16 on the wire": TpuStep([*TORUS, "--reduce.wire-dtype", "bfloat16"]),
    "torus, sharded update": TpuStep([*TORUS, "--reduce.update", "sharded"]),
    "torus, folded normalization": TpuStep([*TORUS, "--model.batch-norm", "folded"]),
    "torus, synchronized normalization": TpuStep([*TORUS, "--model.norm", "synchronized"]),
    "torus, float32, SGD": TpuStep(TORUS, recipe="imagenet_goyal_256"),
    "torus, float16, loss scale, phase 1": TpuStep([], recipe="imagenet_sony_exp1", phase=1),
    "evaluation step": TpuStep(TORUS, step="evaluation"),
    "torus on 4x8": TpuStep(TORUS, target="v5e:4x8"),
    "torus on v5p": TpuStep(TORUS, target="v5p:2x2x2"),
    "torus on v6e": TpuStep(TORUS, target="v6e:2x4"),
}
TPU_RECIPES = {
    "ResNet-50, evaluation step": TpuStep([], step="evaluation"),
    "ResNet-50, RSB A3": TpuStep([], recipe="imagenet_rsb_a3"),
    "ResNet-50, MLPerf": TpuStep([]),
    "ResNet-50, Goyal et al., bfloat16": TpuStep(["--model.dtype", "bfloat16"], recipe="imagenet_goyal_256"),
}


def plan_of(recipe: str, images: int, flags: list[str], *, devices: int = 1, hosts: int = 1) -> Plan:
    """The plan of a recipe with this number of images on each device."""
    batch = ["--batch.0.global-batch", str(devices * images), "--batch.0.per-worker-batch", str(images)]
    return jaxdp.plan(jaxdp.load_config(recipe, [*batch, *flags]), devices, hosts)


def compiled(plan: Plan, gpu: str = GPU, *, hosts: int = 1, gpus_per_host: int = 1) -> aot.CompiledStep:
    return aot.compile_for(plan, 0, target=gpu, hosts=hosts, gpus_per_host=gpus_per_host)


def strategies() -> None:
    results, made = [], provenance()
    for strategy, way, hosts in STRATEGIES:
        flags = [*SONY, "--reduce.strategy", strategy, *WAYS[way]]
        plan = plan_of("imagenet_sony_exp1", 256, flags, devices=8 * hosts, hosts=hosts)
        with mock.patch.dict(xla_options.TUNED, clear=AT_THE_END[0] in flags):
            step = aot.as_dict(compiled(plan, hosts=hosts, gpus_per_host=8))
        results.append({"name": strategy + way} | step | {"flags": flags, "provenance": made})
        print(json.dumps(results[-1] | {"flags": None, "provenance": None}), flush=True)
        write("compiled", results)


def total(step: dict, name: str) -> int:
    return sum(collective[name] for collective in step["collectives"])


def strategies_table(results: list[dict]) -> str:
    rows = []
    for step in results:
        covered = 100 * total(step, "covered_bytes") / total(step, "operand_bytes")
        gpus, messages = f"{step['hosts']}x{step['gpus_per_host']}", str(total(step, "count"))
        sizes = f"{step['kernel_bytes'] / 1e9:.1f}", f"{step['memory_bytes'] / 1e9:.1f} GB"
        rows.append((step["name"], gpus, messages, f"{covered:.0f} %", f"{step['kernels']:,}", *sizes))
    return markdown(
        ("strategy", "GPUs", "messages", "bytes covered", "kernels", "GB moved", "memory per GPU"),
        rows,
        f"ResNet-50 in bfloat16, 256 images per GPU, compiled by `benchmarks/compiled.py` with JAX {results[0]['jax']}; "
        "nothing was run.",
    )


def gradient_alone(plan: Plan) -> dict:
    """Kernels and bytes of the gradient of one device, without reduction and update."""
    phase = plan.phases[0]
    target = target_config(GPU_TARGETS[GPU])
    topology = topologies.get_topology_desc("", platform="cuda", target_config=target, topology="1x1x8")
    mesh = make_mesh(*phase.shape, topology.devices)
    config = at_image_size(without_reduction(plan.config), phase.image_size)
    model = models.create(config.model, platform="gpu")

    layout = make_layout(config, model, mesh)

    def gradient(state, batch, hyperparameters):
        found, _ = step_gradient(config, layout, pixel_stats=(0.0, 1.0))(state, batch, hyperparameters["seed"])
        return jax.tree.map(lambda leaf: leaf[None], found)

    everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(everywhere, rows, everywhere), out_specs=rows, check_vma=False)
    traced = jax.jit(mapped).trace(*abstract_arguments(config, model, phase, mesh=mesh))
    compiler_options = xla_options.compiler_options(config, "gpu")
    text = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options).as_text()
    schedule = hlo.read_schedule(text, mesh.size)
    return {"kernels": schedule.kernels, "kernel_bytes": schedule.kernel_bytes}


def updates() -> None:
    rows = [row for row in read("compiled_updates", []) if row["jax"] != jax.__version__]
    made = provenance()
    for images in IMAGES:
        alone = gradient_alone(plan_of("imagenet_sony_exp1", images, SONY, devices=8))
        for update in ("replicated", "sharded"):
            for buckets, flags in {"one a segment": [], "64 KiB": BUCKETS}.items():
                plan = plan_of("imagenet_sony_exp1", images, [*SONY, "--reduce.update", update, *flags], devices=8)
                step = aot.as_dict(compiled(plan, gpus_per_host=8))
                facts = {"images": images, "update": update, "buckets": buckets, "jax": jax.__version__}
                sizes = {name: step[name] for name in ("kernels", "kernel_bytes", "memory_bytes")}
                sizes |= {name: total(step, name) for name in ("count", "operand_bytes", "covered_bytes")}
                rows.append(facts | sizes | {"gradient_alone": alone, "collectives": step["collectives"]})
                print(json.dumps(rows[-1] | {"collectives": None}), flush=True)
                rows[-1]["provenance"] = made
                write("compiled_updates", rows)


def updates_table(results: list[dict]) -> str:
    columns = "JAX", "images per GPU", "update", "buckets", "kernels", "GB moved", "update and communication"
    rows = []
    for row in results:
        alone = row["gradient_alone"]
        kernels, moved = row["kernels"] - alone["kernels"], row["kernel_bytes"] - alone["kernel_bytes"]
        sizes = f"{row['kernels']:,}", f"{row['kernel_bytes'] / 1e9:.2f}", f"{kernels:,} kernels, {moved / 1e9:.2f} GB"
        covered = f"{100 * row['covered_bytes'] / row['operand_bytes']:.0f} %"
        facts = row["jax"], str(row["images"]), row["update"], row["buckets"]
        rows.append((*facts, *sizes, covered, f"{row['memory_bytes'] / 1e9:.2f} GB"))
    return markdown((*columns, "bytes covered", "memory"), rows, "By `benchmarks/compiled.py`; nothing was run.")


def bytes_of_kernels(change: str, forms: list[str]) -> None:
    """Replaces the rows of the change and the installed JAX."""
    gpu, batch = "h100", 256
    rows = [row for row in read("gpu_bytes", []) if (row["change"], row["jax"]) != (change, jax.__version__)]
    limits = published_ceilings(GPU_TARGETS[gpu].name, "bfloat16", 1)
    for form in forms:
        flags = ["--model.dtype", "bfloat16", "--reduce.strategy", "psum", "--model.batch-norm", form]
        step = compiled(plan_of("imagenet_goyal_256", batch, flags), gpu)
        found, table = kernels.kernels_of_step(step.text, batch), defaultdict(float)
        for one in found:
            side = next((name for limit, name in sorted(SIDES.items()) if 0 < one.side <= limit + 3), "rest")
            table[f"{side} {one.kind}"] += one.bytes / batch / 1e6
        by_kind = kernels.summarize_by_kind(found, None, limits)
        moved, flop, least = (sum(row[what] for row in by_kind) for what in ("bytes", "flop", "least_seconds"))
        row = {"change": change, "form": form, "jax": jax.__version__, "flags": flags, "gpu": GPU_TARGETS[gpu].name}
        row |= {
            "batch": batch,
            "kernels": len(found),
            "kernels_by_kind": {row["kind"]: row["kernels"] for row in by_kind},
            "megabytes_an_image": dict(table),
            "all_megabytes_an_image": moved / batch / 1e6,
            "convolutions_gigaflop_an_image": flop / batch / 1e9,
            "limits": limits,
            "least_milliseconds": {row["kind"]: 1e3 * row["least_seconds"] for row in by_kind},
            "floor_images_per_second": batch / least,
            "memory_bytes": step.memory_bytes,
            "provenance": provenance(),
        }
        rows.append(row)
        print({name: value for name, value in row.items() if name != "provenance"}, flush=True)
        write("gpu_bytes", rows)


def bytes_table(rows: list[dict]) -> str:
    kinds, cells = ("convolution", "input gradient", "weight gradient", "forward", "backward"), []
    first = rows[0]["jax"]  # of JAX's versions
    for row in rows:
        if row["jax"] == first and (row["form"] == "separate" or row["change"] == rows[-1]["change"]):
            megabytes = row["megabytes_an_image"]
            sums = [sum(value for name, value in megabytes.items() if name.split(" ", 1)[1] == kind) for kind in kinds]
            sums += [megabytes["rest rest"], row["all_megabytes_an_image"]]
            name = row["change"] if row["form"] == "separate" else "folded form"
            counts = f"{row['kernels']:,}", f"{row['floor_images_per_second']:,.0f}"
            cells.append((name, *(f"{value:.1f}" for value in sums), *counts))
    limits = rows[0]["limits"]
    later = [row for row in rows if row["jax"] != first and row["change"] == rows[-1]["change"] and row["form"] == "separate"]
    others = "".join(f" JAX {row['jax']}: {row['all_megabytes_an_image']:.1f} MB, {row['kernels']} kernels." for row in later)
    return markdown(
        ("step", *kinds, "rest", "total", "kernels", "images/s at most"),
        cells,
        f"Upper bound: every kernel at the published {limits['bytes_per_second'] / 1e12:.2f} TB/s and "
        f"{limits['flops'] / 1e12:.0f} TFLOP/s. Compiled with JAX {first}; nothing was run.{others}",
    )


def memory_of_step() -> None:
    results, gpu = [], "h100"
    for case, flags in NETWORKS.items():
        plans = [plan_of("imagenet_goyal_256", batch, [*flags, "--reduce.strategy", "psum"]) for batch in MEMORY_BATCHES]
        found = [compiled(plan, gpu).memory_bytes for plan in plans]
        estimates = [memory.estimate(plan, model_summary(plan.config)) for plan in plans]
        per_image, estimated = (found[1] - found[0]) / (MEMORY_BATCHES[1] - MEMORY_BATCHES[0]), estimates[0]
        row = {"case": case, "gpu": GPU_TARGETS[gpu].name, "batches": MEMORY_BATCHES, "compiled_bytes": found}
        row |= {
            "estimated_bytes": [each["total"] for each in estimates],
            "compiled_megabytes_an_image": per_image / 1e6,
            "estimated_megabytes_an_image": estimated["activations_per_image"] / 1e6,
            "ratio": estimated["activations_per_image"] / per_image,
        }
        results.append(row)
        print(row, flush=True)
    write("memory", {"provenance": provenance(), "results": results})


def memory_table(record: dict) -> str:
    rows = []
    for row in record["results"]:
        estimated, compiled = row["estimated_megabytes_an_image"], row["compiled_megabytes_an_image"]
        fixed = row["estimated_bytes"][0] - row["batches"][0] * 1e6 * estimated
        rows.append((row["case"], f"{estimated:.1f}", f"{compiled:.1f}", f"{(fixed + 256e6 * estimated) / 1e9:.1f}"))
    columns = "network, 224x224", "MB per image, estimated", "compiled", "GB for 256 images, estimated"
    made = f"Compiled for an {record['results'][0]['gpu']}; nothing was run on a GPU."
    return markdown(columns, rows, made)


def keep_tpu(name: str, row: dict) -> None:
    """Put a row into the record, which another process may have changed meanwhile."""
    rows = {one["name"]: one for one in read("compiled_tpu", [])} | {name: {"name": name} | row}
    print(json.dumps({key: value for key, value in rows[name].items() if key not in ("provenance", "collectives")}), flush=True)
    write("compiled_tpu", list(rows.values()))


def tpu_steps(steps: dict[str, TpuStep], *, small: bool) -> None:
    made = provenance()
    for name, step in steps.items():
        if name in {one["name"] for one in read("compiled_tpu", []) if "error" not in one}:
            continue
        config, sides = jaxdp.load_config(step.recipe, [*SMALL * small, *step.flags]), sides_of(step.target)
        if small:
            phases = tuple(
                dataclasses.replace(each, per_worker_batch=16, global_batch=16 * math.prod(sides)) for each in config.batch
            )
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, depth=TWO_BLOCKS), batch=phases)
        plan = make_plan(config, examples=1_281_167, **aot.sizes_of(step.target))
        row = step._asdict() | {"depth": config.model.depth, "provenance": made}
        try:
            keep_tpu(name, aot.as_dict(aot.compile_for(plan, step.phase, target=step.target, step=step.step)) | row)
        except ConfigError as error:
            keep_tpu(name, row | {"error": str(error)})


def tpu() -> None:
    tpu_steps(TPU_STEPS, small=True)


def tpu_recipes() -> None:
    tpu_steps(TPU_RECIPES, small=False)


def tpu_table(results: list[dict]) -> str:
    rows = []
    for step in results:
        if "error" in step:
            rows.append((step["name"], step["target"], step["error"], *[""] * 6))
            continue
        sums: dict[tuple, list[int]] = defaultdict(lambda: [0, 0, 0])
        for one in step["collectives"]:
            parts = sums[one["operation"], one["axis"]]
            parts[:] = [total + one[key] for total, key in zip(parts, ("count", "operand_bytes", "overlapped"), strict=True)]
        cells = [f"{operation} {axis}: {count}, {size / 1e3:,.0f} KB" for (operation, axis), (count, size, _) in sums.items()]
        overlapped = f"{sum(part[2] for part in sums.values())} of {sum(part[0] for part in sums.values())}"
        sizes = f"{step['kernels']:,}", f"{step['kernel_bytes'] / 1e6:.1f}", f"{step['memory_bytes'] / 1e6:.1f}"
        slowest = 1e6 * step["least_memory_seconds"], 1e6 * step["least_compute_seconds"]
        rows.append((step["name"], step["target"], "; ".join(cells), overlapped, *sizes, *(f"{one:.1f}" for one in slowest)))
    columns = "step", "slice", "collectives", "overlapped", "kernels", "MB moved", "MB of memory", "us by bytes", "us by FLOP"
    compiler = next(step["compiler"] for step in results if "error" not in step)
    return markdown(columns, rows, f"Compiled by `benchmarks/compiled.py` with {compiler}; never run.")


STUDIES = {"strategies": strategies, "updates": updates, "bytes": bytes_of_kernels, "memory": memory_of_step}
STUDIES |= {"tpu": tpu, "tpu_recipes": tpu_recipes}

if __name__ == "__main__":
    given = arguments(__doc__, study=STUDIES, change="now", forms=["separate", "folded"])
    STUDIES[given.study](*(given.change, given.forms) * (given.study == "bytes"))
