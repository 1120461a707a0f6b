"""The training step of jaxdp, PyTorch and plain Flax: the same ResNet-50, images, batch, precision and optimizer.

    pip install -e '.[peers]' && python benchmarks/step_vs_pytorch.py [--rounds 5] [--only NAME ...] [--cases SIZE:STEM:BATCH]

Every contender is a process that keeps its compiled step. Rounds of several steps alternate, one process at a time, after a
warm-up. A step is complete: uint8 images [B, H, W, 3] on the device, normalization, forward pass, label-smoothed loss, backward
pass, SGD with momentum and weight decay. On a CPU in float32; on a GPU in bfloat16 (PyTorch by autocast) with float32 weights.

- jaxdp: the step of jaxdp; jaxdp:NAME: with one change, of VARIANTS
- jaxdp-linen: nn.Conv, nn.BatchNorm and optax.sgd, without jaxdp's options
- torch: channels_last; torch-compile: torch.compile; on a GPU also torch-reduce and torch-max (reduce-overhead, max-autotune)
- torch:kept, torch-compile:kept (on a CPU): with malloc trimming disabled, as in jaxdp; not counted in PyTorch's best

Writes benchmarks/results/step_vs_pytorch.json, and prints a table with the ratio to PyTorch's best.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import turns
from common import RESULTS, markdown

from jaxdp.distributed import runtime
from jaxdp.distributed.runtime import nvidia_gpu_present

CLASSES, SMOOTHING, RATE, MOMENTUM, DECAY, MEAN, STD = 1000, 0.1, 0.01, 0.9, 5e-5, 120.0, 58.0
CPU_CASES = ("32:small:64", "32:imagenet:64", "128:imagenet:16")
GPU_CASES = ("224:imagenet:256", "224:imagenet:400", "224:imagenet:512")
NAMES = ("jaxdp", "jaxdp-linen", "torch", "torch-compile")
CPU_NAMES = (*NAMES, "torch:kept", "torch-compile:kept")
GPU_NAMES = (*NAMES, "torch-reduce", "torch-max")
TITLES = {"jaxdp-linen": "plain Flax", "torch": "PyTorch", "torch-compile": "PyTorch, compiled"}
TITLES |= {"jaxdp:folded": "jaxdp, folded"}
TITLES |= {"torch-reduce": "PyTorch, reduce-overhead", "torch-max": "PyTorch, max-autotune"}
TITLES |= {"torch:kept": "PyTorch, no malloc trimming", "torch-compile:kept": "PyTorch, compiled, no malloc trimming"}
STAGES = (3, 4, 6, 3)
# One change each to our step: XLA's flags, fields of the configuration by group. convolution: its form by platform.
# Convolutions in CUDA graphs (--xla_gpu_enable_command_buffer=+CONVOLUTION) fail in cuDNN: JAX 0.11.2 on an H100.
VARIANTS = {
    "folded": ("", {"model": {"batch_norm": "folded"}}),
    "deterministic": ("", {"compile": {"deterministic": True}}),
    "no-gpu-forms": ("", {"convolution": {"gpu": "direct"}}),
    "no-graphs": ("--xla_gpu_enable_command_buffer=", {}),
    "no-excess": ("--xla_allow_excess_precision=false", {}),
    "hiding": ("--xla_gpu_enable_latency_hiding_scheduler=true", {}),
}


def ours(size: int, stem: str, batch: int, changes: dict):
    """(step(count), environment): jaxdp's step on one device. changes: fields by group."""
    from jaxdp.config import Config, Data, Model, Optimizer, Phase, Reduce
    from jaxdp.config import Mesh as MeshConfig
    from jaxdp.xla.options import compiler_options

    one_device = MeshConfig(cpu_devices=1)
    devices = runtime.start(one_device)[:1]
    import jax

    from jaxdp.bench.step_runner import build_step
    from jaxdp.models import convolution
    from jaxdp.parallel.mesh import make_mesh

    convolution.CONVOLUTIONS |= changes.get("convolution", {})

    gpu = devices[0].platform != "cpu"
    config = Config(
        name="step",
        data=Data(source="synthetic", image_size=size, train_examples=4096, eval_examples=10),
        model=Model(depth=50, stem=stem, classes=CLASSES, dtype="bfloat16" if gpu else "float32"),
        batch=(Phase(global_batch=batch),),
        optimizer=Optimizer(name="sgd", momentum=MOMENTUM, weight_decay=DECAY, label_smoothing=SMOOTHING),
        reduce=Reduce(strategy="psum"),
        mesh=one_device,
    )
    changed = {
        group: dataclasses.replace(getattr(config, group), **fields)
        for group, fields in changes.items()
        if group != "convolution"
    }
    config = dataclasses.replace(config, **changed)
    one = build_step(config, make_mesh(1, 1, devices), global_batch=batch, strategy="psum")

    def step(count):
        for _ in range(count):
            _, metrics = one()
        jax.block_until_ready(metrics)

    used = compiler_options(config, devices[0].platform)
    return step, {"jax": jax.__version__, "device": devices[0].device_kind, "changes": changes, "xla_options": used}


def linen(size: int, stem: str, batch: int):
    """The same model in idiomatic Flax."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    gpu = jax.default_backend() != "cpu"
    dtype = jnp.bfloat16 if gpu else jnp.float32

    class Block(nn.Module):
        features: int
        stride: int
        conv: object
        norm: object

        @nn.compact
        def __call__(self, x):
            shortcut = x
            y = nn.relu(self.norm()(self.conv(self.features, (1, 1))(x)))
            y = nn.relu(self.norm()(self.conv(self.features, (3, 3), (self.stride, self.stride))(y)))
            y = self.norm(scale_init=nn.initializers.zeros_init())(self.conv(4 * self.features, (1, 1))(y))
            if shortcut.shape != y.shape:
                shortcut = self.norm()(self.conv(4 * self.features, (1, 1), (self.stride, self.stride))(x))
            return nn.relu(shortcut + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            conv = partial(nn.Conv, use_bias=False, dtype=dtype)
            norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=dtype)
            x = conv(64, (7, 7), (2, 2), padding=[(3, 3), (3, 3)])(x) if stem == "imagenet" else conv(64, (3, 3))(x)
            x = nn.relu(norm()(x))
            if stem == "imagenet":
                x = nn.max_pool(x, (3, 3), (2, 2), padding=[(1, 1), (1, 1)])
            for stage, blocks in enumerate(STAGES):
                for block in range(blocks):
                    x = Block(64 * 2**stage, 2 if stage and not block else 1, conv, norm)(x)
            return nn.Dense(CLASSES, dtype=dtype)(x.mean((1, 2))).astype(jnp.float32)

    model, optimizer = ResNet(), optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(RATE, MOMENTUM))
    images = jax.random.randint(jax.random.key(0), (batch, size, size, 3), 0, 256, jnp.int32).astype(jnp.uint8)
    labels = jnp.arange(batch, dtype=jnp.int32) % CLASSES
    variables = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, size, size, 3), dtype))
    state = [variables["params"], variables["batch_stats"], optimizer.init(variables["params"])]

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def train_step(params, statistics, slots, images, labels):
        def loss_of(params):
            x = ((images.astype(jnp.float32) - MEAN) / STD).astype(dtype)
            logits, new = model.apply({"params": params, "batch_stats": statistics}, x, mutable=["batch_stats"])
            targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), SMOOTHING)
            return optax.softmax_cross_entropy(logits, targets).mean(), new["batch_stats"]

        (loss, statistics), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, slots = optimizer.update(gradient, slots, params)
        return optax.apply_updates(params, updates), statistics, slots, loss

    def step(count):
        for _ in range(count):
            *state[:], loss = train_step(*state, images, labels)
        jax.block_until_ready(loss)

    return step, {"jax": jax.__version__, "device": jax.devices()[0].device_kind}


def pytorch(size: int, stem: str, batch: int, mode: str):
    """The network of torchvision in channels_last; mode: eager, or one of torch.compile."""
    import torch
    import torchvision
    from torch import nn
    from torch.nn import functional

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    model = torchvision.models.resnet50(num_classes=CLASSES)
    if stem == "small":
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    model = model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM, weight_decay=DECAY, fused=True)
    images = torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8, device=device)
    labels = torch.arange(batch, device=device) % CLASSES

    def forward(images, labels):
        x = (images.permute(0, 3, 1, 2).float() - MEAN) / STD  # [B, H, W, 3] in memory is channels_last
        with torch.autocast(device, torch.bfloat16, enabled=gpu):
            return functional.cross_entropy(model(x), labels, label_smoothing=SMOOTHING)

    run = forward if mode == "eager" else torch.compile(forward, mode=None if mode == "compile" else mode)

    def step(count):
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            if gpu and mode not in ("eager", "compile"):
                torch.compiler.cudagraph_mark_step_begin()
            loss = run(images, labels)
            loss.backward()
            optimizer.step()
        if gpu:
            torch.cuda.synchronize()
        return loss.item()

    return step, {"torch": torch.__version__, "device": torch.cuda.get_device_name() if gpu else "cpu"}


def kept(*case):
    """PyTorch in a process that keeps freed memory."""
    runtime.keep_freed_memory()
    return pytorch(*case)


MAKERS = {
    "jaxdp": lambda *case: ours(*case, {}),
    **{f"jaxdp:{name}": partial(ours, changes=changes) for name, (_, changes) in VARIANTS.items()},
    "jaxdp-linen": linen,
    "torch": lambda *case: pytorch(*case, "eager"),
    "torch:kept": lambda *case: kept(*case, "eager"),
    "torch-compile": lambda *case: pytorch(*case, "compile"),
    "torch-compile:kept": lambda *case: kept(*case, "compile"),
    "torch-reduce": lambda *case: pytorch(*case, "reduce-overhead"),
    "torch-max": lambda *case: pytorch(*case, "max-autotune"),
}


def measure(case: str, names, args: argparse.Namespace, keep: Callable[[dict], None]) -> None:
    """Time a case. keep: takes its record after each start and each round."""
    print(case, file=sys.stderr)
    batch, makers = int(case.split(":")[2]), {}
    for name in names:
        flags, _ = VARIANTS.get(name.partition(":")[2], ("", {}))
        makers[name] = partial(turns.Contender, name, [__file__, "--work", name, case], flags, args.start_seconds)

    def of_rows(rows: dict, failed: dict) -> None:
        compare(rows)
        rounds = max((len(row["seconds"]) for row in rows.values()), default=0)
        keep({"case": case, "rounds": rounds, "rows": rows, "failed": failed})

    turns.time_alternately(makers, batch, args.rounds, args.seconds, of_rows)


def compare(rows: dict) -> None:
    """Write into each row how many times as fast it is as ours, and as PyTorch's best: the one that leaves it least."""
    peers = [row for name, row in rows.items() if name.startswith("torch") and ":" not in name]
    for row in rows.values():
        row["to_pytorchs_best"] = min((turns.ratio(row, peer) for peer in peers), default=None)
        row["to_jaxdp"] = turns.ratio(row, rows["jaxdp"]) if "jaxdp" in rows else None


def table(record: dict, *below: str) -> str:
    """Markdown; below: paragraphs after it."""
    rows = []
    for one in record["cases"]:
        size, stem, batch = one["case"].split(":")
        for name, row in one["rows"].items():
            spread = f"{int(batch) / row['slowest']:.1f} to {int(batch) / row['fastest']:.1f}"
            ratios = ("" if row[to] is None else f"{row[to]:.2f}" for to in ("to_pytorchs_best", "to_jaxdp"))
            shown = TITLES.get(name, name), f"{row['images_per_second']:.1f}", spread
            rows.append((f"{size}x{size}", stem, batch, *shown, *ratios))
        rows += [(f"{size}x{size}", stem, batch, name, why, "", "", "") for name, why in one["failed"].items()]
    columns = "images", "stem", "batch", "step", "images/s", "slowest to fastest round"
    return markdown((*columns, "relative to PyTorch", "to jaxdp"), rows, *below)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a contender's round")
    parser.add_argument("--start-seconds", type=float, default=turns.START_SECONDS, help="after which a contender is left out")
    parser.add_argument("--only", nargs="*", choices=MAKERS, help="contenders")
    parser.add_argument("--cases", nargs="*", help="SIZE:STEM:BATCH, stem small or imagenet")
    parser.add_argument("--output", type=Path, default=RESULTS / "step_vs_pytorch.json")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        name, case = args.work
        size, stem, batch = case.split(":")
        turns.serve(lambda: MAKERS[name](int(size), stem, int(batch)))
        return
    gpu = nvidia_gpu_present()
    names, cases = args.only or (GPU_NAMES if gpu else CPU_NAMES), args.cases or (GPU_CASES if gpu else CPU_CASES)
    if wrong := [case for case in cases if not re.fullmatch(r"\d+:(small|imagenet):\d+", case)]:
        parser.error(f"--cases: {wrong[0]!r} must be SIZE:STEM:BATCH, for example 224:imagenet:256")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # this process only records the environment
    from jaxdp.bench.environment import provenance

    record = {"provenance": provenance(), "cases": []}

    def keep(one: dict) -> None:  # what follows may be cut off
        record["cases"][-1] = one
        args.output.write_text(json.dumps(record, indent=1) + "\n")

    for case in cases:
        record["cases"].append({})
        measure(case, names, args, keep)
    print(table(record))


if __name__ == "__main__":
    main()
