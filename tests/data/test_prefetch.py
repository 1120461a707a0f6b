"""Batches on their way to the devices: order, chunks, padding, memory."""

import itertools
import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.runs import outcome, outcome_of_whole_run

import jaxdp
from jaxdp.data import prefetch
from jaxdp.data.batch_sources import ArraySource, DecodedImages
from jaxdp.data.sampler import sample_ids
from jaxdp.parallel.mesh import make_mesh
from jaxdp.targets import UNUSABLE


@pytest.mark.parametrize("mesh_shape", [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 6])
def test_device_iterator_in_chunks_returns_the_same_batches(mesh_shape, chunk_rows):
    random = np.random.default_rng(0)
    source = ArraySource(random.integers(0, 256, (50, 4, 4, 3)), np.arange(50))
    mesh, size = make_mesh(*mesh_shape), 6 * mesh_shape[0] * mesh_shape[1]
    run = {"seed": 3, "first": 0, "end": 3 * size, "global_batch": size}
    whole = prefetch.DeviceIterator(source, mesh, **run)
    chunked = prefetch.DeviceIterator(source, mesh, **run, chunk_rows=chunk_rows)
    for step in range(3):
        rows = prefetch.BatchRows.of_batch(np.arange(size), first=step * size, global_batch=size)
        expected = prefetch.load_images(source, 3, rows)
        one, other = whole.next(), chunked.next()
        for name in expected:
            np.testing.assert_array_equal(one[name], expected[name])
            np.testing.assert_array_equal(other[name], expected[name])
            assert other[name].sharding == one[name].sharding
            assert other[name].dtype == one[name].dtype == expected[name].dtype
        parts = {shard.device: np.asarray(shard.data) for shard in one["labels"].addressable_shards}
        np.testing.assert_array_equal(np.concatenate([parts[device] for device in mesh.devices.flat]), expected["labels"])
    assert whole.next() is None
    assert chunked.next() is None


@pytest.mark.parametrize(("mesh_shape", "chunk_rows"), [((1, 1), 4), ((2, 2), None), ((2, 2), 1)])
def test_repeated_images_are_on_different_workers_with_positions_of_their_own(mesh_shape, chunk_rows):
    """Three times twelve images in a batch of 36; a batch starts where the one before ended, also after a resume."""
    random = np.random.default_rng(0)
    source = ArraySource(random.integers(0, 256, (10, 4, 4, 3)), np.arange(10))
    mesh, size = make_mesh(*mesh_shape), 36
    run = {"seed": 3, "end": 4 * size, "global_batch": size, "repeats": 3}
    whole = prefetch.DeviceIterator(source, mesh, first=0, **run, chunk_rows=chunk_rows)
    resident = prefetch.DeviceIterator(source, mesh, first=0, **run, resident=True)
    batches, indices = [[feed.next() for _ in range(4)] for feed in (whole, resident)]
    labels = np.stack([batch["labels"] for batch in batches]).reshape(4, 3, 12)
    np.testing.assert_array_equal(labels[:, 0], labels[:, 1])
    np.testing.assert_array_equal(labels[:, 0], labels[:, 2])
    order = sample_ids(3, np.arange(48), 10)
    np.testing.assert_array_equal(labels[:, 0].ravel(), order)
    positions = np.concatenate([batch["positions"] for batch in batches])
    np.testing.assert_array_equal(positions, np.arange(4 * size))
    for batch, rows in zip(batches, indices, strict=True):
        np.testing.assert_array_equal(batch["images"], source.images[rows["indices"]])
        np.testing.assert_array_equal(batch["positions"], rows["positions"])
        assert (batch["positions"].dtype, rows["indices"].dtype, rows["positions"].dtype) == (np.uint32, np.int32, np.uint32)
    resumed = prefetch.DeviceIterator(source, mesh, first=2 * size, **run).next()
    np.testing.assert_array_equal(resumed["images"], batches[2]["images"])


def test_evaluation_batches_contain_every_example_once():
    source = ArraySource(np.arange(23)[:, None, None, None].repeat(3, -1), np.arange(23))
    for batch, rows in ((4, 4), (5, 8), (23, 24), (40, 40), (1, 8)):
        seen = []
        for first in range(0, 23, batch):
            part = prefetch.evaluation_batch(source, first, batch_size=batch, rows=np.arange(rows))
            assert len(part["labels"]) == rows
            seen += part["labels"][part["weights"] == 1].tolist()
        assert seen == list(range(23))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_evaluates_its_rows_and_padding_and_ignored_examples_have_no_weight(ranks):
    labels = np.where(np.arange(11) == 4, UNUSABLE, np.arange(11))
    source, parts = ArraySource(np.arange(11)[:, None, None, None].repeat(3, -1), labels), []
    for rows in np.split(np.arange(6), ranks):  # of batches of 5, padded to 6
        feed = prefetch.evaluation_prefetcher(source, batch_size=5, rows=rows)
        parts.append(list(iter(feed.next, None)))
        feed.close()
    batches = list(zip(*parts, strict=True))
    found = {name: np.concatenate([part[name] for batch in batches for part in batch]) for name in parts[0][0]}
    expected = [0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 0, 10, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(found["positions"], expected)
    assert [found[name].dtype for name in ("positions", "seen", "weights")] == [np.uint32, np.int32, np.int32]
    np.testing.assert_array_equal(found["images"][:, 0, 0, 2], expected)
    np.testing.assert_array_equal(found["labels"], np.maximum(labels[expected], 0))
    seen = np.array([1, 1, 1, 1, 1, 0] * 2 + [1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(found["seen"], seen)
    np.testing.assert_array_equal(found["weights"], seen * (np.array(expected) != 4))


def test_rows_of_a_process_are_those_of_its_devices_in_the_order_of_the_mesh(monkeypatch):
    owners = np.array([[0, 1, 1], [0, 0, 1]])
    devices = np.array([[SimpleNamespace(process_index=owner) for owner in row] for row in owners])
    for rank in range(2):
        monkeypatch.setattr(prefetch.jax, "process_index", lambda rank=rank: rank)
        rows = prefetch.local_rows(SimpleNamespace(devices=devices, size=6), 12)
        np.testing.assert_array_equal(rows, np.flatnonzero(np.repeat(owners.ravel(), 2) == rank))


def test_prefetcher_takes_as_many_items_ahead_as_it_has_threads_and_counts_its_waits(monkeypatch):
    monkeypatch.setattr(prefetch, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    taken, closed = [], []
    items = (taken.append(n) or n for n in range(6))
    feed = prefetch.Prefetcher(lambda n: n**2, items, threads=2, on_close=lambda: closed.append(True))
    for number in range(6):
        assert taken == list(range(min(number + 2, 6)))
        assert feed.next() == number**2
    assert (feed.next(), feed.wait_seconds, closed) == (None, 6, [])
    feed.close()
    assert closed == [True]


def test_closing_a_prefetcher_waits_for_nothing_and_ends_it():
    released, finished = threading.Event(), []
    feed = prefetch.Prefetcher(lambda n: released.wait(60) and finished.append(n), range(6), threads=2)
    feed.close()
    assert not finished
    released.set()
    with pytest.raises((RuntimeError, CancelledError)):  # of the pool, or of what no thread had begun
        [feed.next() for _ in range(2)]


def test_a_source_at_a_network_is_told_each_image_of_a_batch_once_in_order_and_is_stopped():
    class Far(list):
        def read_ahead(self, order):
            self.passed = [batch.tolist() for batch in order]

        def stop_reading(self):
            self.stopped = True

    items = Far((np.full((2, 2, 3), n, np.uint8), n) for n in range(10))
    source = DecodedImages(items, transform=lambda pixels, out, _: np.copyto(out, pixels), size=2, target=10)
    feed = prefetch.DeviceIterator(source, make_mesh(2, 2), seed=3, first=12, end=36, global_batch=12, repeats=3)
    orders = [sample_ids(3, np.arange(first, first + 4), 10).tolist() for first in (4, 8)]
    assert items.passed == [list(dict.fromkeys(order)) for order in orders] != orders
    assert not hasattr(items, "stopped")
    feed.close()
    assert items.stopped
    del items.stopped
    feed = prefetch.evaluation_prefetcher(source, batch_size=4, rows=np.arange(2, 5))  # of 0 to 4, the last one padding
    assert items.passed == [[2, 3, 0], [6, 7, 0], [0]]
    feed.close()
    assert items.stopped


def test_images_are_loaded_into_fresh_memory():
    source = ArraySource(np.zeros((10, 4, 4, 3)), np.arange(10))
    rows = prefetch.BatchRows.of_batch(np.arange(4), first=0, global_batch=4)
    first, second = (prefetch.load_images(source, 0, rows) for _ in range(2))
    assert not np.shares_memory(first["images"], second["images"])
    assert not np.shares_memory(first["images"], source.images)


def test_train_in_chunks_is_bitwise_identical(tiny, tmp_path, monkeypatch):
    whole = outcome_of_whole_run(tiny)
    image = 3 * 16 * 16
    monkeypatch.setattr("jaxdp.data.prefetch.AHEAD_BYTES", 3 * 4 * image)  # one image a device at a time
    jaxdp.train(tiny, tmp_path / "chunks")
    assert outcome(tmp_path / "chunks") == whole
