"""Buckets and shards by their definitions."""

from itertools import count
from math import prod

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.parallel.buckets import WIRE_BYTES, assign_buckets, shard_size


def test_wire_bytes_are_those_of_the_dtypes():
    assert {name: jnp.dtype(name).itemsize for name in WIRE_BYTES} == WIRE_BYTES


@pytest.mark.parametrize("bucket_bytes", [None, 1, 5, 8, 20])
def test_buckets_of_each_kind_are_filled_one_after_another(bucket_bytes):
    limit = bucket_bytes or 10**9
    random = np.random.default_rng(0)
    for _ in range(50):
        tensors = [
            (int(size), "ab"[kind]) for size, kind in zip(random.integers(0, 11, 12), random.integers(0, 2, 12), strict=True)
        ]
        expected = [[index] for index, (size, _) in enumerate(tensors) if size >= limit]
        for kind in "ab":
            small = [index for index, (size, other) in enumerate(tensors) if other == kind and size < limit]
            while small:
                fits = max(n for n in range(1, len(small) + 1) if sum(tensors[index][0] for index in small[:n]) <= limit)
                expected.append(small[:fits])
                del small[:fits]
        assert assign_buckets(tensors, bucket_bytes) == sorted(expected)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (8,), (3, 4), (7, 0)])
def test_shard_is_the_smallest_of_equal_parts_that_hold_the_tensor(shape):
    for parts in range(1, 10):
        assert shard_size(shape, parts) == next(size for size in count() if parts * size >= prod(shape))
