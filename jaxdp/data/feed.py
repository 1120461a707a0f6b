"""Host batches by position, and their way onto the mesh."""

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.data.order import sample_ids
from jaxdp.parallel.mesh import AXES


def batch_sharding(mesh) -> NamedSharding:
    """Rows over all devices, vertical first: worker w of a batch has rows w * per_worker_batch onwards on every mesh."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def put(batch: dict, mesh) -> dict:
    """A process's rows of a batch, as global arrays over the mesh."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}


def train_batch(source, seed: int, first_sample: int, global_batch: int) -> dict:
    """The images that the step at `first_sample` samples seen trains on, with their positions in the run."""
    positions = np.arange(first_sample, first_sample + global_batch)
    images, labels = source.batch(sample_ids(seed, positions, len(source)), positions)
    return {"images": images, "labels": labels, "positions": positions.astype(np.uint32)}


def evaluation_batches(source, batch: int, rows: int):
    """Every example once, in order, `batch` at a time in arrays of `rows` rows; rows left over have weight 0."""
    for first in range(0, len(source), batch):
        positions = first + np.arange(rows)
        real = positions < min(first + batch, len(source))
        positions = np.where(real, positions, 0)
        images, labels = source.batch(positions, positions)
        yield {
            "images": images,
            "labels": labels,
            "positions": positions.astype(np.uint32),
            "weights": real.astype(np.int32),
        }


class Feeder:
    """The batches of the steps from `first` to `end` samples seen, loaded by a thread ahead of the step that needs them.

    `waited`: seconds for which `next` had to wait. Close it when done.
    """

    AHEAD = 2  # batches on the host beside the one on its way to the devices

    def __init__(self, source, seed: int, mesh, first: int, end: int, global_batch: int):
        self.source, self.seed, self.mesh, self.global_batch, self.end = source, seed, mesh, global_batch, end
        self.position, self.waited = first, 0.0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self.loading = deque()
        self._load_ahead()

    def _load_ahead(self):
        while len(self.loading) < self.AHEAD and self.position < self.end:
            self.loading.append(self.thread.submit(train_batch, self.source, self.seed, self.position, self.global_batch))
            self.position += self.global_batch

    def next(self) -> dict | None:
        """The next batch on the mesh; None after the last."""
        if not self.loading:
            return None
        began = time.perf_counter()
        host = self.loading.popleft().result()
        self.waited += time.perf_counter() - began
        self._load_ahead()
        return put(host, self.mesh)

    def close(self):
        self.thread.shutdown(wait=False, cancel_futures=True)
