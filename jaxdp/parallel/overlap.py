"""All-reduce of gradients that overlaps with the backward pass.

XLA can hide a collective only behind operations that its schedule places between the collective's start and end. By default it
computes the gradients of all weights last, and all collectives follow them. Here the backward pass runs segment by segment; the
segments of a ResNet are its stem, its blocks and its head. An optimization barrier holds the next segment until this segment's
gradients and the stages started one segment earlier are done. So every stage of every bucket can overlap with the backward pass
of one whole segment.
"""

from typing import Any

from jax import lax

from jaxdp.parallel.allreduce import Bucket, divide, pack_buckets, unpack_buckets
from jaxdp.strategies import Stage


class Overlap:
    """The gradients of a network's segments while they are reduced. See `allreduce.all_reduce_sum` for the arguments.

    divisor: gradients are divided by it before they are sent. sent: (gradient, its buckets) of each segment, in backward
    order. in_flight: buckets with a stage that has started and is not yet awaited.
    """

    def __init__(
        self, strategy: str | Stage, *, wire_dtype: Any, bucket_bytes: int | None, divisor: int = 1, sharded: bool = False
    ) -> None:
        self.strategy, self.wire_dtype, self.bucket_bytes, self.divisor = strategy, wire_dtype, bucket_bytes, divisor
        self.sharded = sharded
        self.sent: list[tuple[dict, list[Bucket]]] = []
        self.in_flight: list[Bucket] = []

    def enqueue(self, cotangent: Any, gradient: dict) -> Any:
        """Start the reduction of a segment's gradient. Returns the cotangent with which the backward pass continues."""
        vectors = [bucket.vector for bucket in self.in_flight]
        cotangent, gradient, _ = lax.optimization_barrier((cotangent, gradient, vectors))
        buckets = pack_buckets(
            divide(gradient, self.divisor),
            self.strategy,
            wire_dtype=self.wire_dtype,
            bucket_bytes=self.bucket_bytes,
            sharded=self.sharded,
        )
        self.sent.append((gradient, buckets))
        self.in_flight = [bucket for bucket in self.in_flight + buckets if bucket.stages]
        for bucket in self.in_flight:
            bucket.run_next_stage()
        return cotangent

    def wait_all(self) -> dict:
        """The sums over all devices of all enqueued gradients, in one tree; this device's shards of them if `sharded`."""
        for bucket in self.in_flight:
            bucket.finish()
        return {name: value for tree, buckets in self.sent for name, value in unpack_buckets(tree, buckets).items()}
