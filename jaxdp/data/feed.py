"""Host batches by position, and their way onto the mesh."""

import itertools
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.data.groups import AHEAD
from jaxdp.data.order import sample_ids
from jaxdp.parallel.mesh import AXES


def batch_sharding(mesh) -> NamedSharding:
    """Rows over all devices, vertical first: worker w of a batch has rows w * per_worker_batch onwards on every mesh."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def places_here(mesh) -> np.ndarray:
    """The places, among all devices of the mesh in row-major order, of those that belong to this process."""
    return np.flatnonzero([device.process_index == jax.process_index() for device in mesh.devices.flat])


def rows_here(mesh, rows: int) -> np.ndarray:
    """The rows of a batch of `rows` that this process's devices hold, int64: all of them where there is one process."""
    per_device = rows // mesh.size
    return (places_here(mesh)[:, None] * per_device + np.arange(per_device)).ravel()


def put(batch: dict, mesh) -> dict:
    """A process's rows of a batch (see `rows_here`), as global arrays over the mesh."""
    sharding, here = batch_sharding(mesh), len(places_here(mesh))
    shapes = {name: (len(rows) // here * mesh.size, *rows.shape[1:]) for name, rows in batch.items()}
    return {name: jax.make_array_from_process_local_data(sharding, rows, shapes[name]) for name, rows in batch.items()}


def load(source, seed: int, positions) -> dict:
    """The images at these positions of the run, with their labels. positions: int64 [B]."""
    images, labels = source.batch(sample_ids(seed, positions, len(source)), positions)
    return {"images": images, "labels": labels, "positions": positions.astype(np.uint32)}


def load_numbers(source, seed: int, positions) -> dict:
    """What `load` gives for an `ArraySource` whose images are on the devices already: their numbers in their place."""
    numbers = sample_ids(seed, positions, len(source))
    return {"numbers": numbers.astype(np.int32), "labels": source.labels[numbers], "positions": positions.astype(np.uint32)}


def train_batch(source, seed: int, first_sample: int, global_batch: int) -> dict:
    """All images that the step at `first_sample` samples seen trains on, whatever process has them, with their positions."""
    return load(source, seed, np.arange(first_sample, first_sample + global_batch))


def evaluation_batch(source, batch: int, rows, first: int) -> dict:
    """The examples from `first` on, `batch` of them, in order. seen: 1 for those, 0 for rows left over; weights: 0 too for
    images that the source leaves out.

    rows: int [R], the rows of the batch that are wanted, those of this process's devices (see `rows_here`).
    """
    positions = first + rows
    real = positions < min(first + batch, len(source))
    positions = np.where(real, positions, 0)
    images, labels = source.batch(positions, positions)
    return {
        "images": images,
        "labels": np.maximum(labels, 0),
        "positions": positions.astype(np.uint32),
        "seen": real.astype(np.int32),
        "weights": (real & (labels >= 0)).astype(np.int32),
    }


class Ahead:
    """What `load` returns for each of `items`, in their order, `threads` of them being loaded while the caller works.

    `waited`: seconds for which `next` had to wait. Close it when done.
    """

    def __init__(self, load, items, threads: int = AHEAD):
        self.load, self.items, self.waited = load, iter(items), 0.0
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="feed")
        self.loading = deque(self.threads.submit(load, item) for item in itertools.islice(self.items, threads))

    def next(self, result=Future.result):
        """What comes next; None after the last. Raises what `load` raised for it. result: how to wait for a future."""
        if not self.loading:
            return None
        began = time.perf_counter()
        loaded = result(self.loading.popleft())
        self.waited += time.perf_counter() - began
        self.loading.extend(self.threads.submit(self.load, item) for item in itertools.islice(self.items, 1))
        return loaded

    def close(self):
        self.threads.shutdown(wait=False, cancel_futures=True)


class Feeder:
    """The batches of the steps from `first` to `end` samples seen, loaded ahead of the step that needs them.

    A process loads the rows of its own devices. It holds no more than AHEAD + 1 groups of images, of `group` images a device
    each; a batch of several groups is put together on the devices. resident: the images are there already (see
    `load_numbers`). `waited`: seconds for which `next` had to wait for images. Close it when done.
    """

    def __init__(self, source, seed: int, mesh, first: int, end: int, global_batch: int, group=None, resident=False):
        self.mesh, self.global_batch, self.rows = mesh, global_batch, global_batch // mesh.size
        self.group = group or self.rows
        load_one = load_numbers if resident else load
        self.ahead = Ahead(lambda positions: load_one(source, seed, positions), self._positions(first, end))

    def _positions(self, first: int, end: int):
        """The positions of every group in turn."""
        starts = places_here(self.mesh) * self.rows
        for batch in range(first, end, self.global_batch):
            for place in range(0, self.rows, self.group):
                yield (batch + starts[:, None] + place + np.arange(self.group)).ravel()

    @property
    def waited(self) -> float:
        return self.ahead.waited

    def next(self, result=Future.result) -> dict | None:
        """The next batch on the mesh; None after the last. result: how to wait for a future."""
        whole = None
        for place in range(0, self.rows, self.group):
            group = self.ahead.next(result)
            if group is None or self.group == self.rows:
                return group and put(group, self.mesh)
            group = put(group, self.mesh)  # the host's copy is no longer held
            whole = _empty(self.mesh, self.global_batch, group) if place == 0 else whole
            whole = _placed(self.mesh)(whole, group, place)
        return whole

    def close(self):
        self.ahead.close()


def _empty(mesh, rows: int, like: dict) -> dict:
    shapes = {name: ((rows, *array.shape[1:]), array.dtype) for name, array in like.items()}
    make = jax.jit(lambda: {name: jnp.zeros(*shape) for name, shape in shapes.items()}, out_shardings=batch_sharding(mesh))
    return make()


@cache
def _placed(mesh):
    """A program that writes a group into every device's part of a batch, from a row of that part on."""
    rows, everywhere = PartitionSpec(AXES), PartitionSpec()

    def write(whole, group, place):
        return jax.tree.map(lambda part, new: lax.dynamic_update_slice_in_dim(part, new, place, 0), whole, group)

    mapped = jax.shard_map(write, mesh=mesh, in_specs=(rows, rows, everywhere), out_specs=rows)
    return jax.jit(mapped, out_shardings=batch_sharding(mesh), donate_argnums=0)
