"""Throughput of jaxdp's loader, PyTorch's DataLoader and Grain on the same JPEGs.

    pip install -e '.[peers]' && python benchmarks/loaders.py decoders | torchvision | timm [--repeats 5]

JPEGs of 400x350 pixels to random crops of 224x224, mirrored half of the time, in batches of 64 uint8 images, with one worker
per core: threads for jaxdp and Grain, whose worker processes need a program started by absl, and processes for PyTorch. Rounds
alternate; starting the workers and the first batches are excluded.

- decoders: each peer with its usual decoder (Pillow, as in torchvision's transforms) and with jaxdp's; input_vs_peers.json
- torchvision: augmentations of torchvision. jaxdp's policies, color jitter and erasing run on the device, so its loader does
  the same work with all of them; only the interpolation of the crop changes it; loader_augmentations.json
- timm: policy, crops and sampler of repeated augmentation of timm's recipes; a part of loader_augmentations.json
"""

import io
import os
import statistics
import tempfile
import time
from functools import cache, partial
from pathlib import Path

import numpy as np
from common import made_on, markdown, options, read, write
from PIL import Image

from jaxdp.bench.environment import provenance
from jaxdp.bench.input import make_images
from jaxdp.config import Augment
from jaxdp.data.decode import Scratch, decode, random_crop_box, random_numbers, random_resized_crop
from jaxdp.data.image_folder import ImageFolder
from jaxdp.data.loader import DecodedImages, default_threads
from jaxdp.data.prefetch import Prefetcher
from jaxdp.data.sampler import repeated_positions

SIZE, BATCH, FILES, WARM_UP, COUNTED = 224, 64, 256, 4, 16
SCRATCH = Scratch()
INTERPOLATIONS = ("unfiltered", "bilinear", "bicubic", "random")
STRENGTHS = (0.4, 0.4, 0.4)  # of brightness, contrast and saturation
POLICY, REPEATS = "rand-m7-mstd0.5-inc1", 3  # of timm's recipes
REPEATED = f"each image {REPEATS} times a batch"
PACKAGES = ("jax", "numpy", "simplejpeg", "opencv-python-headless", "pillow", "torch")


class Bytes:
    """The files over and over, as (bytes, label)."""

    def __init__(self, folder):
        self.source = ImageFolder.open(folder)

    def __len__(self):
        return BATCH * (WARM_UP + COUNTED)

    def __getitem__(self, index):
        return self.source[int(index) % len(self.source)]


class TorchBytes(Bytes):
    """The same as a PyTorch data set: a transform of bytes and position."""

    def __init__(self, folder, transform):
        super().__init__(folder)
        self.transform = transform

    def __getitem__(self, index):
        data, label = super().__getitem__(index)
        return self.transform(data, index), label


def by_jaxdp(folder, interpolation="unfiltered", repeats=1):
    ranges = Augment(crop_interpolation=interpolation)

    def crop(pixels, out, position):
        random_resized_crop(pixels, out, ranges=ranges, random=random_numbers(0, position))

    loader = DecodedImages(ImageFolder.open(folder), transform=crop, size=SIZE, classes=2, threads=default_threads())
    positions = np.arange(BATCH * (WARM_UP + COUNTED)).reshape(-1, BATCH)

    def load(positions):
        ids = repeated_positions(np.arange(BATCH), first=positions[0], global_batch=BATCH, repeats=repeats)
        return loader.batch(ids % len(loader), positions)

    ahead = Prefetcher(load, positions)
    while (batch := ahead.next()) is not None:
        yield batch
    ahead.close()


def by_torch(folder, transform, repeated=False):
    """repeated: with timm's sampler of repeated augmentation."""
    from torch.utils.data import DataLoader

    data, order = TorchBytes(folder, transform), {"shuffle": True}
    if repeated:
        from timm.data.distributed_sampler import RepeatAugSampler

        order = {"sampler": RepeatAugSampler(data, num_replicas=1, rank=0, num_repeats=REPEATS)}
    return iter(DataLoader(data, BATCH, num_workers=default_threads(), **order))


def by_grain(folder, transform):
    import grain

    data = grain.MapDataset.source(Bytes(folder)).seed(0).shuffle()
    data = data.map_with_index(lambda index, item: {"image": transform(item[0], index), "label": item[1]}).batch(BATCH)
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=default_threads(), prefetch_buffer_size=4)))


def ours(data: bytes, position: int) -> np.ndarray:
    out = np.empty((SIZE, SIZE, 3), np.uint8)
    random_resized_crop(decode(data, SCRATCH), out, ranges=Augment(), random=random_numbers(0, position))
    return out


def usual_pillow(data: bytes, position: int) -> np.ndarray:
    """Decoding, crop and resize by Pillow, as in torchvision's transforms."""
    random = random_numbers(0, position)
    with Image.open(io.BytesIO(data)) as image:
        image = image.convert("RGB")
        top, left, height, width = random_crop_box(image.height, image.width, min_area=0.08, random=random)
        box = (left, top, left + width, top + height)
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        return np.asarray(image if random[0] < 0.5 else image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))


def operations() -> dict:
    """Name -> torchvision's operation on a crop."""
    from torchvision import transforms

    return {
        "RandAugment": transforms.RandAugment(),
        "TrivialAugmentWide": transforms.TrivialAugmentWide(),
        "ColorJitter": transforms.ColorJitter(*STRENGTHS),
        "ColorJitter with hue": transforms.ColorJitter(*STRENGTHS, 0.1),
    }


def torchvision_transform(data, position, *, name):
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


def decoders(folder) -> dict:
    """Name -> function that returns batches."""
    return {
        "jaxdp": partial(by_jaxdp, folder),
        "PyTorch DataLoader, Pillow": partial(by_torch, folder, usual_pillow),
        "PyTorch DataLoader, our decoder": partial(by_torch, folder, ours),
        "Grain threads, Pillow": partial(by_grain, folder, usual_pillow),
        "Grain threads, our decoder": partial(by_grain, folder, ours),
    }


def of_torchvision(folder) -> dict:
    peers = ("crop and flip", *operations(), "RandomErasing")
    return {
        **{f"jaxdp, {name} crops": partial(by_jaxdp, folder, name) for name in INTERPOLATIONS},
        **{f"torchvision, {name}": partial(by_torch, folder, partial(torchvision_transform, name=name)) for name in peers},
    }


def of_timm(folder) -> dict:
    plain, policy = (partial(timm_transform, policy=policy) for policy in ("", POLICY))
    return {
        "jaxdp, random crops": partial(by_jaxdp, folder, "random"),
        f"jaxdp, random crops, {REPEATED}": partial(by_jaxdp, folder, "random", REPEATS),
        "timm, random crops": partial(by_torch, folder, plain),
        f"timm, random crops, {POLICY}": partial(by_torch, folder, policy),
        f"timm, random crops, {POLICY}, {REPEATED}": partial(by_torch, folder, policy, repeated=True),
    }


def rate(batches) -> float:
    """Images a second from the end of the warm-up on."""
    for _ in range(WARM_UP):
        next(batches)
    began = time.perf_counter()
    for _ in range(COUNTED):
        next(batches)
    return BATCH * COUNTED / (time.perf_counter() - began)


def alternating_rounds(contenders: dict, rounds: int) -> dict:
    """The rates of alternating rounds, by contender, and their medians. contenders: name -> function that returns batches."""
    rates = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, batches in contenders.items():
            rates[name].append(rate(batches()))
            print(name, f"{rates[name][-1]:.0f}", flush=True)
    return {"rates": rates, "medians": {name: statistics.median(values) for name, values in rates.items()}}


def main():
    studies = {"decoders": (decoders, ["grain"]), "torchvision": (of_torchvision, ["torchvision"])}
    studies["timm"] = of_timm, ["torchvision", "timm"]
    parser = options(__doc__)
    parser.add_argument("study", choices=studies)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    contenders, packages = studies[arguments.study]
    with tempfile.TemporaryDirectory() as made:
        size = make_images(Path(made), FILES)
        record = {"provenance": provenance([*PACKAGES, *packages]), "file_bytes": size, "workers": default_threads()}
        record |= {"load_average": os.getloadavg()[1]} | alternating_rounds(contenders(Path(made)), arguments.repeats)
    if arguments.study == "decoders":
        write("input_vs_peers", record)
    else:
        before = read("loader_augmentations", {})
        write("loader_augmentations", before | ({"timm": record} if arguments.study == "timm" else record))


def decoders_table(record: dict) -> str:
    medians, versions = record["medians"], record["provenance"]["versions"]
    rows = [
        (name, f"{rate:,.0f}", f"{rate / record['workers']:,.0f}", f"{medians['jaxdp'] / rate:.2f} x")
        for name, rate in medians.items()
    ]
    return markdown(
        ("loader", "images/s", "per core", "speed of jaxdp"),
        rows,
        f"Medians of {len(record['rates']['jaxdp'])} alternating rounds with {record['workers']} workers, by "
        f"`benchmarks/loaders.py` on {made_on(record)}, PyTorch {versions['torch']}, Grain {versions['grain']}.",
    )


def augmentations_table(record: dict) -> str:
    rates, timm = record["medians"], record["timm"]
    host, plain = rates["jaxdp, unfiltered crops"], rates["torchvision, crop and flip"]
    names = {name: name.partition(", ")[2] for name in rates if name.startswith("torchvision")}
    names["torchvision, crop and flip"] = "nothing else"
    rows = [(shown, f"{rates[name]:,.0f}", f"{host:,.0f}", f"{host / rates[name]:.1f} x") for name, shown in names.items()]
    for name in INTERPOLATIONS[1:]:
        rate = rates[f"jaxdp, {name} crops"]
        peer = (f"{plain:,.0f}", f"{rate:,.0f}", f"{rate / plain:.1f} x") if name == "bilinear" else ("", f"{rate:,.0f}", "")
        rows.append((f"{name} antialiased crops", *peer))
    second, rates = [], timm["medians"]
    for name, rate in rates.items():
        maker, _, what = name.partition(", random crops")
        if maker == "timm":
            host = rates["jaxdp, random crops" + what.replace(f", {POLICY}", "")]
            second.append((what.removeprefix(", ") or "nothing else", f"{rate:,.0f}", f"{host:,.0f}", f"{host / rate:.1f} x"))
    versions = record["provenance"]["versions"] | timm["provenance"]["versions"]
    return markdown(
        ("random crops and flips, and", "torchvision, images/s", "jaxdp, images/s", ""),
        rows,
        markdown(("crops with a random filter and flips, and", "timm, images/s", "jaxdp, images/s", ""), second),
        f"Medians of {len(next(iter(record['rates'].values())))} alternating rounds with {record['workers']} workers, by "
        f"`benchmarks/loaders.py` on {made_on(record)}, torchvision {versions['torchvision']} in PyTorch's DataLoader; other "
        f"programs used the cores, too. The second table, with timm {versions['timm']}, is of another run, at a load average "
        f"of {timm['load_average']:.0f}: compare rates within a table only.",
    )


if __name__ == "__main__":
    main()
