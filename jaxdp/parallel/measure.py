"""Timing aggregation on the devices at hand: calls alternated in one process, compilation apart."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.config import Compile
from jaxdp.parallel import allreduce, compilation
from jaxdp.parallel.mesh import AXES, unfit

CANDIDATES = ("psum", "torus", "hierarchical", "ring")


def alternated(calls: dict, repeats: int) -> dict[str, list[float]]:
    """Seconds of each call until its result is there, the calls taking turns `repeats` times after one round unrecorded."""
    seconds = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def reduction(
    mesh, shapes, strategy, wire_dtype=None, bucket_bytes=allreduce.BUCKET_BYTES, times: int = 1, compile: Compile | None = None
):
    """A call that averages a tree over the mesh `times` times in a row, compiled as the programs of a run are.

    shapes: a tree of what each device has, arrays or `jax.ShapeDtypeStruct`; the values are made here.
    """
    rows = PartitionSpec(AXES)

    def per_device(tree):
        def once(tree, _):
            return lax.pcast(allreduce.mean(tree, strategy, wire_dtype, bucket_bytes), AXES, to="varying"), None

        own = jax.tree.map(lambda x: x[0], tree)
        reduced, _ = (once(own, None)) if times == 1 else lax.scan(once, own, None, length=times)
        return jax.tree.map(lambda x: x[None], reduced)

    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype), shapes)
    make = jax.jit(lambda: jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), whole), out_shardings=NamedSharding(mesh, rows))
    given = make()
    proven = allreduce.proves_replication(strategy)
    mapped = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=proven))
    compiled = mapped.lower(given).compile(compilation.options(compile or Compile(), mesh.devices.flat[0].platform))
    return lambda: compiled(given)


def fastest(
    mesh, shapes, wire_dtype=None, bucket_bytes=allreduce.BUCKET_BYTES, repeats: int = 5, compile: Compile | None = None
) -> tuple[str, dict]:
    """(the strategy with the shortest median for averaging such a tree on this mesh, medians of all that were tried).

    On one device there is nothing to measure. All processes of a run get the medians of the first one, so that they agree.
    """
    if mesh.size == 1:
        return CANDIDATES[0], {}
    calls = {
        strategy: reduction(mesh, shapes, strategy, wire_dtype, bucket_bytes, compile=compile)
        for strategy in CANDIDATES
        if not unfit(strategy, mesh.size)
    }
    medians = {name: statistics.median(seconds) for name, seconds in alternated(calls, repeats).items()}
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        agreed = multihost_utils.broadcast_one_to_all(np.array(list(medians.values()), np.float32))
        medians = dict(zip(medians, map(float, agreed), strict=True))
    return min(medians, key=medians.get), medians
