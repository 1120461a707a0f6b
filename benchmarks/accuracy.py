"""Accuracy of whole runs by seed: both forms of batch normalization, and jaxdp beside PyTorch.

    python benchmarks/accuracy.py forms | pytorch [--seeds 0 1 2]

- forms (`model.batch_norm`, in bfloat16): the default run, and a narrow ResNet-50 on the 60,000 images of Fashion-MNIST;
  batch_norm_training.json
- pytorch (extra peers): a narrow ResNet-18 on Fashion-MNIST. PyTorch trains with its own SGD, loss and data loader, and crops
  and flips of torchvision; initial weights are jaxdp's, so that a difference is not one of initialization. The order of the
  images and the draws of the augmentation differ; fashion_vs_pytorch.json

Fashion-MNIST is from Debian's package dataset-fashion-mnist. Adds to the record in benchmarks/results/ and skips runs that
it has.
"""

import gzip
import math
import os
import statistics
import sys
from functools import cache, partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from common import arguments, markdown, read, trained, write

import jaxdp
from jaxdp import models
from jaxdp.bench.environment import PACKAGES, provenance
from jaxdp.config import Config, Data, Model, Optimizer, Phase, Schedule
from jaxdp.models import weights
from jaxdp.models.torch_weights import to_torch
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.state import create_state

FASHION = Path("/usr/share/datasets/fashion-mnist")
FORMS = "separate", "folded"
CASES = {
    "digits": [],
    "fashion": [
        *("--model.width", "8", "--data.image-size", "32", "--data.augmentation", "pad_and_crop", "--epochs", "3"),
        *("--batch.0.global-batch", "128", "--batch.0.until-epoch", "2", "--batch.1.global-batch", "256"),
        *("--schedule.warmup-epochs", "0.5", "--mesh.cpu-devices", "2"),
    ],
}
TITLES = {
    "digits": "ResNet-50, handwritten digits, 1,437 images",
    "fashion": "ResNet-50 of width 8, Fashion-MNIST, 60,000 images",
}
BLOCKS, WIDTH, CLASSES = (2, 2, 2, 2), 8, 10  # ResNet-18
SIZE, MEAN, STD = 32, 0.286, 0.353
EPOCHS, WARMUP, BATCH = 3, 0.5, 96  # 60,000 images are 625 batches
RATE, MOMENTUM, DECAY, SMOOTHING = 0.1, 0.9, 5e-4, 0.1


@cache
def fashion() -> tuple:
    """((images, labels), (images, labels)): training and test images, uint8 [N, 32, 32, 3], padded with zeros.

    Raises SystemExit without the data set.
    """
    if not FASHION.is_dir():
        sys.exit(f"{FASHION} not found: install Debian's package dataset-fashion-mnist, then run this again")

    def read(name: str, header: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((FASHION / name).read_bytes()), np.uint8, offset=header)

    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        images = read(f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
        images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
        return np.repeat(images[..., None], 3, axis=-1), read(f"{name}-labels-idx1-ubyte.gz", 8).astype(np.int32)

    return part("train"), part("t10k")


def with_form(case: str, form: str, seed: int) -> dict:
    flags = ["--model.dtype", "bfloat16", "--model.batch-norm", form, *CASES[case], "--seed", str(seed)]
    result = trained(jaxdp.load_config("digits", flags), fashion() if case == "fashion" else None)
    return {"accuracy": result.accuracy, "loss": result.loss, "steps": result.steps, "flags": flags}


def config(seed: int) -> Config:
    return Config(
        seed=seed,
        epochs=float(EPOCHS),
        data=Data(image_size=SIZE, augmentation="pad_and_crop", mean=(MEAN,) * 3, std=(STD,) * 3),
        model=Model(depth=18, width=WIDTH, stem="small", classes=CLASSES),
        batch=(Phase(global_batch=BATCH, per_worker_batch=BATCH),),
        optimizer=Optimizer(name="sgd", momentum=MOMENTUM, weight_decay=DECAY, label_smoothing=SMOOTHING),
        schedule=Schedule(name="cosine", learning_rate=RATE, warmup_epochs=WARMUP),
    )


def by_torch(seed: int) -> float:
    """The accuracy of a run of PyTorch."""
    import torch
    from helpers.torch_layout import torch_network
    from PIL import Image
    from torch.nn.functional import cross_entropy
    from torchvision import transforms

    torch.manual_seed(seed)
    network = torch_network(BLOCKS, False, WIDTH, CLASSES, stem=3)
    started = create_state(config(seed), models.create(config(seed).model), make_mesh(1, 1))
    initial = to_torch(weights.named_tensors(*jax.device_get((started.params, started.batch_stats))), steps=0)
    network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in initial.items()})
    decoded = [transforms.ToTensor(), transforms.Normalize([MEAN] * 3, [STD] * 3)]
    augmented = [transforms.RandomCrop(SIZE, padding=4), transforms.RandomHorizontalFlip(), *decoded]

    def loader(part: tuple, steps: list, training: bool):
        transform = transforms.Compose(steps)

        def collate(items):
            return torch.stack([transform(image) for image, _ in items]), torch.tensor([label for _, label in items])

        items = [(Image.fromarray(image), int(label)) for image, label in zip(*part, strict=True)]
        return torch.utils.data.DataLoader(items, BATCH, shuffle=training, drop_last=training, collate_fn=collate)

    training, evaluation = fashion()
    batches = loader(training, augmented, True)
    groups: list[dict] = [{"params": [], "weight_decay": DECAY}, {"params": [], "weight_decay": 0.0}]
    for parameter in network.parameters():
        groups[parameter.ndim < 2]["params"].append(parameter)
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
        plain = loader(evaluation, decoded, False)
        correct = sum((network(images).argmax(1) == labels).sum().item() for images, labels in plain)
    return correct / len(evaluation[1])


def compare(rows: list[dict], field: str, names: tuple[str, str]) -> tuple[str, ...]:
    """Cells that compare two groups of runs, by `field`: mean and range of each, and the difference in standard errors.

    The standard error of the difference is from its runs or from the number of held-out images, whichever is larger.
    """
    groups = [[100 * row["accuracy"] for row in rows if row[field] == name] for name in names]
    first, second = map(statistics.mean, groups)
    of_seeds = math.sqrt(sum(statistics.variance(values) / len(values) for values in groups))
    share = (first + second) / 200
    of_images = 100 * math.sqrt(2 * share * (1 - share) / rows[0]["eval_examples"])
    error = max(of_seeds, of_images)
    shown = [f"{statistics.mean(group):.2f} % ({min(group):.2f} to {max(group):.2f})" for group in groups]
    return (*shown, f"{abs(first - second) / error if error else 0.0:.1f}")


def forms_table(record: dict) -> str:
    rows = []
    for case, title in TITLES.items():
        rows.append((title, *compare([row for row in record["runs"] if row["case"] == case], "form", FORMS)))
    seeds = len({row["seed"] for row in record["runs"]})
    columns = "training in bfloat16", *FORMS, "difference in standard errors"
    return markdown(columns, rows, f"Held-out accuracy: mean and range of {seeds} seeds.")


def pytorch_table(record: dict) -> str:
    rows = record["runs"]
    versions, seeds = rows[0]["provenance"]["versions"], len({row["seed"] for row in rows})
    return markdown(
        ("", "jaxdp", "PyTorch", "difference in standard errors"),
        [(f"ResNet-18 of width {WIDTH}, {EPOCHS} epochs", *compare(rows, "trainer", ("jaxdp", "PyTorch")))],
        f"Fashion-MNIST, accuracy on 10,000 test images: mean and range of {seeds} seeds. PyTorch {versions['torch']}, "
        f"torchvision {versions['torchvision']}.",
    )


def main():
    given = arguments(__doc__, study={"forms": "", "pytorch": ""}, seeds=[0, 1, 2])
    if given.study == "forms":
        name, packages, table = "batch_norm_training", PACKAGES, forms_table
        runs = [
            ({"case": case, "form": form, "seed": seed, "eval_examples": images}, partial(with_form, case, form, seed))
            for case, images in (("digits", 360), ("fashion", 10_000))
            for seed in given.seeds
            for form in FORMS
        ]
    else:
        name, packages, table = "fashion_vs_pytorch", (*PACKAGES, "torch", "torchvision"), pytorch_table
        trainers = {"jaxdp": lambda seed: trained(config(seed), fashion()).accuracy, "PyTorch": by_torch}
        runs = [
            ({"trainer": trainer, "seed": seed, "eval_examples": 10_000}, lambda one=one, seed=seed: {"accuracy": one(seed)})
            for seed in given.seeds
            for trainer, one in trainers.items()
        ]
    for facts, run in runs:
        record = read(name, {"runs": []})
        if any(facts.items() <= row.items() for row in record["runs"]):
            continue
        row = facts | run() | {"provenance": provenance(packages)}
        write(name, {"runs": [*record["runs"], row]})
        print(facts, f"{100 * row['accuracy']:.2f} %", flush=True)
    print(table(read(name)))


if __name__ == "__main__":
    main()
