"""XLA's compiled step with a replicated and a sharded update: ResNet-50 in bfloat16 on eight H200 GPUs, a 2x4 mesh.

    python benchmarks/compiled_updates.py      (needs the extra cuda13, no GPU)

Adds the rows of the installed JAX to benchmarks/results/compiled_updates.json. Update and communication: what the step has more
than its gradient on one device, which is compiled separately.
"""

import json
import os
from pathlib import Path

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from jax.experimental import topologies
from jax.sharding import PartitionSpec

import jaxdp
from jaxdp import models
from jaxdp.analysis import aot
from jaxdp.analysis.gpu_targets import GPU_TARGETS, target_config
from jaxdp.bench.environment import provenance
from jaxdp.config import at_image_size
from jaxdp.parallel.mesh import AXES, make_mesh
from jaxdp.planning import make_plan
from jaxdp.training.step import compute_gradients, without_reduction
from jaxdp.training.step_compiler import abstract_arguments
from jaxdp.xla import options
from jaxdp.xla.hlo import read_schedule

RESULT = Path(__file__).parent / "results/compiled_updates.json"
GPU, DEVICES = "h200", 8
COMMON = ["--model.dtype", "bfloat16", "--loss-scale.name", "none", "--reduce.wire-dtype", "bfloat16"]
COMMON += ["--optimizer.momentum-rule", "constant"]
IMAGES = 16, 32, 256
FORMS = "replicated", "sharded"
BUCKETS = {"one a segment": [], "64 KiB": ["--reduce.bucket-bytes", "65536"]}


def plan_of(images: int, *flags: str):
    batch = ["--batch.0.global-batch", str(DEVICES * images), "--batch.0.per-worker-batch", str(images)]
    config = jaxdp.load_config("imagenet_sony_exp1", [*COMMON, *batch, *flags])
    return make_plan(config, examples=1_281_167, devices=DEVICES, hosts=1, processes=1)


def gradient_alone(images: int) -> dict:
    """Kernels and bytes of the gradient of one device, without reduction and update."""
    plan = plan_of(images)
    phase = plan.phases[0]
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=target_config(GPU_TARGETS[GPU]), topology=f"1x1x{DEVICES}"
    )
    mesh = make_mesh(*phase.shape, topology.devices)
    config = at_image_size(without_reduction(plan.config), phase.image_size)
    model = models.create(config.model, platform="gpu")

    def gradient(state, batch, _):
        found, _ = compute_gradients(
            config, model, state.params, batch_stats=state.batch_stats, batch=batch, pixel_stats=(0.0, 1.0)
        )
        return jax.tree.map(lambda leaf: leaf[None], found)

    everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(everywhere, rows, everywhere), out_specs=rows, check_vma=False)
    traced = jax.jit(mapped).trace(*abstract_arguments(config, model, phase, mesh=mesh))
    compiled = traced.lower(lowering_platforms=("cuda",)).compile(options.compiler_options(config.compile, "gpu"))
    schedule = read_schedule(compiled.as_text(), mesh.size)
    return {"kernels": schedule.kernels, "kernel_bytes": schedule.kernel_bytes}


def main():
    rows = json.loads(RESULT.read_text()) if RESULT.exists() else []
    rows = [row for row in rows if row["jax"] != jax.__version__]
    made = provenance()
    for images in IMAGES:
        alone = gradient_alone(images)
        for form in FORMS:
            for buckets, flags in BUCKETS.items():
                plan = plan_of(images, "--reduce.update", form, *flags)
                step = aot.as_dict(aot.compile_for(plan, 0, gpu=GPU, hosts=1, gpus_per_host=DEVICES))
                total = {
                    name: sum(one[name] for one in step["collectives"]) for name in ("count", "operand_bytes", "covered_bytes")
                }
                facts = {"images": images, "update": form, "buckets": buckets, "jax": jax.__version__}
                sizes = {name: step[name] for name in ("kernels", "kernel_bytes", "memory_bytes")}
                rows.append(facts | sizes | total | {"gradient_alone": alone, "collectives": step["collectives"]})
                print(json.dumps(rows[-1] | {"collectives": None}), flush=True)
                rows[-1]["provenance"] = made
                RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    print("benchmarks/tables.py compiled_updates prints the table")


if __name__ == "__main__":
    main()
