"""What drop-path, squeeze-and-excitation and BlurPool cost in a training step of ResNet-50.

    python benchmarks/network_variants.py cpu     time of forward and backward pass, float32, relative to the plain network
    python benchmarks/network_variants.py gpu     kernels and bytes of the step compiled for an H200 (extra cuda13, no GPU)

Writes benchmarks/results/network_variants.json, whose other part stays, and prints a table.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
RESULT = Path(__file__).parent / "results/network_variants.json"
VARIANTS = {
    "plain": {},
    "drop-path": {"drop_path": 0.1},
    "squeeze-and-excitation": {"squeeze_excitation": True},
    "BlurPool activations": {"blur_pool": "activations"},
    "BlurPool convolutions": {"blur_pool": "convolutions"},
    "BlurPool convolutions_and_pool": {"blur_pool": "convolutions_and_pool"},
}
FOLDED = ("plain", "drop-path", "squeeze-and-excitation")


def cpu(batch: int, size: int, rounds: int) -> dict:
    """Seconds of every variant, timed in turns so that other load reaches all of them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxdp import models
    from jaxdp.config import Model

    images = jnp.asarray(np.random.default_rng(0).normal(size=(batch, size, size, 3)), jnp.float32)
    programs = {}
    for name, fields in VARIANTS.items():
        model = models.create(Model(classes=1000, **fields))
        params, stats = jax.jit(lambda model=model: model.init(jax.random.key(0), (size, size, 3)))()

        def loss(params, stats=stats, model=model):
            logits, moments = model.apply(params, stats, images, train=True, key=jax.random.key(1))
            return jnp.sin(logits).sum(), moments

        programs[name] = jax.jit(jax.grad(loss, has_aux=True)).lower(params).compile(), params
    seconds = {name: [] for name in programs}
    for _ in range(rounds + 1):
        for name, (program, params) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(params))
            seconds[name].append(time.perf_counter() - start)
    ratios = {
        name: [one / plain for one, plain in zip(times, seconds["plain"], strict=True)][1:] for name, times in seconds.items()
    }
    return {
        "batch": batch,
        "image_size": size,
        "rounds": rounds,
        "seconds": {name: times[1:] for name, times in seconds.items()},
        "median_relative_to_plain": {name: statistics.median(each) for name, each in ratios.items()},
    }


def gpu() -> list[dict]:
    """Kernels, megabytes an image and memory of every variant; see gpu_bytes.py."""
    import gpu_bytes

    cases = [(name, []) for name in VARIANTS] + [(name, ["--model.batch-norm", "folded"]) for name in FOLDED]
    results = []
    for name, folded in cases:
        flags = [*folded]
        for field, value in VARIANTS[name].items():
            flags += [f"--model.{field.replace('_', '-')}", *([] if value is True else [str(value)])]
        results.append(gpu_bytes.measured(f"{name}{', folded' if folded else ''}", flags, 256, "h200"))
        print(name, folded, results[-1]["kernels"], results[-1]["all_megabytes_an_image"], flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cpu", "gpu"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    from jaxdp.bench.environment import provenance

    measured = cpu(args.batch, args.size, args.rounds) if args.part == "cpu" else gpu()
    record = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    record[args.part] = {"provenance": provenance(), "results": measured}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    if args.part == "cpu":
        for name, ratio in measured["median_relative_to_plain"].items():
            print(f"{name:32} {ratio:5.2f}")
    else:
        for one in measured:
            print(f"{one['case']:32} {one['kernels']:5} kernels {one['all_megabytes_an_image']:6.1f} MB an image")


if __name__ == "__main__":
    main()
