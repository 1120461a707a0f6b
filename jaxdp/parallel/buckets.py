"""Tensor fusion, as in Horovod and PyTorch's DDP: which tensors travel together in one message."""


def pack(tensors: list[tuple[int, object]], bucket_bytes: int | None) -> list[list[int]]:
    """Places of tensors that travel in one message: neighbours of one kind, at most `bucket_bytes` together.

    tensors: (bytes, kind). A tensor of `bucket_bytes` or more travels alone, uncopied. None: one message for each kind.
    """
    packed, open_buckets = [], {}
    for place, (size, kind) in enumerate(tensors):
        if bucket_bytes is not None and size >= bucket_bytes:
            packed.append([place])
            continue
        bucket, filled = open_buckets.get(kind, (None, 0))
        if bucket is None or (bucket_bytes is not None and filled + size > bucket_bytes):
            bucket, filled = [], 0
            packed.append(bucket)
        bucket.append(place)
        open_buckets[kind] = (bucket, filled + size)
    return packed
