"""Loads host batches ahead of the step that needs them and transfers them to the mesh."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxdp.config import Data
from jaxdp.data.batch_sources import ArraySource, DecodedImages
from jaxdp.data.sampler import drawn_ids, repeated_positions, sample_ids
from jaxdp.parallel.mesh import AXES
from jaxdp.targets import as_tree, counts, without_ignored

AHEAD_BYTES = 2**31  # host memory of prefetched images: 14,000 of 224x224, and little of a server's
PREFETCH_DEPTH = 2  # chunks held on the host in addition to the one being transferred
Batch = dict[str, np.ndarray]
Item = TypeVar("Item")
Result = TypeVar("Result")


def rows_per_chunk(rows: int, *, devices: int, image_bytes: int) -> int:
    """Images per device and chunk: the largest divisor of `rows` that lets all chunks on the host fit in AHEAD_BYTES, or 1.

    rows: images of a batch on each device; devices: of this host; image_bytes: size of one image.
    """
    bytes_per_row = (PREFETCH_DEPTH + 1) * devices * image_bytes
    return max((n for n in range(1, rows + 1) if rows % n == 0 and n * bytes_per_row <= AHEAD_BYTES), default=1)


def image_bytes(data: Data) -> int:
    """Bytes of one image as transferred to a device."""
    return 3 * (data.stored_size or data.image_size) ** 2


class BatchSource(Protocol):
    """A data set that returns batches; its results depend on the arguments alone.

    bad_images: name -> reason of the images that could not be read. cumulative: see `drawn_ids`; None: epochs are shuffled.
    """

    bad_images: dict[str, str]
    cumulative: np.ndarray | None

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(images [B, S, S, 3] uint8, labels [B] int32), freshly allocated.

        indices: [B] examples; positions: [B] samples seen before each, from which random numbers are drawn.
        """


@cache
def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Rows over all devices, vertical axis first: worker w holds rows from w * per_worker_batch on, on every mesh."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def local_device_indices(mesh: Mesh) -> np.ndarray:
    """Row-major indices of this process's devices in the mesh."""
    return np.flatnonzero([device.process_index == jax.process_index() for device in mesh.devices.flat])


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """The rows of a batch of `rows` that this process's devices hold, int64: all of them in a single process."""
    per_device = rows // mesh.size
    return (local_device_indices(mesh)[:, None] * per_device + np.arange(per_device)).ravel()


def to_global(batch: Batch, mesh: Mesh) -> dict[str, jax.Array]:
    """Global arrays over the mesh from this process's rows of a batch (see `local_rows`)."""
    sharding = batch_sharding(mesh)
    devices = len(sharding.addressable_devices)
    tree = batch | ({"labels": as_tree(batch["labels"])} if "labels" in batch else {})
    shapes = jax.tree.map(lambda rows: (len(rows) // devices * mesh.size, *rows.shape[1:]), tree)
    return jax.make_array_from_process_local_data(sharding, tree, shapes)


class BatchRows(NamedTuple):
    """Rows of batches.

    positions: int64 [B], the number of samples that the run takes before each row. order: int64 [B], the place of each row's
    image in the shuffled epochs, counted from 0.

    The two are equal without repeated augmentation.
    """

    positions: np.ndarray
    order: np.ndarray

    @classmethod
    def of_batch(cls, offsets: np.ndarray, *, first: int, global_batch: int, repeats: int = 1) -> "BatchRows":
        """Rows of the global batch that starts after `first` samples. offsets: [B], from 0."""
        return cls(first + offsets, repeated_positions(offsets, first=first, global_batch=global_batch, repeats=repeats))


def ids_of(source: BatchSource, seed: int, positions: np.ndarray) -> np.ndarray:
    """The id of the sample at each position of the order, int64 [B]: shuffled, or drawn if the source says so."""
    cumulative = getattr(source, "cumulative", None)
    return sample_ids(seed, positions, len(source)) if cumulative is None else drawn_ids(seed, positions, cumulative)


def load_images(source: BatchSource, seed: int, rows: BatchRows) -> Batch:
    """{"images", "labels", "positions"} of these rows."""
    images, labels = source.batch(ids_of(source, seed, rows.order), rows.positions)
    return {"images": images, "labels": labels, "positions": rows.positions.astype(np.uint32)}


def load_indices(source: ArraySource, seed: int, rows: BatchRows) -> Batch:
    """`load_images` for an `ArraySource` that is resident on the devices: "indices" [B] int32 replace the images."""
    indices = ids_of(source, seed, rows.order)
    positions = rows.positions.astype(np.uint32)
    return {"indices": indices.astype(np.int32), "labels": source.labels[indices], "positions": positions}


def evaluation_batch(source: BatchSource, first: int, *, batch_size: int, rows: np.ndarray) -> Batch:
    """`batch_size` examples in order from `first` on, padded.

    rows: int [R], the rows of the padded batch to return (see `local_rows`). "seen" [R] int32 is 1 for examples and 0 for
    padding; "weights" [R] int32 is also 0 for examples that the source ignores.
    """
    positions, real = _evaluated(source, first, batch_size=batch_size, rows=rows)
    images, labels = source.batch(positions, positions)
    return {
        "images": images,
        "labels": without_ignored(labels),
        "positions": positions.astype(np.uint32),
        "seen": real.astype(np.int32),
        "weights": (real & counts(labels)).astype(np.int32),
    }


def _evaluated(source: BatchSource, first: int, *, batch_size: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(positions of these rows, 0 for padding; whether each is an example)."""
    positions = first + rows
    real = positions < min(first + batch_size, len(source))
    return np.where(real, positions, 0), real


def read_ahead(source: BatchSource, order: Iterable[np.ndarray]) -> None:
    """Let a source that fetches images over a network know the coming order. order: arrays of indices, one for each batch."""
    if isinstance(source, DecodedImages):
        source.read_ahead(np.array(list(dict.fromkeys(batch.tolist()))) for batch in order)  # a batch reads an image once


def stop_reading(source: BatchSource) -> None:
    """Let threads that wait for images from a network fail, so that the process can exit."""
    if isinstance(source, DecodedImages):
        source.stop_reading()


def evaluation_prefetcher(source: BatchSource, *, batch_size: int, rows: np.ndarray) -> "Prefetcher[int, Batch]":
    """The batches of `evaluation_batch` for all of a source, in order."""
    starts = range(0, len(source), batch_size)
    read_ahead(source, (_evaluated(source, first, batch_size=batch_size, rows=rows)[0] for first in starts))
    load = partial(evaluation_batch, source, batch_size=batch_size, rows=rows)
    return Prefetcher(load, starts, threads=1, on_close=partial(stop_reading, source))


class Prefetcher(Generic[Item, Result]):
    """Calls `load` for each item in order, `threads` items ahead of the caller. on_close: called by `close`.

    wait_seconds: total time that `next` has blocked. Close it when done.
    """

    def __init__(
        self,
        load: Callable[[Item], Result],
        items: Iterable[Item],
        threads: int = PREFETCH_DEPTH,
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.load, self.items, self.wait_seconds, self.on_close = load, iter(items), 0.0, on_close
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
        self.pending = deque(self.threads.submit(load, item) for item in itertools.islice(self.items, threads))

    def next(self, wait: Callable[[Future], Result] = Future.result) -> Result | None:
        """The next result, or None after the last; raises what `load` raised. wait: blocks on a future, returns its result."""
        if not self.pending:
            return None
        began = time.perf_counter()
        loaded = wait(self.pending.popleft())
        self.wait_seconds += time.perf_counter() - began
        self.pending.extend(self.threads.submit(self.load, item) for item in itertools.islice(self.items, 1))
        return loaded

    def close(self) -> None:
        """Cancel what has not started."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.on_close()


class DeviceIterator:
    """Training batches on the mesh, from `first` to `end` samples seen, loaded ahead of the step that needs them.

    Each process loads the rows of its own devices. The host holds at most PREFETCH_DEPTH + 1 chunks of `chunk_rows` images per
    device (None: whole batches); a batch of several chunks is assembled on the devices. resident: the images are on the devices
    already, and batches hold their indices (see `load_indices`). repeats: see `repeated_positions`. Close it when done.
    """

    def __init__(
        self,
        source: BatchSource,
        mesh: Mesh,
        *,
        seed: int,
        first: int,
        end: int,
        global_batch: int,
        chunk_rows: int | None = None,
        resident: bool = False,
        repeats: int = 1,
    ) -> None:
        self.mesh, self.global_batch, self.rows, self.repeats = mesh, global_batch, global_batch // mesh.size, repeats
        self.chunk_rows = chunk_rows or self.rows
        load: Callable[..., Batch] = load_indices if resident else load_images
        if not resident:
            read_ahead(source, (ids_of(source, seed, rows.order) for rows in self._rows(first, end)))
        self.chunks = Prefetcher(partial(load, source, seed), self._rows(first, end), on_close=partial(stop_reading, source))

    def _rows(self, first: int, end: int) -> Iterator[BatchRows]:
        """The rows of every chunk."""
        offsets = local_device_indices(self.mesh) * self.rows
        for batch in range(first, end, self.global_batch):
            for row in range(0, self.rows, self.chunk_rows):
                chunk = (offsets[:, None] + row + np.arange(self.chunk_rows)).ravel()
                yield BatchRows.of_batch(chunk, first=batch, global_batch=self.global_batch, repeats=self.repeats)

    @property
    def wait_seconds(self) -> float:
        """Total time that `next` has blocked on images."""
        return self.chunks.wait_seconds

    def next(self, wait: Callable[[Future], Batch] = Future.result) -> dict[str, jax.Array] | None:
        """The next batch on the mesh, or None after the last. wait: blocks on a future and returns its result."""
        batch = None
        for row in range(0, self.rows, self.chunk_rows):
            host = self.chunks.next(wait)
            if host is None:
                return None
            chunk = to_global(host, self.mesh)
            if self.chunk_rows == self.rows:
                return chunk
            del host  # not held while the next chunk is loaded
            batch = _empty_batch(self.mesh, self.global_batch, chunk) if row == 0 else batch
            batch = _write_chunk(self.mesh)(batch, chunk, row)
        return batch

    def close(self) -> None:
        """Stop loading."""
        self.chunks.close()


def _empty_batch(mesh: Mesh, rows: int, like: dict[str, jax.Array]) -> dict[str, jax.Array]:
    shapes = jax.eval_shape(lambda: like)
    empty = partial(jax.tree.map, lambda array: jnp.zeros((rows, *array.shape[1:]), array.dtype))
    return jax.jit(lambda: empty(shapes), out_shardings=batch_sharding(mesh))()


@cache
def _write_chunk(mesh: Mesh) -> Callable:
    """A program that writes a chunk into every device's part of a batch, from a given row on."""
    rows, replicated = PartitionSpec(AXES), PartitionSpec()

    def write(batch: dict, chunk: dict, row: jax.Array) -> dict:
        return jax.tree.map(lambda part, new: lax.dynamic_update_slice_in_dim(part, new, row, 0), batch, chunk)

    mapped = jax.shard_map(write, mesh=mesh, in_specs=(rows, rows, replicated), out_specs=rows)
    return jax.jit(mapped, out_shardings=batch_sharding(mesh), donate_argnums=0)
