"""`jaxdp bench input`: how many images a second each part of the way to the devices gives, on all cores and on one."""

import statistics
import tempfile
import time
from pathlib import Path

import cv2
import jax
import numpy as np

from jaxdp.bench.provenance import provenance
from jaxdp.config import Config
from jaxdp.data import feed
from jaxdp.data.augment import augment, normalise
from jaxdp.data.decode import Scratch, decode
from jaxdp.data.folder import ImageFolder
from jaxdp.data.loader import Loader, default_threads
from jaxdp.data.order import sample_ids
from jaxdp.data.sources import IMAGENET_MEAN, IMAGENET_STD, PUBLISHED, ArraySource, training_shape

MADE, HEIGHT, WIDTH = 256, 350, 400
SMALL_IMAGES, SMALL_BATCH = 50_000, 512
IMAGENET = PUBLISHED["imagenet2012"]
BATCHES = 24  # loaded in a row, as a run does


def make_images(folder: Path, count: int = MADE, height: int = HEIGHT, width: int = WIDTH) -> int:
    """Write JPEGs as large as a photograph of that size (about 65 KB), into two classes; bytes of the mean one."""
    total = 0
    for number in range(count):
        random = np.random.default_rng(number)
        coarse = random.integers(0, 256, (height // 25, width // 25, 3)).astype(np.uint8)
        smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.float32)
        pixels = np.clip(smooth + random.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
        path = folder / f"class{number % 2}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 92])[1].tobytes()
        path.write_bytes(data)
        total += len(data)
    return total // count


def rate(work, images: int, repeats: int) -> dict:
    """Images a second of a call that handles `images` of them: median, slowest, fastest of `repeats` after one unrecorded."""
    work()
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        rates.append(images / (time.perf_counter() - began))
    return {"images_per_second": statistics.median(rates), "slowest": min(rates), "fastest": max(rates)}


def run(config: Config, mesh, batch: int, repeats: int = 5, source=None) -> dict:
    """Rates of reading, decoding, shaping (each on one thread), of the loader, of the transfer, and of images in memory.

    source: as a `Loader` takes it; None for JPEGs of 400x350 made for the purpose. The crop is that of the config.
    """
    with tempfile.TemporaryDirectory() as made:
        size_of_files = None
        if source is None:
            size_of_files = make_images(Path(made))
            source = ImageFolder(Path(made))
        shape, size = training_shape(config)
        indices = np.arange(min(MADE, len(source)))
        encoded = [source[int(index)][0] for index in indices]
        pixels = [decode(data) if isinstance(data, bytes) else data for data in encoded]
        scratch, row = Scratch(), np.empty((size, size, 3), np.uint8)
        threads = config.data.threads or default_threads()
        classes = 1 + max(label for _, label in map(source.__getitem__, indices.tolist()))
        one, all_threads = (Loader(source, shape, size, classes, count) for count in (1, threads))
        ids = np.resize(indices, batch)
        host = {"images": all_threads.batch(ids, ids)[0], "positions": ids.astype(np.uint32)}
        here = feed.put(host, mesh)

        @jax.jit
        def augmented(batch):
            return normalise(augment(config, batch["images"], batch["positions"]), IMAGENET_MEAN, IMAGENET_STD)

        def load_ahead():
            ahead = feed.Ahead(lambda ids: all_threads.batch(ids, ids), [ids] * BATCHES)
            while ahead.next() is not None:
                pass
            ahead.close()

        stages = {
            "source": (1, lambda: [source[int(index)] for index in indices], len(indices)),
            "decode": (1, lambda: [decode(data, scratch) for data in encoded if isinstance(data, bytes)], len(indices)),
            "crop": (1, lambda: [shape(image, row, n) for n, image in enumerate(pixels)], len(indices)),
            "batch, one thread": (1, lambda: one.batch(ids, ids), batch),
            f"batch, {threads} threads": (threads, load_ahead, BATCHES * batch),
            "augment, on the devices": (mesh.size, lambda: jax.block_until_ready(augmented(here)), batch),
            "transfer": (1, lambda: jax.block_until_ready(feed.put(host, mesh)), batch),
        }
        rows = [
            {"stage": name, "threads": count, **rate(work, images, repeats)} for name, (count, work, images) in stages.items()
        ]
    random = np.random.default_rng(0)
    small = ArraySource(random.integers(0, 256, (SMALL_IMAGES, 32, 32, 3), np.uint8), random.integers(0, 10, SMALL_IMAGES))
    steps = 40

    def gather():
        for step in range(steps):
            feed.train_batch(small, 0, step * SMALL_BATCH, SMALL_BATCH)

    began = time.perf_counter()
    sample_ids(0, 40 * IMAGENET + np.arange(batch), IMAGENET)
    seek_seconds = time.perf_counter() - began
    rows.append({"stage": "32x32 in memory", "threads": 1, **rate(gather, steps * SMALL_BATCH, repeats)})
    return {
        "provenance": provenance((*("jax", "numpy"), "simplejpeg", "opencv-python-headless", "pillow")),
        "image_size": size,
        "batch": batch,
        "file_bytes": size_of_files,
        "repeats": repeats,
        "seek_seconds": seek_seconds,
        "rows": rows,
    }


def shown(record: dict):
    """A rich table of images a second, on all threads of a stage and on each."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    made = "" if record["file_bytes"] is None else f", JPEGs of {WIDTH}x{HEIGHT} ({record['file_bytes'] / 1e3:.0f} KB)"
    table.title = f"images a second to {record['image_size']}x{record['image_size']}{made}, batches of {record['batch']}"
    table.add_column("stage")
    for name in ("threads", "images/s", "a thread", "slowest", "fastest"):
        table.add_column(name, justify="right")
    for row in record["rows"]:
        numbers = (row["images_per_second"], row["images_per_second"] / row["threads"], row["slowest"], row["fastest"])
        table.add_row(row["stage"], str(row["threads"]), *(f"{number:,.0f}" for number in numbers))
    yield table
    yield f"to find the samples of a step in epoch 40 of {IMAGENET:,} images: {1e3 * record['seek_seconds']:.0f} ms"


def draw(record: dict, path) -> None:
    """Images a second and thread of every stage."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.subplots()
    names = [row["stage"] for row in record["rows"]]
    rates = [row["images_per_second"] / row["threads"] for row in record["rows"]]
    axes.barh(names, rates, color="#0072B2")
    axes.bar_label(axes.containers[0], [f" {number:,.0f}" for number in rates])
    axes.set(xscale="log", xlabel="images a second and thread")
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
