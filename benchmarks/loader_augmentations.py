"""Throughput of jaxdp's loader and of PyTorch's DataLoader with torchvision's transforms, for each augmentation.

    pip install -e '.[peers]' && python benchmarks/loader_augmentations.py [--repeats 3] [--peer timm]

JPEGs of 400x350 pixels to random crops of 224x224, mirrored half of the time, in batches of 64 uint8 images; one worker per
core: threads for jaxdp, processes for PyTorch. jaxdp's policies, color jitter and erasing run on the device, so its loader
does the same work with all of them; only the interpolation of the crop changes it. Rounds alternate; starting the workers
and the first batches are excluded. Also times the Pillow operations alone, on one thread. With --peer timm the transforms and
the sampler of repeated augmentation are timm's, with the crops of its recipes; these rows are added to the record. Writes
benchmarks/results/loader_augmentations.json.
"""

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from functools import cache, partial
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
from jaxdp.data.loader import DecodedImages, default_threads
from jaxdp.data.prefetch import Prefetcher
from jaxdp.data.sampler import repeated_positions

ROOT = Path(__file__).parent.parent
INTERPOLATIONS = ("unfiltered", "bilinear", "bicubic", "random")
STRENGTHS = (0.4, 0.4, 0.4)  # of brightness, contrast and saturation


RESULT = ROOT / "benchmarks/results/loader_augmentations.json"
POLICY, REPEATS = "rand-m7-mstd0.5-inc1", 3  # of timm's recipes
REPEATED = f"each image {REPEATS} times a batch"


def jaxdp_batches(folder, workers, interpolation, repeats=1):
    ranges = Augment(crop_interpolation=interpolation)

    def crop(pixels, out, position):
        random_resized_crop(pixels, out, ranges=ranges, random=random_numbers(0, position))

    loader = DecodedImages(ImageFolder.open(folder), transform=crop, size=SIZE, classes=2, threads=workers)
    positions = np.arange(BATCH * (WARM_UP + COUNTED)).reshape(-1, BATCH)

    def load(positions):
        ids = repeated_positions(np.arange(BATCH), first=positions[0], global_batch=BATCH, repeats=repeats)
        return loader.batch(ids % len(loader), positions)

    ahead = Prefetcher(load, positions)
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


@cache  # for each worker
def timm_steps(policy):
    """timm's transforms of an image of its recipes: a policy, or "" for none."""
    from timm.data.auto_augment import rand_augment_transform
    from timm.data.transforms import RandomResizedCropAndInterpolation
    from torchvision import transforms

    steps = [RandomResizedCropAndInterpolation(SIZE, interpolation="random"), transforms.RandomHorizontalFlip()]
    fields = {"translate_const": int(0.45 * SIZE), "img_mean": (124, 116, 104)}
    steps += [rand_augment_transform(policy, fields)] if policy else []
    return transforms.Compose([*steps, transforms.PILToTensor()])


def timm_transform(data, position, *, policy):
    with Image.open(io.BytesIO(data)) as image:
        return timm_steps(policy)(image.convert("RGB"))


def timm_batches(folder, workers, transform):
    """With timm's sampler of repeated augmentation."""
    from timm.data.distributed_sampler import RepeatAugSampler
    from torch.utils.data import DataLoader

    data = input_vs_peers.TorchBytes(folder, BATCH * (WARM_UP + COUNTED), transform)
    sampler = RepeatAugSampler(data, num_replicas=1, rank=0, num_repeats=REPEATS)
    return iter(DataLoader(data, BATCH, sampler=sampler, num_workers=workers))


def against_timm(folder, workers) -> dict:
    """Name -> batches."""
    plain, policy = (partial(timm_transform, policy=policy) for policy in ("", POLICY))
    return {
        "jaxdp, random crops": partial(jaxdp_batches, folder, workers, "random"),
        f"jaxdp, random crops, {REPEATED}": partial(jaxdp_batches, folder, workers, "random", REPEATS),
        "timm, random crops": partial(input_vs_peers.torch_batches, folder, workers, plain),
        f"timm, random crops, {POLICY}": partial(input_vs_peers.torch_batches, folder, workers, policy),
        f"timm, random crops, {POLICY}, {REPEATED}": partial(timm_batches, folder, workers, policy),
    }


def measure(contenders, rounds) -> dict:
    """Rates of alternating rounds, and their medians."""
    rates = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, make in contenders.items():
            rates[name].append(input_vs_peers.rate(iter(make())))
            print(name, f"{rates[name][-1]:.0f}", flush=True)
    return {"rates": rates, "medians": {name: statistics.median(values) for name, values in rates.items()}}


def milliseconds(operation, image, count=200) -> float:
    began = time.perf_counter()
    for _ in range(count):
        operation(image)
    return (time.perf_counter() - began) / count * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", choices=("torchvision", "timm"), default="torchvision")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    workers = default_threads()
    packages = ("jax", "numpy", "simplejpeg", "opencv-python-headless", "pillow", "torch", "torchvision")
    record = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        size = make_images(folder, FILES)
        if arguments.peer == "timm":
            facts = {"provenance": provenance((*packages, "timm")), "load_average": os.getloadavg()[1], "workers": workers}
            record["timm"] = facts | measure(against_timm(folder, workers), arguments.repeats)
        else:
            contenders = {f"jaxdp, {name} crops": partial(jaxdp_batches, folder, workers, name) for name in INTERPOLATIONS}
            for name in ("crop and flip", *operations(), "RandomErasing"):
                transform = partial(peer_transform, name=name)
                contenders[f"torchvision, {name}"] = partial(input_vs_peers.torch_batches, folder, workers, transform)
            record |= {"provenance": provenance(packages), "file_bytes": size, "workers": workers}
            record |= measure(contenders, arguments.repeats)
            crop = Image.fromarray(np.asarray(Image.open(next(folder.glob("**/*.j*"))))[:SIZE, :SIZE])
            times = {name: [milliseconds(one, crop) for _ in range(arguments.repeats)] for name, one in operations().items()}
            record["operation_milliseconds"] = {name: statistics.median(values) for name, values in times.items()}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["timm"]["medians"] if arguments.peer == "timm" else record["medians"], indent=1))


if __name__ == "__main__":
    main()
