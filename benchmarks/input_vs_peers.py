"""Throughput of jaxdp's loader, PyTorch's DataLoader and Grain on the same JPEGs.

    pip install -e '.[peers]' && python benchmarks/input_vs_peers.py [--repeats 5]

JPEGs of 400x350 pixels to random crops of 224x224, mirrored half of the time, in batches of 64 uint8 images. Each peer runs
with its usual decoder (Pillow, as in torchvision's transforms) and with jaxdp's, with one worker per core: processes for
PyTorch, threads for Grain, whose worker processes need a program started by absl. Rounds alternate; starting the workers and
the first batches are excluded. Writes benchmarks/results/input_vs_peers.json and prints a table.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from jaxdp.bench.environment import provenance
from jaxdp.bench.input import make_images
from jaxdp.config import Augment
from jaxdp.data.decode import Scratch, decode, random_numbers, random_resized_crop
from jaxdp.data.image_folder import ImageFolder
from jaxdp.data.loader import DecodedImages, default_threads
from jaxdp.data.prefetch import Prefetcher

ROOT = Path(__file__).parent.parent
SIZE, BATCH, FILES, WARM_UP, COUNTED = 224, 64, 256, 4, 16
SCRATCH = Scratch()


def ours(data: bytes, position: int) -> np.ndarray:
    out = np.empty((SIZE, SIZE, 3), np.uint8)
    random_resized_crop(decode(data, SCRATCH), out, ranges=Augment(), random=random_numbers(0, position))
    return out


class Bytes:
    """The files over and over, as (bytes, label)."""

    def __init__(self, folder, length):
        self.source, self.length = ImageFolder.open(folder), length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.source[int(index) % len(self.source)]


class TorchBytes(Bytes):
    """The same as a PyTorch data set: a transform of bytes and position."""

    def __init__(self, folder, length, transform):
        super().__init__(folder, length)
        self.transform = transform

    def __getitem__(self, index):
        data, label = super().__getitem__(index)
        return self.transform(data, index), label


def usual_pillow(data, position) -> np.ndarray:
    """Decoding, crop and resize by Pillow, as in torchvision's transforms."""
    from jaxdp.data.decode import random_crop_box

    random = random_numbers(0, position)
    with Image.open(io.BytesIO(data)) as image:
        image = image.convert("RGB")
        top, left, height, width = random_crop_box(image.height, image.width, min_area=0.08, random=random)
        box = (left, top, left + width, top + height)
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        return np.asarray(image if random[0] < 0.5 else image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))


def jaxdp_batches(folder, workers):
    def shape(pixels, out, position):
        random_resized_crop(pixels, out, ranges=Augment(), random=random_numbers(0, position))

    loader = DecodedImages(ImageFolder.open(folder), transform=shape, size=SIZE, classes=2, threads=workers)
    positions = np.arange(BATCH * (WARM_UP + COUNTED)).reshape(-1, BATCH)
    ahead = Prefetcher(lambda positions: loader.batch(positions % len(loader), positions), positions)
    while (batch := ahead.next()) is not None:
        yield batch
    ahead.close()


def torch_batches(folder, workers, transform):
    from torch.utils.data import DataLoader

    data = TorchBytes(folder, BATCH * (WARM_UP + COUNTED), transform)
    return iter(DataLoader(data, BATCH, shuffle=True, num_workers=workers))


def grain_batches(folder, workers, transform):
    import grain

    source = Bytes(folder, BATCH * (WARM_UP + COUNTED))
    data = grain.MapDataset.source(source).seed(0).shuffle()
    data = data.map_with_index(lambda index, item: {"image": transform(item[0], index), "label": item[1]}).batch(BATCH)
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=workers, prefetch_buffer_size=4)))


def rate(batches) -> float:
    """Images a second from the end of the warm-up on."""
    for _ in range(WARM_UP):
        next(batches)
    began = time.perf_counter()
    for _ in range(COUNTED):
        next(batches)
    return BATCH * COUNTED / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    workers = default_threads()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        size = make_images(folder, FILES)
        contenders = {
            "jaxdp": lambda: jaxdp_batches(folder, workers),
            "PyTorch DataLoader, Pillow": lambda: torch_batches(folder, workers, usual_pillow),
            "PyTorch DataLoader, our decoder": lambda: torch_batches(folder, workers, ours),
            "Grain threads, Pillow": lambda: grain_batches(folder, workers, usual_pillow),
            "Grain threads, our decoder": lambda: grain_batches(folder, workers, ours),
        }
        rates = {name: [] for name in contenders}
        for _ in range(arguments.repeats):
            for name, make in contenders.items():
                rates[name].append(rate(make()))
                print(name, f"{rates[name][-1]:.0f}", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    packages = ("jax", "numpy", "simplejpeg", "opencv-python-headless", "pillow", "torch", "grain")
    record = {"provenance": provenance(packages), "file_bytes": size, "workers": workers, "rates": rates, "medians": medians}
    (ROOT / "benchmarks/results/input_vs_peers.json").write_text(json.dumps(record, indent=1) + "\n")
    print("| loader | images/s | a core | jaxdp is |")
    print("|---|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median:,.0f} | {median / workers:,.0f} | {medians['jaxdp'] / median:.2f} x |")


if __name__ == "__main__":
    main()
