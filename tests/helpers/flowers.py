"""An image folder of three classes and a run on it with random weights, for tests of predictions."""

import dataclasses

import numpy as np
from helpers import torch_layout
from helpers.saved_run import save_run
from PIL import Image
from safetensors.numpy import save_file

from jaxdp.config import Config, Data, Mesh, Model
from jaxdp.data.sources import open_datasets
from jaxdp.models import resnet
from jaxdp.models.weights import read
from jaxdp.setup.run_dir import run_config, write_class_names

CLASSES = sorted(["daisy", "Löwenzahn", "rose"])


def make_flowers(root, monkeypatch):
    """Write `flowers`, images of three colors in many sizes, `w.safetensors`, and `run`, a run with these weights.

    The run's ResNet-18 has one block in each of its two stages.
    """
    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 5)):
        for label, name in enumerate(CLASSES):
            folder = root / "flowers" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 160, (*draw.integers(16, 40, 2), 3))
                pixels[..., label] += 60
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    (root / "flowers" / "val" / CLASSES[0] / "0.png").unlink()  # classes of unequal size
    save_file(torch_layout.random_tensors(3, (1, 1), False, width=4, classes=4, stem=3), root / "w.safetensors")
    config = Config(
        name="flowers",
        data=Data(source="folder", directory=str(root / "flowers"), image_size=16),
        model=Model(depth=18, width=4, stem="small", classes=4),
        mesh=Mesh(vertical=64, horizontal=64),  # predictions do not need the mesh of the run
    )
    monkeypatch.setitem(resnet.BLOCKS, 18, (1, 1))
    weights = read(root / "w.safetensors")
    save_run(config, root / "run", weights.params, weights.batch_stats)
    write_class_names(root / "run", open_datasets(config, may_lack_classes=True).classes)


def held_out_files(root):
    return sorted((root / "flowers" / "val").rglob("*.png"))


def config_for_any_mesh(root):
    return dataclasses.replace(run_config(root / "run"), mesh=Mesh())
