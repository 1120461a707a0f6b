"""`jaxdp bench input`: images per second of each stage of the input pipeline, with all threads and with one."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import cv2
import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Table

from jaxdp.analysis.tables import table_of
from jaxdp.bench.environment import provenance
from jaxdp.choices import SOURCES
from jaxdp.config import Config
from jaxdp.data import prefetch
from jaxdp.data.augment import augment, normalize
from jaxdp.data.batch_sources import DecodedImages, ItemSource, default_threads
from jaxdp.data.decode import Scratch, decode
from jaxdp.data.host_crops import training_transform
from jaxdp.data.image_folder import ImageFolder

FILES, HEIGHT, WIDTH = 256, 350, 400
IMAGENET = SOURCES["imagenet2012"]
BATCHES = 24  # loaded in a row, as in a run


class Stage(NamedTuple):
    """A stage of the input pipeline. work: processes `images` images with `threads` threads."""

    name: str
    threads: int
    images: int
    work: Callable[[], object]


def make_images(folder: Path, count: int = FILES, *, height: int = HEIGHT, width: int = WIDTH) -> int:
    """Write JPEGs the size of photographs (about 65 KB) into two class folders; returns their mean size in bytes."""
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


def _measure(stage: Stage, repeats: int) -> dict:
    """Images per second of a stage: median, slowest, fastest, after one unrecorded call."""
    stage.work()
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        stage.work()
        rates.append(stage.images / (time.perf_counter() - began))
    rate = {"images_per_second": statistics.median(rates), "slowest": min(rates), "fastest": max(rates)}
    return {"stage": stage.name, "threads": stage.threads} | rate


def run(config: Config, mesh: Mesh, *, batch_size: int, repeats: int = 5, source: ItemSource | None = None) -> dict:
    """Measure reading, decoding, cropping, loading, augmentation on the devices, and transfer.

    source: encoded images; None generates JPEGs of 400x350. The crop is the config's.
    """
    with tempfile.TemporaryDirectory() as folder:
        file_bytes = None
        if source is None:
            file_bytes = make_images(Path(folder))
            source = ImageFolder.open(Path(folder))
        stages = _pipeline_stages(config, mesh, source, batch_size=batch_size)
        rows = [_measure(stage, repeats) for stage in stages]
    return {
        "provenance": provenance(("jax", "numpy", "simplejpeg", "opencv-python-headless", "pillow")),
        "image_size": training_transform(config)[1],
        "batch": batch_size,
        "file_bytes": file_bytes,
        "repeats": repeats,
        "rows": rows,
    }


def _pipeline_stages(config: Config, mesh: Mesh, source: ItemSource, *, batch_size: int) -> list[Stage]:
    """The stages from encoded images to batches on the devices."""
    transform, size = training_transform(config)
    indices = np.arange(min(FILES, len(source)))
    encoded = [source[int(index)][0] for index in indices]
    pixels = [decode(data) if isinstance(data, bytes) else data for data in encoded]
    scratch, row = Scratch(), np.empty((size, size, 3), np.uint8)
    threads = config.data.threads or default_threads()
    classes = 1 + max(label for _, label in map(source.__getitem__, indices.tolist()))
    one_thread, all_threads = (
        DecodedImages(source, transform=transform, size=size, target=classes, threads=count) for count in (1, threads)
    )
    ids = np.resize(indices, batch_size)
    distinct = np.split(ids, range(len(indices), batch_size, len(indices)))  # a batch decodes an image once
    host = {"images": all_threads.batch(ids, ids)[0], "positions": ids.astype(np.uint32)}
    on_devices = prefetch.to_global(host, mesh)

    @jax.jit
    def augment_batch(batch: dict[str, jax.Array]) -> jax.Array:
        return normalize(augment(config, batch["images"], batch["positions"]), IMAGENET.mean, IMAGENET.std)

    def prefetch_batches() -> None:
        prefetcher = prefetch.Prefetcher(lambda ids: all_threads.batch(ids, ids), distinct * BATCHES)
        while prefetcher.next() is not None:
            pass
        prefetcher.close()

    return [
        Stage("source", 1, len(indices), lambda: [source[int(index)] for index in indices]),
        Stage("decode", 1, len(indices), lambda: [decode(data, scratch) for data in encoded if isinstance(data, bytes)]),
        Stage("crop", 1, len(indices), lambda: [transform(image, row, n) for n, image in enumerate(pixels)]),
        Stage("batch, one thread", 1, batch_size, lambda: [one_thread.batch(some, some) for some in distinct]),
        Stage(f"batch, {threads} threads", threads, BATCHES * batch_size, prefetch_batches),
        Stage("augment, on the devices", mesh.size, batch_size, lambda: jax.block_until_ready(augment_batch(on_devices))),
        Stage("transfer", 1, batch_size, lambda: jax.block_until_ready(prefetch.to_global(host, mesh))),
    ]


def render(record: dict) -> Iterator[Table | str]:
    """A table of images per second, with all threads of a stage and for each thread."""
    files = "" if record["file_bytes"] is None else f", JPEGs of {WIDTH}x{HEIGHT} ({record['file_bytes'] / 1e3:.0f} KB)"
    title = f"images per second at {record['image_size']}x{record['image_size']}{files}, batches of {record['batch']}"
    rows = []
    for row in record["rows"]:
        numbers = (row["images_per_second"], row["images_per_second"] / row["threads"], row["slowest"], row["fastest"])
        rows.append((row["stage"], str(row["threads"]), *(f"{number:,.0f}" for number in numbers)))
    yield table_of(title, ("stage", "threads", "images/s", "per thread", "slowest", "fastest"), rows, left=("stage",))
