"""Tensor fusion, as in Horovod and PyTorch's DDP: which tensors share a bucket. This module does not import JAX.

A bucket is a vector of tensors that are reduced together, by one call of each stage of the strategy.
"""

import math
from collections.abc import Hashable, Sequence

WIRE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element by `reduce.wire_dtype`


def assign_buckets(tensors: Sequence[tuple[int, Hashable]], bucket_bytes: int | None) -> list[list[int]]:
    """Indices of the tensors in each bucket: consecutive tensors of one kind, at most `bucket_bytes` in total.

    tensors: (bytes, kind) of each. A tensor of `bucket_bytes` or more has a bucket to itself and is not copied. bucket_bytes:
    None puts all tensors of a kind into one bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index, (size, kind) in enumerate(tensors):
        if bucket_bytes is not None and size >= bucket_bytes:
            buckets.append([index])
            continue
        bucket, filled = open_buckets.get(kind, (None, 0))
        if bucket is None or (bucket_bytes is not None and filled + size > bucket_bytes):
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[kind] = (bucket, filled + size)
    return buckets


def shard_size(shape: Sequence[int], parts: int) -> int:
    """Elements of each of `parts` equal parts of a tensor; the last parts are padded."""
    return -(-math.prod(shape) // parts)
