"""Batches on their way to the devices: order, chunks, padding, memory."""

import numpy as np
import pytest
from helpers.runs import outcome, outcome_of_whole_run

import jaxdp
from jaxdp.data import prefetch
from jaxdp.data.loader import ArraySource
from jaxdp.data.sampler import sample_ids
from jaxdp.parallel.mesh import make_mesh


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
        expected = prefetch.train_batch(source, seed=3, first_sample=step * size, global_batch=size)
        one, other = whole.next(), chunked.next()
        for name in expected:
            np.testing.assert_array_equal(one[name], expected[name])
            np.testing.assert_array_equal(other[name], expected[name])
            assert other[name].sharding == one[name].sharding
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


def test_train_batch_returns_fresh_memory():
    source = ArraySource(np.zeros((10, 4, 4, 3)), np.arange(10))
    first, second = (prefetch.train_batch(source, seed=0, first_sample=0, global_batch=4) for _ in range(2))
    assert not np.shares_memory(first["images"], second["images"])
    assert not np.shares_memory(first["images"], source.images)


def test_train_in_chunks_is_bitwise_identical(tiny, tmp_path, monkeypatch):
    whole = outcome_of_whole_run(tiny)
    image = 3 * 16 * 16
    monkeypatch.setattr("jaxdp.data.chunks.AHEAD_BYTES", 3 * 4 * image)  # one image a device at a time
    jaxdp.train(tiny, tmp_path / "chunks")
    assert outcome(tmp_path / "chunks") == whole
