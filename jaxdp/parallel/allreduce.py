"""Gradient aggregation over the two-dimensional mesh: how the gradients of all devices become one mean.

A strategy is one or more stages, which together turn a flat vector into its sum over all devices, called inside `shard_map`.
`mean` applies one to a tree, tensors being packed into buckets of which each is one message; `overlap.Overlap` to the parts of
a gradient while the backward pass goes on.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.parallel.buckets import pack
from jaxdp.parallel.mesh import AXES, HORIZONTAL, VERTICAL, unfit
from jaxdp.registry import own_strategies

SERVER = 0
WIRE_DTYPES = ("float32", "bfloat16", "float16")
BUCKET_BYTES = 65_536


def psum(vector):
    """One all-reduce over all devices, the algorithm left to XLA."""
    return lax.psum(vector, AXES)


def ring(vector):
    """Ring all-reduce (Patarasuk & Yuan, 2009), written out as exchanges with the next device.

    The vector is padded and cut into one part a device. In N - 1 steps the partial sums travel on, each device adding its own
    part; in N - 1 more the sums travel round. The order of additions is fixed by the place in the ring alone, so results are
    bitwise the same however devices are spread over processes. The ring runs along the rows of the mesh.
    """
    devices, here = lax.axis_size(AXES), lax.axis_index(AXES)
    if devices == 1:
        return vector
    parts = jnp.pad(vector, (0, -vector.size % devices)).reshape(devices, -1)
    onward = [(device, (device + 1) % devices) for device in range(devices)]
    steps = jnp.arange(1, devices)

    def add(total, step):
        own = lax.dynamic_index_in_dim(parts, (here - step) % devices, keepdims=False)
        return lax.ppermute(total, AXES, onward) + own, None

    def pass_on(carry, step):
        part, gathered = carry
        part = lax.ppermute(part, AXES, onward)
        return (part, lax.dynamic_update_index_in_dim(gathered, part, (here + 1 - step) % devices, 0)), None

    total, _ = lax.scan(add, lax.dynamic_index_in_dim(parts, here, keepdims=False), steps)
    gathered = lax.dynamic_update_index_in_dim(parts, total, (here + 1) % devices, 0)
    (_, gathered), _ = lax.scan(pass_on, (total, gathered), steps)
    return gathered.ravel()[: vector.size]


def along_rows(vector):
    """An all-reduce along the horizontal rings."""
    return lax.psum(vector, HORIZONTAL)


def along_columns(vector):
    """An all-reduce along the vertical rings. The barrier keeps XLA from folding it into one along the rows before it."""
    return lax.psum(lax.optimization_barrier(vector), VERTICAL)


def scatter_along_rows(vector):
    """A reduce-scatter along the horizontal rings, the vector being padded to a multiple of their size."""
    padded = jnp.pad(vector, (0, -vector.size % lax.axis_size(HORIZONTAL)))
    return lax.psum_scatter(padded, HORIZONTAL, scatter_dimension=0, tiled=True)


def gather_along_rows(part):
    """The parts of all devices of a horizontal ring."""
    return lax.all_gather(part, HORIZONTAL, tiled=True, to="invarying")


def parameter_server(vector):
    """Every device sends its vector to device 0, one after the other, and gets the sum back in the same way.

    The baseline whose time grows with the number of devices (Li et al., OSDI 2014, with one server); at most 64 of them.
    """
    devices, here = lax.axis_size(AXES), lax.axis_index(AXES)
    total = vector
    for worker in range(1, devices):
        total = total + lax.ppermute(vector, AXES, [(worker, SERVER)])
    for worker in range(1, devices):
        total = jnp.where(here == worker, lax.ppermute(total, AXES, [(SERVER, worker)]), total)
    return total


# By name: the stages of a strategy, one after the other; what the last returns may be longer by the padding.
#
# hierarchical: Jia et al., arXiv 1807.11205. There one master a row takes part in the second stage; in an SPMD program every
# device does, so that all columns carry the whole vector at once and nothing has to be broadcast along the rows.
# torus: the 2D-torus all-reduce of Mikami et al., arXiv 1811.05233, section 2.2.
STRATEGIES = {
    "psum": (psum,),
    "ring": (ring,),
    "hierarchical": (along_rows, along_columns),
    "torus": (scatter_along_rows, along_columns, gather_along_rows),
    "parameter_server": (parameter_server,),
}


def local(vector):
    """Every device keeps its own: what a step would be if communication were free, for measuring what it costs."""
    return vector


def proves_replication(strategy) -> bool:
    """Whether `shard_map` can check that all devices end with the same values (its check_vma).

    It cannot where they exchange point to point, nor for what is not known here.
    """
    return strategy in ("psum", "hierarchical", "torus")


def buckets(leaves, bucket_bytes: int | None, wire_dtype=None) -> list[list[int]]:
    """Places of `leaves` that travel in one message, by their bytes on the wire and their dtype: see `pack`."""
    return pack([(leaf.size * jnp.dtype(wire_dtype or leaf.dtype).itemsize, leaf.dtype) for leaf in leaves], bucket_bytes)


def mean(tree, strategy, wire_dtype=None, bucket_bytes: int | None = BUCKET_BYTES):
    """The mean of `tree` over both mesh axes, the same on every device: see `total`."""
    _check(tree, strategy, wire_dtype, bucket_bytes)
    return total(divided(tree, lax.axis_size(AXES)), strategy, wire_dtype, bucket_bytes)


def divided(tree, by: int):
    return tree if by == 1 else jax.tree.map(lambda leaf: leaf / by, tree)


def total(tree, strategy, wire_dtype=None, bucket_bytes: int | None = BUCKET_BYTES):
    """The sum of `tree` over both mesh axes, the same on every device. Call inside `shard_map` over both axes.

    tree: floating-point arrays that differ between devices (in JAX's words: varying), of any sizes. strategy: a key of
    `STRATEGIES`, a name given to `jaxdp.register_strategy`, or a function like a stage of either; give `shard_map`
    check_vma=proves_replication(strategy). wire_dtype: the dtype in which they travel and are added, of `WIRE_DTYPES`; None
    keeps each leaf's. bucket_bytes: see `buckets.pack`. Returned leaves have the dtype they came with.
    Raises ValueError for an unknown strategy or dtype, a strategy that cannot run on so many devices, leaves of integers.
    """
    messages = packed(tree, strategy, wire_dtype, bucket_bytes)
    for message in messages:
        message.arrive()
    return unpacked(tree, messages)


class Message:
    """Tensors that travel together, and what is still to be done with them.

    vector: where they are now. stages: of the strategy, those not yet begun. places: of the tensors among a tree's leaves.
    """

    def __init__(self, leaves, places: list[int], stages, wire_dtype):
        self.places, self.tensors = places, [jax.typeof(leaves[place]) for place in places]
        flat = [leaves[place].ravel().astype(wire_dtype or leaves[place].dtype) for place in places]
        self.vector = flat[0] if len(flat) == 1 else jnp.concatenate(flat)
        self.stages = list(stages)
        if self.vector.size == 0:
            self.vector, self.stages = jnp.zeros(0, self.vector.dtype), []

    def advance(self) -> None:
        """The next stage."""
        with jax.named_scope("all-reduce"):
            self.vector = self.stages.pop(0)(self.vector)

    def arrive(self) -> None:
        """All that is left."""
        while self.stages:
            self.advance()

    def leaves(self):
        """(place, tensor) of each of them, as they came, but for their values."""
        start = 0
        for place, tensor in zip(self.places, self.tensors, strict=True):
            yield place, self.vector[start : start + tensor.size].astype(tensor.dtype).reshape(tensor.shape)
            start += tensor.size


def packed(tree, strategy, wire_dtype=None, bucket_bytes: int | None = BUCKET_BYTES) -> list[Message]:
    """The messages of which a tree consists; the arguments and errors are those of `total`."""
    _check(tree, strategy, wire_dtype, bucket_bytes)
    leaves = jax.tree.leaves(tree)
    stages = (strategy,) if callable(strategy) else known()[strategy]
    return [Message(leaves, places, stages, wire_dtype) for places in buckets(leaves, bucket_bytes, wire_dtype)]


def unpacked(tree, messages: list[Message]):
    """`tree` with the values of its messages."""
    found = dict(pair for message in messages for pair in message.leaves())
    return jax.tree.unflatten(jax.tree.structure(tree), [found[place] for place in range(len(found))])


def known() -> dict:
    """Every strategy by its name, with the stages that were registered."""
    return STRATEGIES | own_strategies


def _check(tree, strategy, wire_dtype, bucket_bytes) -> None:
    """Raise ValueError, naming the argument, for what cannot be reduced so."""
    if not callable(strategy) and strategy not in known():
        raise ValueError(f"strategy: {strategy!r} is not allowed; give one of {', '.join(known())}")
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: {bucket_bytes} is not allowed; give 1 or more, or None for one message")
    if wire_dtype is not None and jnp.dtype(wire_dtype).name not in WIRE_DTYPES:
        raise ValueError(f"wire_dtype: {jnp.dtype(wire_dtype).name!r} is not allowed; give {', '.join(WIRE_DTYPES)}")
    for leaf in jax.tree.leaves(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"tree: a leaf of {leaf.dtype} is not allowed; a mean is of floating-point numbers")
    devices = lax.axis_size(AXES)
    if reason := unfit(strategy, devices):
        raise ValueError(f"strategy: {strategy!r} is not allowed on {devices} devices; {reason}")
