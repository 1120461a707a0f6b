"""Training to the end beside PyTorch's, with the same recipe and initial weights: accuracy by seed.

    python benchmarks/fashion_vs_pytorch.py [--seeds 0 1 2]

A narrow ResNet-18 on the 60,000 images of Fashion-MNIST, of Debian's package dataset-fashion-mnist. PyTorch trains with its own
SGD, loss and data loader, and crops and flips of torchvision; initial weights are jaxdp's, so that a difference is not one of
initialization. The order of the images and the draws of the augmentation differ. Needs the extra `peers`. Adds to
benchmarks/results/fashion_vs_pytorch.json and skips runs already there; prints the table of docs/recipes.md.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from batch_norm_training import compare, fashion

from jaxdp import models
from jaxdp.bench.environment import PACKAGES, provenance
from jaxdp.config import Config, Data, Model, Optimizer, Phase, Schedule
from jaxdp.loggers.console import Quiet
from jaxdp.models import weights
from jaxdp.models.torch_weights import to_torch
from jaxdp.parallel.mesh import make_mesh
from jaxdp.session import Command, run_session
from jaxdp.training.state import create_state

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/fashion_vs_pytorch.json"
TRAINERS = "jaxdp", "PyTorch"
BLOCKS, WIDTH, CLASSES = (2, 2, 2, 2), 8, 10  # ResNet-18
SIZE, MEAN, STD = 32, 0.286, 0.353
EPOCHS, WARMUP, BATCH = 3, 0.5, 96  # 60,000 images are 625 batches
RATE, MOMENTUM, DECAY, SMOOTHING = 0.1, 0.9, 5e-4, 0.1


def config(seed: int) -> Config:
    return Config(
        name=f"fashion-{seed}",
        seed=seed,
        epochs=float(EPOCHS),
        data=Data(image_size=SIZE, augmentation="pad_and_crop", mean=(MEAN,) * 3, std=(STD,) * 3),
        model=Model(depth=18, width=WIDTH, stem="small", classes=CLASSES),
        batch=(Phase(global_batch=BATCH, per_worker_batch=BATCH),),
        optimizer=Optimizer(name="sgd", momentum=MOMENTUM, weight_decay=DECAY, label_smoothing=SMOOTHING),
        schedule=Schedule(name="cosine", learning_rate=RATE, warmup_epochs=WARMUP),
    )


def by_jaxdp(seed: int) -> float:
    """The accuracy of a run of jaxdp."""
    with tempfile.TemporaryDirectory() as folder:
        return run_session(config(seed), Path(folder) / "run", datasets=fashion(), command=Command(screen=Quiet())).accuracy


def initial_tensors(seed: int) -> dict[str, np.ndarray]:
    """The initial weights of jaxdp's run, with torchvision's names."""
    started = create_state(config(seed), models.create(config(seed).model), make_mesh(1, 1))
    return to_torch(weights.named_tensors(*jax.device_get((started.params, started.batch_stats))), steps=0)


def by_torch(seed: int) -> float:
    """The accuracy of a run of PyTorch."""
    import torch
    from PIL import Image
    from torch.nn.functional import cross_entropy
    from torchvision import transforms

    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.torch_layout import torch_network

    torch.manual_seed(seed)
    network = torch_network(BLOCKS, False, WIDTH, CLASSES, stem=3)
    network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in initial_tensors(seed).items()})
    decoded = [transforms.ToTensor(), transforms.Normalize([MEAN] * 3, [STD] * 3)]
    augmented = transforms.Compose([transforms.RandomCrop(SIZE, padding=4), transforms.RandomHorizontalFlip(), *decoded])

    def loader(part: tuple, transform, training: bool):
        items = [(Image.fromarray(image), int(label)) for image, label in zip(*part, strict=True)]
        prepared = _Mapped(items, transform)
        return torch.utils.data.DataLoader(prepared, BATCH, shuffle=training, drop_last=training)

    training, evaluation = fashion()
    batches = loader(training, augmented, True)
    kernels = [value for value in network.parameters() if value.ndim > 1]
    others = [value for value in network.parameters() if value.ndim < 2]
    groups = [{"params": kernels, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, RATE, momentum=MOMENTUM)
    warmup, steps = WARMUP * len(batches), EPOCHS * len(batches)

    def rate(step: int) -> float:
        """Relative to the peak."""
        return step / warmup if step < warmup else 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (steps - warmup))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for _ in range(EPOCHS):
        for images, labels in batches:
            optimizer.zero_grad()
            cross_entropy(network(images), labels, label_smoothing=SMOOTHING).backward()
            optimizer.step()
            scheduler.step()
    network.eval()
    with torch.no_grad():
        plain = loader(evaluation, transforms.Compose(decoded), False)
        correct = sum((network(images).argmax(1) == labels).sum().item() for images, labels in plain)
    return correct / len(evaluation[1])


class _Mapped:
    """Items of a list, with a transform of their images."""

    def __init__(self, items: list, transform):
        self.items, self.transform = items, transform

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple:
        image, label = self.items[index]
        return self.transform(image), label


def record() -> dict:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": []}


def table(measured: dict) -> str:
    rows = measured["runs"]
    lines = [f"| | {' | '.join(TRAINERS)} | difference in standard errors |", "|---" * (len(TRAINERS) + 2) + "|"]
    lines.append(f"| ResNet-18 of width {WIDTH}, {EPOCHS} epochs | {' | '.join(compare(rows, 'trainer', TRAINERS).cells())} |")
    versions = rows[0]["provenance"]["versions"]
    seeds = len({row["seed"] for row in rows})
    made = f"Fashion-MNIST, accuracy on 10,000 test images: mean and range of {seeds} seeds. PyTorch {versions['torch']}"
    return "\n".join([*lines, "", f"{made}, torchvision {versions['torchvision']}."])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    done = {(row["trainer"], row["seed"]) for row in record()["runs"]}
    accuracies = dict(zip(TRAINERS, (by_jaxdp, by_torch), strict=True))
    missing = [(trainer, seed) for seed in args.seeds for trainer in TRAINERS if (trainer, seed) not in done]
    if missing:
        fashion()  # ends here without the data set
    for trainer, seed in missing:
        made = provenance((*PACKAGES, "torch", "torchvision"))
        row = {"trainer": trainer, "seed": seed, "accuracy": accuracies[trainer](seed), "eval_examples": len(fashion()[1][1])}
        RESULT.write_text(json.dumps({"runs": [*record()["runs"], row | {"provenance": made}]}, indent=1) + "\n")
        print(f"seed {seed}, {trainer}: {100 * row['accuracy']:.2f} %", flush=True)
    print(table(record()))


if __name__ == "__main__":
    main()
