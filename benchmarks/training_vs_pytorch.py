"""Twenty training steps of ResNet-50 beside PyTorch's, from the same weights on the same images.

    python benchmarks/training_vs_pytorch.py [--only RUN ...]

Optimizers and losses of PyTorch and timm, the network of torchvision; SGD also with folded batch normalization, and with
mixup, whose ratio jaxdp draws and whose images and soft targets are timm's. Smoothed labels, float32, one device. PyTorch in
float64 is the reference, in float32 the yardstick: rounding grows from step to step in every implementation. Needs the extra
`peers`. Writes benchmarks/results/training_vs_pytorch.json (--only adds runs), and prints the tables.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from common import arguments, markdown, read, write
from helpers import torch_layout

from jaxdp import models
from jaxdp.bench.environment import PACKAGES, provenance
from jaxdp.config import Config, Data, Model, Optimizer, Phase
from jaxdp.data import prefetch
from jaxdp.data.augment import mix
from jaxdp.models import weights
from jaxdp.models.torch_weights import to_torch
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.state import create_state
from jaxdp.training.step import make_train_step

NETWORK = ((3, 4, 6, 3), True)
STEPS, BATCH, SIZE, MEAN, STD = 20, 32, 64, 120.0, 58.0
MOMENTUM, DECAY, SMOOTHING, THRESHOLD = 0.9, 0.01, 0.1, 0.2
SHOWN = (1, 5, 10, 20)
MIXED = "SGD, PyTorch, binary of mixup without threshold"
FORMS_OF = "SGD, PyTorch, softmax"  # the run that compares forms of batch normalization
Step = tuple[float, dict]  # loss, and weights by name after the step in float64


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """(images, labels) of every step; the brightness of an image depends on its label."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        labels = random.integers(0, 10, BATCH)
        images = random.integers(0, 150, (BATCH, SIZE, SIZE, 3)) + 10 * labels[:, None, None, None]
        found.append((images.astype(np.uint8), labels.astype(np.int32)))
    return found


def start_weights(tensors: dict) -> dict:
    """Weights from which a network trains stably: scale 1, at the end of a block 0.2, and no shift; a small classifier."""
    changed = {}
    for name, value in tensors.items():
        is_norm, shape = ("bn" in name or "downsample.1" in name), value.shape
        if is_norm and name.endswith(".weight"):
            value = np.full(shape, 0.2 if ".bn3." in name else 1.0, np.float32)
        elif name.endswith(".bias"):
            value = np.zeros(shape, np.float32)
        changed[name] = value * np.float32(0.1) if name == "fc.weight" else value
    return changed


class Run(NamedTuple):
    """A training run: fields of jaxdp's optimizer and its learning rate, and the functions of PyTorch, torchvision or timm.

    optimizer: (parameter groups, learning rate) -> optimizer. loss: (logits, labels) -> loss; with mix="mixup" the labels are
    soft targets [B, classes].
    """

    ours: Optimizer
    rate: float
    optimizer: Callable[[list[dict], float], Any]
    loss: Callable[[Any, Any], Any]
    mix: str = "none"


def runs() -> dict[str, Run]:
    """Every optimizer with every loss, by name; weight decay and trust ratios leave out biases and normalization."""
    import torch
    from timm.loss import BinaryCrossEntropy
    from timm.optim import Lamb, Lars
    from torch.nn.functional import cross_entropy

    optimizers: dict[str, tuple[dict, float, Callable]] = {
        "SGD, PyTorch": ({"name": "sgd"}, 0.01, partial(torch.optim.SGD, momentum=MOMENTUM)),
        "LARS, timm": ({"name": "lars", "eps": 1e-8}, 1.0, partial(Lars, momentum=MOMENTUM, eps=1e-8)),
        "AdamW, PyTorch": ({"name": "adamw"}, 1e-3, partial(torch.optim.AdamW, eps=1e-8)),
        "LAMB, timm": ({"name": "lamb", "clip_norm": 1.0}, 5e-3, Lamb),
    }
    binary = {"loss": "binary", "target_threshold": THRESHOLD}
    losses: dict[str, tuple[dict, Callable]] = {
        "softmax": ({}, partial(cross_entropy, label_smoothing=SMOOTHING)),
        "binary": (binary, BinaryCrossEntropy(smoothing=SMOOTHING, target_threshold=THRESHOLD)),
    }
    found = {
        f"{name}, {kind}": Run(
            Optimizer(momentum=MOMENTUM, weight_decay=DECAY, label_smoothing=SMOOTHING, **fields, **more), rate, optimizer, loss
        )
        for name, (fields, rate, optimizer) in optimizers.items()
        for kind, (more, loss) in losses.items()
    }
    _, rate, sgd = optimizers["SGD, PyTorch"]
    ours = Optimizer(name="sgd", momentum=MOMENTUM, weight_decay=DECAY, label_smoothing=SMOOTHING, loss="binary")
    return found | {MIXED: Run(ours, rate, sgd, BinaryCrossEntropy(target_threshold=None), "mixup")}


def data(run: Run) -> Data:
    return Data(source="synthetic", image_size=SIZE, augmentation="none", mix=run.mix)


def positions(step: int) -> np.ndarray:
    """The positions of the images of a step in the order of samples."""
    return np.arange(step * BATCH, (step + 1) * BATCH, dtype=np.uint32)


def mixed(run: Run, step: int, images: Any, labels: Any, classes: int) -> tuple[Any, Any]:
    """(images, soft targets) of timm's mixup, with the ratio that jaxdp draws for the step. images: [B, 3, H, W]."""
    from timm.data.mixup import mixup_target

    *_, shares = mix(Config(data=data(run)), jax.numpy.zeros((BATCH, 1, 1, 3)), positions(step))
    share = float(shares[0])
    targets = mixup_target(labels, classes, lam=share, smoothing=SMOOTHING)
    return share * images + (1 - share) * images.flip(0), targets.to(images.dtype)


def by_torch(held: dict, run: Run, dtype: str) -> Iterator[Step]:
    """The training in PyTorch."""
    import torch
    import torchvision

    network = torchvision.models.resnet50(num_classes=len(held["fc.bias"]))
    network.load_state_dict({name: torch.from_numpy(value) for name, value in held.items()}, strict=False)
    network = network.to(getattr(torch, dtype)).train()
    groups: list[dict] = [{"params": [], "weight_decay": DECAY}, {"params": [], "weight_decay": 0.0}]
    for parameter in network.parameters():
        groups[parameter.ndim < 2]["params"].append(parameter)
    optimizer = run.optimizer(groups, run.rate)
    for step, (images, labels) in enumerate(batches()):
        normalized = (torch.from_numpy(images.transpose(0, 3, 1, 2).astype(np.float64)) - MEAN) / STD
        given, targets = normalized.to(getattr(torch, dtype)), torch.from_numpy(labels).long()
        if run.mix != "none":
            given, targets = mixed(run, step, given, targets, len(held["fc.bias"]))
        loss = run.loss(network(given), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), {name: value.detach().numpy().astype(np.float64) for name, value in network.named_parameters()}


def by_jaxdp(held: dict, run: Run, form: str = "separate") -> Iterator[Step]:
    """The training in jaxdp, with PyTorch's names of the weights."""
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder:
        save_file(held, Path(folder) / "weights.safetensors")
        given = weights.read(Path(folder) / "weights.safetensors")
    config = Config(
        data=data(run),
        model=Model(depth=50, classes=given.model.classes, batch_norm=form),
        batch=(Phase(global_batch=BATCH, per_worker_batch=BATCH),),
        optimizer=run.ours,
    )
    mesh, model = make_mesh(1, 1), models.create(config.model)
    step = make_train_step(config, model, mesh, pixel_stats=(MEAN, STD), accumulation=1)
    state = create_state(config, model, mesh)
    copy = jax.tree.map(jax.numpy.array, (given.params, given.batch_stats))
    state = state._replace(params=copy[0], batch_stats=copy[1])
    scalars = {"learning_rate": np.float32(run.rate), "momentum": np.float32(MOMENTUM), "seed": np.uint32(0)}
    for number, (images, labels) in enumerate(batches()):
        batch = prefetch.to_global({"images": images, "labels": labels, "positions": positions(number)}, mesh)
        state, metrics = step(state, batch, scalars)
        tensors = weights.named_tensors(*jax.device_get((state.params, state.batch_stats)))
        named = to_torch(tensors, steps=number + 1)
        yield metrics["loss"].item(), {name: np.asarray(value, np.float64) for name, value in named.items()}


def compare(held: dict, run: Run, others: dict[str, Iterator[Step]]) -> dict[str, dict[str, list[float]]]:
    """Name -> {"distances": of all weights from PyTorch in float64 after each step, relative to their change since the start,
    "losses": relative differences from its}. All trainings run at the same time, so that one step of each is in memory."""
    start = {name: value.astype(np.float64) for name, value in held.items()}
    found: dict[str, dict[str, list[float]]] = {name: {"distances": [], "losses": []} for name in others}

    def norm(left: dict, right: dict) -> float:
        return float(np.sqrt(sum(((left[name] - right[name]) ** 2).sum() for name in reference)))

    for loss, reference in by_torch(held, run, "float64"):
        for name, other in others.items():
            other_loss, seen = next(other)
            found[name]["distances"].append(norm(seen, reference) / norm(reference, start))
            found[name]["losses"].append(abs(other_loss / loss - 1))
    return found


def distances_table(distances_by_name: dict, record: dict, *more: str) -> str:
    rows = [(name, *(f"{values[step - 1]:.1e}" for step in SHOWN)) for name, values in distances_by_name.items()]
    what = f"Distance of all weights from the reference, relative to their change. ResNet-50, {SIZE}x{SIZE}, batch {BATCH}"
    versions = record["provenance"]["versions"]
    return markdown(
        ("float32, relative to PyTorch in float64", *(f"step {step}" for step in SHOWN)),
        rows,
        f"{what}, PyTorch {versions['torch']}, timm {versions['timm']}.",
        *more,
    )


def table(record: dict) -> str:
    """The forms of batch normalization, in a run with SGD."""
    return distances_table(record["distances"], record)


def optimizers_table(record: dict) -> str:
    """The optimizers and losses."""
    rows = {f"{name}: {who}": run[who]["distances"] for name, run in record["optimizers"].items() for who in run}
    ours, theirs = (max(max(run[who]["losses"]) for run in record["optimizers"].values()) for who in ("jaxdp", "original"))
    losses = f"Largest relative difference of a loss from the reference: jaxdp {ours:.1e}, the originals {theirs:.1e}."
    return distances_table(rows, record, losses)


def main():
    every = runs()
    only = arguments(__doc__, only=[*every]).only
    held = start_weights(torch_layout.random_tensors(0, *NETWORK))
    made = provenance((*PACKAGES, "torch", "torchvision", "timm"))
    record: dict[str, Any] = {"provenance": made, "optimizers": {}, "added": {}}
    if len(only) < len(every):
        record = read("training_vs_pytorch")
        record["added"] |= dict.fromkeys(only, made)
    for name in only:
        run = every[name]
        others = {"jaxdp": by_jaxdp(held, run), "original": by_torch(held, run, "float32")}
        if name == FORMS_OF:
            others["folded"] = by_jaxdp(held, run, "folded")
        found = compare(held, run, others)
        if name == FORMS_OF:
            forms = {"PyTorch": "original", "jaxdp, separate": "jaxdp", "jaxdp, folded": "folded"}
            record["distances"] = {form: found[who]["distances"] for form, who in forms.items()}
            del found["folded"]
        record["optimizers"][name] = found
        print(name, {who: f"{values['distances'][-1]:.1e}" for who, values in found.items()}, flush=True)
    write("training_vs_pytorch", record)
    print(table(record), optimizers_table(record), sep="\n\n")


if __name__ == "__main__":
    main()
