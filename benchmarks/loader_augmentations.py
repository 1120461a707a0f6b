"""Throughput of jaxdp's loader and of PyTorch's DataLoader with torchvision's transforms, for each augmentation.

    pip install -e '.[peers]' && python benchmarks/loader_augmentations.py [--repeats 3]

JPEGs of 400x350 pixels to random crops of 224x224, mirrored half of the time, in batches of 64 uint8 images; one worker per
core: threads for jaxdp, processes for PyTorch. jaxdp's policies, color jitter and erasing run on the device, so its loader
does the same work with all of them; only the interpolation of the crop changes it. Rounds alternate; starting the workers
and the first batches are excluded. Also times the Pillow operations alone, on one thread. Writes
benchmarks/results/loader_augmentations.json.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import input_vs_peers
import numpy as np
from input_vs_peers import BATCH, COUNTED, FILES, SIZE, WARM_UP
from PIL import Image

from jaxdp.bench.environment import provenance
from jaxdp.bench.input import make_images
from jaxdp.config import Augment
from jaxdp.data.decode import random_numbers, random_resized_crop
from jaxdp.data.image_folder import ImageFolder
from jaxdp.data.loader import Loader, default_threads
from jaxdp.data.prefetch import Prefetcher

ROOT = Path(__file__).parent.parent
INTERPOLATIONS = ("unfiltered", "bilinear", "bicubic", "random")
STRENGTHS = (0.4, 0.4, 0.4)  # of brightness, contrast and saturation


def jaxdp_batches(folder, workers, interpolation):
    ranges = Augment(crop_interpolation=interpolation)

    def crop(pixels, out, position):
        random_resized_crop(pixels, out, ranges=ranges, random=random_numbers(0, position))

    loader = Loader(ImageFolder.open(folder), transform=crop, size=SIZE, classes=2, threads=workers)
    positions = np.arange(BATCH * (WARM_UP + COUNTED)).reshape(-1, BATCH)
    ahead = Prefetcher(lambda positions: loader.batch(positions % len(loader), positions), positions)
    while (batch := ahead.next()) is not None:
        yield batch
    ahead.close()


def operations() -> dict:
    """Name -> torchvision's operation on a crop."""
    from torchvision import transforms

    return {
        "RandAugment": transforms.RandAugment(),
        "TrivialAugmentWide": transforms.TrivialAugmentWide(),
        "ColorJitter": transforms.ColorJitter(*STRENGTHS),
        "ColorJitter with hue": transforms.ColorJitter(*STRENGTHS, 0.1),
    }


def peer_transform(data, position, *, name):
    from torchvision import transforms

    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    steps += [operations()[name]] if name in operations() else []
    steps += [transforms.PILToTensor()]
    steps += [transforms.RandomErasing(p=1.0)] if name == "RandomErasing" else []
    with Image.open(io.BytesIO(data)) as image:
        return transforms.Compose(steps)(image.convert("RGB"))


def milliseconds(operation, image, count=200) -> float:
    began = time.perf_counter()
    for _ in range(count):
        operation(image)
    return (time.perf_counter() - began) / count * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    workers = default_threads()
    names = ("crop and flip", *operations(), "RandomErasing")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        size = make_images(folder, FILES)
        contenders = {f"jaxdp, {name} crops": partial(jaxdp_batches, folder, workers, name) for name in INTERPOLATIONS}
        for name in names:
            transform = partial(peer_transform, name=name)
            contenders[f"torchvision, {name}"] = partial(input_vs_peers.torch_batches, folder, workers, transform)
        rates, times = {name: [] for name in contenders}, {name: [] for name in operations()}
        crop = Image.fromarray(np.asarray(Image.open(next(folder.glob("**/*.j*"))))[:SIZE, :SIZE])
        for _ in range(arguments.repeats):
            for name, make in contenders.items():
                rates[name].append(input_vs_peers.rate(iter(make())))
                print(name, f"{rates[name][-1]:.0f}", flush=True)
            for name, operation in operations().items():
                times[name].append(milliseconds(operation, crop))
    record = {
        "provenance": provenance(("jax", "numpy", "simplejpeg", "opencv-python-headless", "pillow", "torch", "torchvision")),
        "file_bytes": size,
        "workers": workers,
        "rates": rates,
        "medians": {name: statistics.median(values) for name, values in rates.items()},
        "operation_milliseconds": {name: statistics.median(values) for name, values in times.items()},
    }
    (ROOT / "benchmarks/results/loader_augmentations.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["medians"] | record["operation_milliseconds"], indent=1))


if __name__ == "__main__":
    main()
