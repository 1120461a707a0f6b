"""Arithmetic of audits: the sum of a bucket by a reference reduction, and the largest difference that rounding explains.

Two sums of the same N numbers, in a different order or by a different algorithm, differ only by rounding. A computed sum
differs from the exact sum by at most ((1 + u)^h - 1) sum_i |x_i| (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
ed., 2002, section 4.2). Here h is the largest number of additions that a number passes through, at most N - 1 in any order; u
is half the distance from 1 to the next number of the dtype. If the difference is larger, one of the two results is not the sum.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from jaxdp.errors import ConfigError
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import abstract_mesh
from jaxdp.parallel.traffic import find_collectives
from jaxdp.strategies import STRATEGIES, Stage

SLACK = 1 + 2**-18  # for the rounding of the comparison itself, in float32

# In float32. An audit uses the first one that shares no collective with the strategy.
REFERENCE_REDUCTIONS: dict[str, tuple[Stage, ...]] = {
    "all-reduce over both axes": (allreduce.psum,),
    "all-reduce along the columns, then along the rows": (allreduce.all_reduce_columns, allreduce.all_reduce_rows),
    "ring": (allreduce.ring,),
}


def reference_reduction(strategy: str, vertical: int, horizontal: int) -> str:
    """The key of `REFERENCE_REDUCTIONS` that audits a strategy on a mesh: different collectives, or the same over different
    axes.

    The ring if all reductions share a collective with the strategy, or if the strategy's collectives cannot be traced.
    """
    mesh = abstract_mesh(vertical, horizontal)
    try:
        used = _collectives(allreduce.stages_of(strategy), mesh)
    except ConfigError:  # a collective in a while loop
        return "ring"
    return next((name for name, stages in REFERENCE_REDUCTIONS.items() if not used & _collectives(stages, mesh)), "ring")


def _collectives(stages: Sequence[Stage], mesh: AbstractMesh) -> set[tuple[str, tuple[str, ...]]]:
    """(operation, axes with more than one device) of every collective of the stages on a mesh."""

    def reduce(vector: jax.Array) -> jax.Array:
        for stage in stages:
            vector = stage(vector)
        return vector

    everywhere = PartitionSpec()
    mapped = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
    traced = mapped.trace(jax.ShapeDtypeStruct((mesh.size,), jnp.float32))
    sizes = dict(mesh.shape)
    found = find_collectives(traced.jaxpr, sizes)
    return {(collective.operation, tuple(axis for axis in collective.axes if sizes[axis] > 1)) for collective in found}


class RoundingBound(NamedTuple):
    """The largest difference of two sums by rounding: `relative` * sum_i |x_i| + `absolute` (for values that underflow).

    overflow: from this value of sum_i |x_i| on, a partial sum can exceed the range of the strategy's dtype.
    """

    relative: float
    absolute: float
    overflow: float


def rounding_bound(strategy: str, dtype: Any, *, vertical: int, horizontal: int) -> RoundingBound:
    """The bound for a sum by a strategy in `dtype` and its reference reduction, which is in float32, on a mesh."""
    devices = vertical * horizontal
    first = _relative_error(dtype, STRATEGIES[strategy].max_additions(vertical, horizontal))
    second = _relative_error(jnp.float32, devices - 1)
    # sum_i |x_i| is itself a float32 sum. Each of the two sums may lose subnormal numbers, which some processors flush to zero,
    # at every addition.
    relative = (first + second) / (1 - second) * SLACK
    absolute = 4 * devices * float(jnp.finfo(jnp.float32).tiny)
    overflow = float(jnp.finfo(dtype).max) / ((1 + first) * (1 + second) * SLACK)
    return RoundingBound(relative, absolute, overflow)


def _relative_error(dtype: Any, additions: int) -> float:
    unit_roundoff = float(jnp.finfo(dtype).eps) / 2
    return math.expm1(additions * math.log1p(unit_roundoff))


def compare_sums(bucket: allreduce.Bucket, reference: str, allowed: RoundingBound) -> dict[str, jax.Array]:
    """This device's comparison of a reduced bucket with its reference reduction: scalars.

    Call inside `shard_map` over both axes.
    share: the largest difference as a share of the bound, 0 to 1 if both sums agree. mismatches: number of values that differ
    by more. For the worst of them: index in the bucket, first (the strategy's sum), second (the reference reduction's), bound.
    missing: whether both agree once this device's contribution is left out of the second. A value whose sum is not finite, or
    may have overflowed, is compared only if both sums are finite.
    """
    contribution = lax.optimization_barrier(bucket.contribution).astype(jnp.float32)
    size = contribution.size
    vector = jnp.concatenate([contribution, jnp.abs(contribution)])
    for stage in REFERENCE_REDUCTIONS[reference]:
        vector = stage(vector)
    first, second, magnitude = bucket.gathered()[:size].astype(jnp.float32), vector[:size], vector[size:]
    bound = magnitude * allowed.relative + allowed.absolute

    def compare(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(which values differ by more than rounding, the differences)."""
        difference = jnp.abs(first - second)
        comparable = (magnitude < allowed.overflow) | (jnp.isfinite(first) & jnp.isfinite(second))
        return comparable & ~(difference <= bound), jnp.where(comparable, difference, 0.0)

    mismatch, difference = compare(first, second)
    mismatch_without, _ = compare(first, second - contribution)
    worst = jnp.argmax(jnp.where(mismatch, jnp.where(jnp.isnan(difference), jnp.inf, difference), -1.0))
    return {
        "share": jnp.max(jnp.where(difference > 0, difference / bound, 0.0)),
        "mismatches": mismatch.sum(dtype=jnp.int32),
        "index": worst.astype(jnp.int32),
        "first": first[worst],
        "second": second[worst],
        "bound": bound[worst],
        "missing": mismatch.any() & ~mismatch_without.any(),
    }
