"""Cost of the random pixel operations on a device: kernels and bytes by XLA's GPU compiler, and time on this CPU.

    python benchmarks/augmentation_kernels.py [--batch 256] [--chip h100]   (needs the extra cuda13, no GPU)

For 224x224 images. Also compares two ways to count the values of the pixels for equalize: a scatter, which jaxdp uses, and
products of one-hot nibbles. The bytes are those of the operands and results of all kernels. Nothing runs on a GPU. Writes
benchmarks/results/augmentation_kernels.json.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.analysis.gpu_targets import GPU_TARGETS, target_config
from jaxdp.bench.environment import provenance
from jaxdp.config import Augment, Compile, Config, Data
from jaxdp.data import pixel_operations
from jaxdp.data.policies import change_pixels, erase
from jaxdp.xla import kernels, options

ROOT = Path(__file__).parent.parent
SIZE, CPU_BATCH, REPEATS = 224, 16, 3
MEAN = (123.675, 116.28, 103.53)
JITTER = (0.4, 0.4, 0.4)


def nibble_products(image):
    """`pixel_operations.histogram` from products of the one-hot upper and lower four bits, float32 [3, 256]."""
    values, nibbles = image.reshape(-1, 3), jnp.arange(16, dtype=jnp.uint8)
    upper, lower = (((half)[..., None] == nibbles).astype(jnp.bfloat16) for half in (values >> 4, values & 15))
    return jnp.einsum("pci,pcj->cij", upper, lower, preferred_element_type=jnp.float32).reshape(3, 256)


def of_config(policy="none", **ranges):
    config = Config(data=Data(source="imagenet2012", image_size=SIZE, auto_augment=policy), augment=Augment(**ranges))
    return lambda images, positions: change_pixels(config, images, positions, mean=MEAN)


def erasing(images, positions):
    """Erasing with normalization, which reads and writes the same pixels."""
    config = Config(augment=Augment(erase_probability=0.25))
    return erase(config, images.astype(jnp.float32) / 255, positions)


CASES = {
    "rand_augment": of_config("rand_augment"),
    "rand_augment, bilinear": of_config("rand_augment", operation_interpolation="bilinear"),
    "trivial_augment": of_config("trivial_augment"),
    "rand_augment_increasing": of_config("rand_augment_increasing"),
    "color jitter": of_config(color_jitter=JITTER),
    "color jitter with hue": of_config(color_jitter=(*JITTER, 0.1)),
    "erasing": erasing,
    "histogram by a scatter": lambda images, _: jax.vmap(pixel_operations.histogram)(images),
    "histogram by nibble products": lambda images, _: jax.vmap(nibble_products)(images),
}


def compiled(function, batch: int, chip: str) -> dict:
    target = target_config(GPU_TARGETS[chip])
    topology = topologies.get_topology_desc("", platform="cuda", target_config=target, topology="1x1x1")
    sharding = NamedSharding(Mesh(np.array(topology.devices), ("device",)), PartitionSpec())
    shapes = ((batch, SIZE, SIZE, 3), jnp.uint8), ((batch,), jnp.uint32)
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    step = lowered.compile(options.compiler_options(Compile(), "gpu"))
    found = kernels.kernels_of_step(step.as_text(), batch)
    return {
        "kernels": len(found),
        "kernels_of_images": sum(kernel.bytes > batch * SIZE**2 for kernel in found),
        "megabytes_an_image": sum(kernel.bytes for kernel in found) / batch / 1e6,
    }


def cpu_milliseconds(function) -> float:
    images = np.random.default_rng(0).integers(0, 256, (CPU_BATCH, SIZE, SIZE, 3)).astype(np.uint8)
    positions, times = np.arange(CPU_BATCH, dtype=np.uint32), []
    run = jax.jit(function)
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        jax.block_until_ready(run(images, positions))
        times.append((time.perf_counter() - began) / CPU_BATCH * 1e3)
    return statistics.median(times[1:])  # without the compilation


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--chip", default="h100")
    args = parser.parse_args()
    results = {}
    for name, function in CASES.items():
        results[name] = compiled(function, args.batch, args.chip) | {"cpu_milliseconds_an_image": cpu_milliseconds(function)}
        print(name, results[name], flush=True)
    record = {"provenance": provenance(), "gpu": GPU_TARGETS[args.chip].name, "batch": args.batch, "results": results}
    (ROOT / "benchmarks/results/augmentation_kernels.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
