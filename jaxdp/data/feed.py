"""Host batches by position, and their way onto the mesh."""

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
    images, labels = source.batch(sample_ids(seed, positions, len(source)))
    return {"images": images, "labels": labels, "positions": positions.astype(np.uint32)}


def evaluation_batches(source, batch: int, rows: int):
    """Every example once, in order, `batch` at a time in arrays of `rows` rows; rows left over have weight 0."""
    for first in range(0, len(source), batch):
        positions = first + np.arange(rows)
        real = positions < min(first + batch, len(source))
        positions = np.where(real, positions, 0)
        images, labels = source.batch(positions)
        yield {
            "images": images,
            "labels": labels,
            "positions": positions.astype(np.uint32),
            "weights": real.astype(np.int32),
        }
