"""Twenty training steps of ResNet-50 beside PyTorch's, from the same weights on the same images, with both forms of the step.

    python benchmarks/training_vs_pytorch.py

SGD with momentum and smoothed labels, float32, one device. PyTorch in float64 is the reference, in float32 the yardstick:
rounding grows from step to step in every implementation. Needs the extra `peers`. Writes
benchmarks/results/training_vs_pytorch.json and prints the table of docs/folded_batch_norm.md.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from jaxdp import models
from jaxdp.bench.environment import PACKAGES, provenance
from jaxdp.config import Config, Data, Model, Optimizer, Phase
from jaxdp.data import prefetch
from jaxdp.models import weights
from jaxdp.models.torch_weights import to_torch
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.state import create_state
from jaxdp.training.step import make_train_step

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/training_vs_pytorch.json"
NETWORK = ((3, 4, 6, 3), True)
STEPS, BATCH, SIZE, RATE, MOMENTUM, SMOOTHING, MEAN, STD = 20, 32, 64, 0.01, 0.9, 0.1, 120.0, 58.0
SHOWN = (1, 5, 10, 20)


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


def by_torch(held: dict, dtype: str) -> list[dict]:
    """Weights by name after each step of PyTorch."""
    import torch
    from helpers import torch_layout

    network = torch_layout.torch_network(*NETWORK)
    network.load_state_dict({name: torch.from_numpy(value) for name, value in held.items()}, strict=False)
    network = network.to(getattr(torch, dtype)).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=MOMENTUM)
    seen = []
    for images, labels in batches():
        normalized = (torch.from_numpy(images.transpose(0, 3, 1, 2).astype(np.float64)) - MEAN) / STD
        logits = network(normalized.to(getattr(torch, dtype)))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels).long(), label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append({name: value.detach().numpy().astype(np.float64) for name, value in network.named_parameters()})
    return seen


def by_jaxdp(held: dict, form: str) -> list[dict]:
    """Weights by PyTorch's names after each step of jaxdp's training step."""
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder:
        save_file(held, Path(folder) / "weights.safetensors")
        given = weights.read(Path(folder) / "weights.safetensors")
    config = Config(
        data=Data(source="synthetic", image_size=SIZE, augmentation="none"),
        model=Model(depth=50, classes=given.model.classes, batch_norm=form, convolution="direct"),
        batch=(Phase(global_batch=BATCH, per_worker_batch=BATCH),),
        optimizer=Optimizer(name="sgd", momentum=MOMENTUM, weight_decay=0.0, label_smoothing=SMOOTHING),
    )
    mesh, model = make_mesh(1, 1), models.create(config.model)
    step = make_train_step(config, model, mesh, pixel_stats=(MEAN, STD), accumulation=1)
    state = create_state(config, model, mesh)
    copy = jax.tree.map(jax.numpy.array, (given.params, given.batch_stats))
    state = state._replace(params=copy[0], batch_stats=copy[1])
    scalars = {"learning_rate": np.float32(RATE), "momentum": np.float32(MOMENTUM), "seed": np.uint32(0)}
    seen = []
    for number, (images, labels) in enumerate(batches()):
        positions = np.arange(number * BATCH, (number + 1) * BATCH, dtype=np.uint32)
        batch = prefetch.to_global({"images": images, "labels": labels, "positions": positions}, mesh)
        state, _ = step(state, batch, scalars)
        tensors = weights.named_tensors(*jax.device_get((state.params, state.batch_stats)))
        seen.append({name: np.asarray(value, np.float64) for name, value in to_torch(tensors, steps=number + 1).items()})
    return seen


def distances(seen: list[dict], reference: list[dict], start: dict) -> list[float]:
    """Distance of all weights from the reference after each step, relative to their change since the start."""

    def norm(left: dict, right: dict) -> float:
        return float(np.sqrt(sum(((left[name] - right[name]) ** 2).sum() for name in reference[0])))

    return [norm(ours, theirs) / norm(theirs, start) for ours, theirs in zip(seen, reference, strict=True)]


def table(record: dict) -> str:
    lines = ["| float32, relative to PyTorch in float64 | " + " | ".join(f"step {step}" for step in SHOWN) + " |"]
    lines += ["|---" * (len(SHOWN) + 1) + "|"]
    for name, values in record["distances"].items():
        lines.append(f"| {name} | " + " | ".join(f"{values[step - 1]:.1e}" for step in SHOWN) + " |")
    made = f"Distance of all weights from the reference, relative to their change. ResNet-50, {SIZE}x{SIZE}, batch {BATCH}"
    return "\n".join([*lines, "", f"{made}, PyTorch {record['provenance']['versions']['torch']}."])


def main():
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import torch_layout

    held = start_weights(torch_layout.random_tensors(0, *NETWORK))
    start = {name: value.astype(np.float64) for name, value in held.items()}
    reference = by_torch(held, "float64")
    found = {"PyTorch": by_torch(held, "float32")}
    found |= {f"jaxdp, {form}": by_jaxdp(held, form) for form in ("separate", "folded")}
    record = {
        "provenance": provenance((*PACKAGES, "torch")),
        "distances": {name: distances(seen, reference, start) for name, seen in found.items()},
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
