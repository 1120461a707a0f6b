"""Batches on their way to the devices: order, chunks, padding, memory."""

import dataclasses

import numpy as np
import pytest

import jaxdp
from jaxdp.checkpoint.listing import latest_valid
from jaxdp.data import prefetch
from jaxdp.data.in_memory import ArraySource
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


def test_train_in_chunks_is_bitwise_identical(tiny, tmp_path):
    one = jaxdp.train(tiny, tmp_path / "whole")
    image = 3 * 16 * 16
    data = dataclasses.replace(tiny.data, ahead_bytes=3 * 4 * image)  # one image a device at a time
    other = jaxdp.train(dataclasses.replace(tiny, data=data), tmp_path / "chunks")
    assert one.accuracy == other.accuracy
    arrays = [latest_valid(tmp_path / name / "checkpoints").arrays for name in ("whole", "chunks")]
    assert arrays[0] == arrays[1]
