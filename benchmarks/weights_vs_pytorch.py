"""Difference of the logits of PyTorch's ResNet and jaxdp's with the same weights, for every depth, in both directions.

    python benchmarks/weights_vs_pytorch.py

Random weights and random batch normalization statistics, float32, evaluation mode. Needs the extra `peers`. Writes
benchmarks/results/weights_vs_pytorch.json and prints the differences.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from common import arguments, write
from helpers import torch_layout
from safetensors.numpy import save_file

from jaxdp import models
from jaxdp.bench.environment import PACKAGES, provenance
from jaxdp.models import weights
from jaxdp.models.torch_weights import to_torch

DEPTHS = {18: ((2, 2, 2, 2), False), 34: ((3, 4, 6, 3), False), 50: ((3, 4, 6, 3), True)}
DEPTHS |= {101: ((3, 4, 23, 3), True), 152: ((3, 8, 36, 3), True)}
IMAGES, SIZE = 2, 224


def of_depth(depth: int, folder: Path) -> dict:
    """The largest difference of a logit, for PyTorch's weights in jaxdp ("in") and jaxdp's in PyTorch ("out")."""
    images = np.random.default_rng(depth).normal(size=(IMAGES, SIZE, SIZE, 3)).astype(np.float32)
    peer = torch_layout.torch_network(*DEPTHS[depth]).eval()
    row = {"depth": depth}
    for seed, way in enumerate(("in", "out")):
        held = torch_layout.random_tensors(seed, *DEPTHS[depth])
        if way == "in":
            peer.load_state_dict({name: torch.from_numpy(value) for name, value in held.items()}, strict=True)
            held = {name: value.numpy() for name, value in peer.state_dict().items()}
        save_file(held, folder / "weights.safetensors")
        ours = weights.read(folder / "weights.safetensors")
        if way == "out":
            tensors = to_torch(weights.named_tensors(ours.params, ours.batch_stats), steps=1)
            peer.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()}, strict=True)
        here, _ = models.create(ours.model).apply(ours.params, ours.batch_stats, images, train=False)
        with torch.no_grad():
            there = peer(torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))).numpy()
        row[way] = {"difference": float(np.abs(np.asarray(here) - there).max()), "largest_logit": float(np.abs(there).max())}
    return row


def main():
    arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        rows = [of_depth(depth, Path(folder)) for depth in DEPTHS]
    record = {"provenance": provenance((*PACKAGES, "torch")), "images": [IMAGES, SIZE, SIZE, 3], "rows": rows}
    write("weights_vs_pytorch", record)
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
