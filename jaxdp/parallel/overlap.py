"""Gradients combined while the backward pass goes on: those of one part of a network travel while those of others are computed.

XLA hides a collective only behind what its schedule puts between the start and the end of it. Left to itself it computes the
gradients of all weights last, and everything travels after them. Here the backward pass goes part by part, as a ship through
locks: `Overlap.passed` opens the next part only when the weights' gradients of the last one are computed, and when what was
sent at the lock before has arrived. So every stage of every message has the backward pass of one whole part to hide behind.
"""

from jax import lax

from jaxdp.parallel.allreduce import divided, packed, unpacked


class Overlap:
    """The gradients of a network's parts on their way: see `allreduce.total` for the arguments.

    divisor: by which they are divided before they set off.
    """

    def __init__(self, strategy, wire_dtype, bucket_bytes: int | None, divisor: int = 1):
        self.how, self.divisor = (strategy, wire_dtype, bucket_bytes), divisor
        self.sent = []  # of each part, in the order of the backward pass: (its gradient, the messages with it)
        self.under_way = []  # messages with a stage begun at the last lock

    def passed(self, cotangent, gradient):
        """The backward pass of a part is done: its gradient sets off. Returns the cotangent with which it goes on."""
        cotangent, gradient, _ = lax.optimization_barrier((cotangent, gradient, [one.vector for one in self.under_way]))
        messages = packed(divided(gradient, self.divisor), *self.how)
        self.sent.append((gradient, messages))
        self.under_way = [one for one in self.under_way + messages if one.stages]
        for one in self.under_way:
            one.advance()
        return cotangent

    def arrived(self) -> dict:
        """The sums over all devices of all that was sent, in one tree."""
        for one in self.under_way:
            one.arrive()
        return {name: value for tree, messages in self.sent for name, value in unpacked(tree, messages).items()}
