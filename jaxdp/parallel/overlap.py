"""All-reduce of gradients that overlaps with the backward pass.

XLA can hide a collective only behind what its schedule places between the collective's start and end. By default it computes
the gradients of all weights last, and all messages follow them. Here the backward pass runs part by part: an optimization
barrier holds the next part until this part's gradients and the stages started one part earlier are done. So every stage of
every message can overlap with the backward pass of one whole part.
"""

from typing import Any

from jax import lax

from jaxdp.parallel.allreduce import Message, divide, pack_messages, unpack_messages
from jaxdp.strategies import Stage


class Overlap:
    """The gradients of the parts of a network while they are reduced. See `allreduce.all_reduce_sum` for the arguments.

    divisor: gradients are divided by it before they are sent. sent: (gradient, its messages) of each part, in the order of the
    backward pass. in_flight: messages with a stage that has started and is not yet awaited.
    """

    def __init__(self, strategy: str | Stage, *, wire_dtype: Any, bucket_bytes: int | None, divisor: int = 1) -> None:
        self.strategy, self.wire_dtype, self.bucket_bytes, self.divisor = strategy, wire_dtype, bucket_bytes, divisor
        self.sent: list[tuple[dict, list[Message]]] = []
        self.in_flight: list[Message] = []

    def enqueue(self, cotangent: Any, gradient: dict) -> Any:
        """Start the reduction of a part's gradient. Returns the cotangent with which the backward pass continues."""
        vectors = [message.vector for message in self.in_flight]
        cotangent, gradient, _ = lax.optimization_barrier((cotangent, gradient, vectors))
        messages = pack_messages(
            divide(gradient, self.divisor), self.strategy, wire_dtype=self.wire_dtype, bucket_bytes=self.bucket_bytes
        )
        self.sent.append((gradient, messages))
        self.in_flight = [message for message in self.in_flight + messages if message.stages]
        for message in self.in_flight:
            message.run_next_stage()
        return cotangent

    def wait_all(self) -> dict:
        """The sums over all devices of all enqueued gradients, in one tree."""
        for message in self.in_flight:
            message.finish()
        return {name: value for tree, messages in self.sent for name, value in unpack_messages(tree, messages).items()}
