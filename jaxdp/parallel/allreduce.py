"""All-reduce of gradients over the two-dimensional mesh: the stages of the strategies, and buckets of packed tensors.

A stage is a function of a flat vector, called inside `shard_map`. The stages of a strategy (`jaxdp/strategies.py`) together
return the sum of the vectors of all devices. `all_reduce_sum` applies a strategy to a tree: it packs tensors into buckets and
applies the stages to each bucket. `Overlap` does so for each segment of a network during the backward pass.
A shard is the piece of a vector that one device sums or owns.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.config import Reduce
from jaxdp.errors import ConfigError, one_of, plural
from jaxdp.parallel.buckets import WIRE_BYTES, assign_buckets
from jaxdp.parallel.mesh import AXES, HORIZONTAL, VERTICAL
from jaxdp.parallel.reduce_scatter import on_tpu, reduce_scatter, tiled_all_gather
from jaxdp.parallel.shards import from_parts, own_shard, shard_shape, to_parts
from jaxdp.strategies import STRATEGIES, Stage, unsupported_reason

SERVER = 0
BUCKET_BYTES = 65_536


def psum(vector: jax.Array) -> jax.Array:
    """One all-reduce over all devices; XLA chooses the algorithm."""
    return lax.psum(vector, AXES)


def ring(vector: jax.Array) -> jax.Array:
    """Ring all-reduce (Patarasuk & Yuan, 2009) by exchanges with the next device.

    The vector is padded and split into N shards. In N - 1 steps each device adds its values to the partial sum that it receives
    and sends the result to the next device. In N - 1 more steps the sums travel around the ring. The position in the ring alone
    determines the order of additions, so results are bitwise equal for any assignment of devices to processes. The ring follows
    the mesh rows.
    """
    devices, device = lax.axis_size(AXES), lax.axis_index(AXES)
    if devices == 1:
        return vector
    shards = jnp.pad(vector, (0, -vector.size % devices)).reshape(devices, -1)
    to_next = [(source, (source + 1) % devices) for source in range(devices)]
    steps = jnp.arange(1, devices, dtype=jnp.int32)

    def reduce_step(partial_sum: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
        shard = lax.dynamic_index_in_dim(shards, (device - step) % devices, keepdims=False)
        return lax.ppermute(partial_sum, AXES, to_next) + shard, None

    def gather_step(carry: tuple[jax.Array, jax.Array], step: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        shard, gathered = carry
        shard = lax.ppermute(shard, AXES, to_next)
        return (shard, lax.dynamic_update_index_in_dim(gathered, shard, (device + 1 - step) % devices, 0)), None

    shard, _ = lax.scan(reduce_step, lax.dynamic_index_in_dim(shards, device, keepdims=False), steps)
    gathered = lax.dynamic_update_index_in_dim(shards, shard, (device + 1) % devices, 0)
    (_, gathered), _ = lax.scan(gather_step, (shard, gathered), steps)
    return gathered.ravel()[: vector.size]


def all_reduce_rows(vector: jax.Array) -> jax.Array:
    """An all-reduce along each row of the mesh."""
    return lax.psum(vector, HORIZONTAL)


def all_reduce_columns(vector: jax.Array) -> jax.Array:
    """An all-reduce along each column. The barrier prevents XLA from merging it with a preceding all-reduce along the rows."""
    return lax.psum(lax.optimization_barrier(vector), VERTICAL)


def reduce_scatter_rows(vector: jax.Array) -> jax.Array:
    """A reduce-scatter along each row: this device's shard of the sum. Pads the vector to a multiple of the row's devices."""
    return reduce_scatter(jnp.pad(vector, (0, -vector.size % lax.axis_size(HORIZONTAL))))


def all_gather_rows(shard: jax.Array) -> jax.Array:
    """An all-gather along each row: the concatenated shards of its devices."""
    tracked = _axes_of(lax.axis_index(HORIZONTAL))  # untracked, a derivative has to sum over the copies
    to = "invarying" if tracked else "varying"
    return tiled_all_gather(shard, to=to) if on_tpu() else lax.all_gather(shard, HORIZONTAL, tiled=True, to=to)


def parameter_server(vector: jax.Array) -> jax.Array:
    """The devices send their vectors to device 0 one after another, then receive the sum one after another.

    A baseline: its time grows with the number of devices (Li et al., OSDI 2014, with one server).
    """
    devices, device = lax.axis_size(AXES), lax.axis_index(AXES)
    vector_sum = vector
    for sender in range(1, devices):
        vector_sum = vector_sum + lax.ppermute(vector, AXES, [(sender, SERVER)])
    for receiver in range(1, devices):
        vector_sum = jnp.where(device == receiver, lax.ppermute(vector_sum, AXES, [(SERVER, receiver)]), vector_sum)
    return vector_sum


def no_reduce(vector: jax.Array) -> jax.Array:
    """Each device keeps its vector: a step without communication, for measuring the cost of communication."""
    return vector


def stages_of(strategy: str | Stage) -> tuple[Stage, ...]:
    """The stages of a strategy; of `torus`, the default, `reduce_scatter_rows`, `all_reduce_columns` and `all_gather_rows`.

    A function is its own single stage.
    """
    if callable(strategy):
        return (strategy,)
    return STRATEGIES.implementation(strategy)


def check_vma(strategy: str | Stage) -> bool:
    """The `check_vma` of a `jax.shard_map` around the strategy: whether JAX can verify that all devices get the same values."""
    return isinstance(strategy, str) and strategy in STRATEGIES and STRATEGIES[strategy].check_vma


def wire_dtype_of(config: Reduce) -> jnp.dtype | None:
    """The dtype of gradients while they are sent and added; None keeps the dtype of each leaf, which is float32."""
    return None if config.wire_dtype == "float32" else jnp.dtype(config.wire_dtype)


def leaf_buckets(leaves: Sequence[Any], bucket_bytes: int | None, wire_dtype: Any = None) -> list[list[int]]:
    """Indices of the leaves in each bucket, by their bytes on the wire and their dtype: see `buckets.assign_buckets`."""
    sizes = [(leaf.size * jnp.dtype(wire_dtype or leaf.dtype).itemsize, leaf.dtype) for leaf in leaves]
    return assign_buckets(sizes, bucket_bytes)


def varying(tree: Any) -> Any:
    """The same values, marked as possibly different between devices: JAX then adds no reduction when it differentiates."""
    axes = _axes_of(lax.axis_index(AXES))

    def mark(leaf: jax.Array) -> jax.Array:
        missing = axes - _axes_of(leaf)
        return lax.pcast(leaf, tuple(missing), to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def _axes_of(value: jax.Array) -> frozenset[str]:
    """The axes along which devices may have different values, as JAX tracks them; none inside `shard_map(check_vma=False)`."""
    return jax.typeof(value).manual_axis_type.varying


def all_reduce_mean(
    tree: Any,
    strategy: str | Stage = "torus",
    *,
    wire_dtype: Any = None,
    bucket_bytes: int | None = BUCKET_BYTES,
) -> Any:
    """The mean of `tree` over all devices, equal on every device; arguments and errors as in `all_reduce_sum`."""
    _check(tree, strategy, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes)
    local = divide(tree, lax.axis_size(AXES))
    return all_reduce_sum(local, strategy, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes)


def divide(tree: Any, divisor: int) -> Any:
    """Every leaf divided by `divisor`."""
    return tree if divisor == 1 else jax.tree.map(lambda leaf: leaf / divisor, tree)


def all_reduce_sum(
    tree: Any,
    strategy: str | Stage = "torus",
    *,
    wire_dtype: Any = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    sharded: bool = False,
) -> Any:
    """The sum of `tree` over all devices, equal on every device. Call inside `jax.shard_map` over a mesh of `make_mesh`.

    tree: floating-point arrays of any shapes, this device's.
    strategy: the name of an all-reduce strategy, or a function that is its single stage. Give `shard_map`
        check_vma=False: JAX verifies only some strategies, and otherwise sums gradients of unmarked parameters itself.
    wire_dtype: the dtype of vectors while they are sent and added, one of `WIRE_BYTES`; None keeps the dtype of each leaf.
    bucket_bytes: see `buckets.assign_buckets`.
    sharded: omit the last stage, which gathers shards; each device gets its shard of every sum (see `jaxdp.parallel.shards`).

    Returns leaves with their original dtypes. Every strategy has the derivative of `jax.lax.psum`, forward and reverse.
    Raises ConfigError for an unknown strategy or dtype, a strategy that does not support this number of devices, and a call
    outside of `shard_map`. Leaves must be floating-point arrays that may differ between devices. For a derivative with
    check_vma=True, JAX must be able to verify that the sum is equal on all devices.
    """
    _check(tree, strategy, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, sharded=sharded)

    @jax.custom_jvp
    def reduce(tree: Any) -> Any:
        return reduce_tree(tree, strategy, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, sharded=sharded)

    @reduce.defjvp
    def derivative(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        total, tangent = reduce(*primals), lax.psum(varying(tangents[0]), AXES)
        tangent = jax.tree.map(own_shard, tangent) if sharded else tangent
        for one, other in zip(jax.tree.leaves(total), jax.tree.leaves(tangent), strict=True):
            if _axes_of(one) != _axes_of(other):
                reason = "cannot be differentiated here, because JAX cannot verify that all devices get the same sum"
                raise ConfigError("strategy", strategy, reason=reason, hint="give jax.shard_map check_vma=False")
        return total, tangent

    return reduce(tree)


def reduce_tree(
    tree: Any,
    strategy: str | Stage,
    *,
    wire_dtype: Any = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    sharded: bool = False,
    sent: list | None = None,
) -> Any:
    """`all_reduce_sum` for what is not differentiated, such as gradients. sent: (tree, its buckets) is appended, for audits."""
    buckets = pack_buckets(tree, strategy, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, sharded=sharded)
    for bucket in buckets:
        bucket.finish()
    if sent is not None:
        sent.append((tree, buckets))
    return unpack_buckets(tree, buckets)


class Bucket:
    """Tensors that are reduced together, and their remaining stages.

    vector: the current value. contribution: this device's vector before the first stage. stages: not yet run. indices:
    positions of the tensors among the leaves of their tree. tensors: their shapes and dtypes.
    """

    def __init__(self, leaves: Sequence[jax.Array], indices: list[int], *, stages: Sequence[Stage], wire_dtype: Any) -> None:
        self.indices, self.tensors = indices, [jax.typeof(leaves[index]) for index in indices]
        flat = [leaves[index].ravel().astype(wire_dtype or leaves[index].dtype) for index in indices]
        self.vector = flat[0] if len(flat) == 1 else jnp.concatenate(flat)
        self.contribution, self.stages = self.vector, list(stages)
        if self.vector.size == 0:
            self.vector, self.stages = jnp.zeros(0, self.vector.dtype), []

    def run_next_stage(self) -> None:
        """Run one stage."""
        with jax.named_scope("all-reduce"):
            self.vector = self.stages.pop(0)(self.vector)

    def finish(self) -> None:
        """Run all remaining stages."""
        while self.stages:
            self.run_next_stage()

    def unpack(self) -> Iterator[tuple[int, jax.Array]]:
        """(index, tensor) of each tensor, with its original shape and dtype."""
        start = 0
        for index, tensor in zip(self.indices, self.tensors, strict=True):
            yield index, self.vector[start : start + tensor.size].astype(tensor.dtype).reshape(tensor.shape)
            start += tensor.size

    def gathered(self) -> jax.Array:
        """The sum of `contribution` over all devices, after all stages."""
        return self.vector


class ShardedBucket(Bucket):
    """A bucket without the last stage of its strategy: each device ends with its shard of every tensor.

    vector: the first shards of all tensors, then the second shards, and so on; after the stages, the sums of one of these
    parts.
    """

    def __init__(self, leaves: Sequence[jax.Array], indices: list[int], *, stages: Sequence[Stage], wire_dtype: Any) -> None:
        *reduce_stages, self.gather_stage = stages
        parts = lax.axis_size(HORIZONTAL)
        packed = [jnp.concatenate([to_parts(leaves[index], parts) for index in indices], axis=1).ravel()]
        super().__init__(packed, [0], stages=reduce_stages, wire_dtype=wire_dtype)
        self.indices, self.tensors = indices, [jax.typeof(leaves[index]) for index in indices]

    def unpack(self) -> Iterator[tuple[int, jax.Array]]:
        """(index, this device's shard) of each tensor, with its original dtype."""
        start, parts = 0, lax.axis_size(HORIZONTAL)
        for index, tensor in zip(self.indices, self.tensors, strict=True):
            shape = shard_shape(tensor.shape, parts)
            shard = self.vector[start : start + shape[-1]].astype(tensor.dtype).reshape(shape)
            yield index, shard if tensor.size else jnp.zeros(shape, tensor.dtype)  # JAX knows that these are equal
            start += shape[-1]

    def gathered(self) -> jax.Array:
        """The sum of `contribution` over all devices, after all stages and the one that the step omits."""
        return self.gather_stage(self.vector) if self.vector.size else self.vector


def pack_buckets(
    tree: Any,
    strategy: str | Stage,
    *,
    wire_dtype: Any = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    sharded: bool = False,
) -> list[Bucket]:
    """The buckets of a tree; arguments and errors as in `all_reduce_sum`."""
    _check(tree, strategy, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, sharded=sharded)
    leaves, stages, kind = jax.tree.leaves(tree), stages_of(strategy), ShardedBucket if sharded else Bucket
    assigned = leaf_buckets(leaves, bucket_bytes, wire_dtype)
    return [kind(leaves, indices, stages=stages, wire_dtype=wire_dtype) for indices in assigned]


def unpack_buckets(tree: Any, buckets: list[Bucket]) -> Any:
    """`tree` with the values of its buckets."""
    leaves = dict(pair for bucket in buckets for pair in bucket.unpack())
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[index] for index in range(len(leaves))])


class Overlap:
    """All-reduce of a network's gradients, segment by segment, that overlaps with the backward pass.

    XLA can hide a collective only behind operations that its schedule places between the collective's start and end. By default
    it computes the gradients of all weights last, and all collectives follow them. Here an optimization barrier delays the
    backward pass of the next segment until this segment's gradients and the stages started one segment earlier are done. So
    every stage of every bucket can overlap with the backward pass of one whole segment. The segments of a ResNet are its stem,
    its blocks and its head.

    See `all_reduce_sum` for the arguments. divisor: gradients are divided by it before they are sent. segments: (gradient, its
    buckets) of each segment, in backward order; also appended to `sent`, if given. in_flight: buckets with a started stage that
    is not yet awaited.
    """

    def __init__(
        self,
        strategy: str | Stage,
        *,
        wire_dtype: Any,
        bucket_bytes: int | None,
        divisor: int = 1,
        sharded: bool = False,
        sent: list | None = None,
    ) -> None:
        self.strategy, self.wire_dtype, self.bucket_bytes, self.divisor = strategy, wire_dtype, bucket_bytes, divisor
        self.sharded, self.sent = sharded, sent
        self.segments: list[tuple[dict, list[Bucket]]] = []
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
        self.segments.append((gradient, buckets))
        self.in_flight = [bucket for bucket in self.in_flight + buckets if bucket.stages]
        for bucket in self.in_flight:
            bucket.run_next_stage()
        return cotangent

    def reduce(self, gradient: dict, segments: Iterable[Sequence[str]]) -> dict:
        """The sums of a complete gradient, after gradient accumulation, in the same messages."""
        for segment in reversed([*segments]):
            self.enqueue((), {name: gradient[name] for name in segment})
        return self.wait_all()

    def wait_all(self) -> dict:
        """The sums over all devices of all enqueued gradients, in one tree; this device's shards of them if `sharded`."""
        for bucket in self.in_flight:
            bucket.finish()
        if self.sent is not None:
            self.sent += self.segments
        return {name: value for tree, buckets in self.segments for name, value in unpack_buckets(tree, buckets).items()}


def gather_tensors(
    shards: Any, tensors: Any, strategy: str | Stage, *, bucket_bytes: int | None = BUCKET_BYTES, in_one_copy: bool = False
) -> Any:
    """The whole tensors of a tree, from the shards on the devices. Call inside `shard_map` over both mesh axes.

    shards: this device's, as `all_reduce_sum(..., sharded=True)` returns them. tensors: a tree of objects with the shape of
    each tensor and its dtype, also on the wire. strategy, bucket_bytes: as for `all_reduce_sum`; the last stage of the strategy
    gathers. in_one_copy: join the parts of all tensors of a bucket in one kernel. This saves a kernel for each small tensor,
    but copies large tensors once more.
    """
    leaves, structure = jax.tree.flatten(shards)
    whole, gather, parts = jax.tree.leaves(tensors), stages_of(strategy)[-1], lax.axis_size(HORIZONTAL)
    gathered: dict[int, jax.Array] = {}
    for indices in leaf_buckets(whole, bucket_bytes):
        flat = [leaves[index].ravel().astype(whole[index].dtype) for index in indices]
        sizes = [shard.size for shard in flat]
        with jax.named_scope("all-gather"):
            columns = gather(flat[0] if len(flat) == 1 else jnp.concatenate(flat)).reshape(parts, -1)
            pieces = [piece.ravel() for piece in _split(columns, sizes, axis=1)]
            if in_one_copy and len(pieces) > 1:
                vector = lax.optimization_barrier(jnp.concatenate(pieces))  # without it XLA would make the single copies
                pieces = _split(vector, [parts * size for size in sizes], axis=0)
        gathered |= {index: from_parts(piece, whole[index].shape) for index, piece in zip(indices, pieces, strict=True)}
    return jax.tree.unflatten(structure, [gathered[index] for index in range(len(leaves))])


def _split(array: jax.Array, sizes: Sequence[int], *, axis: int) -> list[jax.Array]:
    """Consecutive slices of an array along an axis, of these sizes."""
    return jnp.split(array, list(itertools.accumulate(sizes))[:-1], axis=axis)


def _check(tree: Any, strategy: str | Stage, *, wire_dtype: Any, bucket_bytes: int | None, sharded: bool = False) -> None:
    """Raise ConfigError, naming the argument, if the tree cannot be reduced."""
    if not callable(strategy) and not (isinstance(strategy, str) and strategy in STRATEGIES):
        raise one_of("strategy", strategy, STRATEGIES)
    if sharded and (callable(strategy) or not STRATEGIES[strategy].scatters):
        raise one_of("strategy", strategy, [name for name, one in STRATEGIES.items() if one.scatters])
    if bucket_bytes is not None and not (isinstance(bucket_bytes, Real) and bucket_bytes >= 1):
        raise ConfigError("bucket_bytes", bucket_bytes, reason="must be positive", hint="None packs all into one bucket")
    if wire_dtype is not None and not any(jnp.dtype(name) == wire_dtype for name in WIRE_BYTES):
        raise one_of("wire_dtype", getattr(wire_dtype, "__name__", str(wire_dtype)), WIRE_BYTES)
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise ConfigError("tree", reason=f"has a leaf of type {type(leaf).__name__}", hint="give floating-point arrays")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError("tree", reason=f"has a leaf of dtype {leaf.dtype}; leaves must be floating-point")
    try:
        devices, axes = lax.axis_size(AXES), _axes_of(lax.axis_index(AXES))
    except NameError:
        hint = "call it inside jax.shard_map over a mesh of jaxdp.make_mesh()"
        raise ConfigError("tree", reason=f"there is no mesh with the axes {' and '.join(AXES)} here", hint=hint) from None
    for leaf in jax.tree.leaves(tree):
        if not axes <= _axes_of(leaf):
            equal = f"has a leaf of shape {leaf.shape} that is equal on all devices, as a gradient that JAX has summed itself"
            hint = "give jax.shard_map check_vma=False, or mark the parameters by jax.lax.pcast"
            raise ConfigError("tree", reason=equal, hint=hint)
    if reason := unsupported_reason(strategy, devices):
        raise ConfigError("strategy", strategy, reason=f"cannot run on {plural(devices, 'device')}: {reason}")
