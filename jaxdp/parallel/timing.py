"""Timing of all-reduce strategies on the local devices: calls alternate, compilation is excluded, every sum is checked."""

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.config import Config
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES
from jaxdp.strategies import Stage
from jaxdp.xla import options

PERIOD = 8191  # of the repeated inputs; a prime, so that no shard of a vector starts where the period does


def time_alternately(
    calls: Mapping[str, Callable[[], Any]], repeats: int, check: Callable[[str, Any], None] = lambda name, out: None
) -> dict[str, list[float]]:
    """Seconds of each call until its result is ready; the calls alternate for `repeats` rounds after one untimed round.

    check: called with the name and result of every call, outside the timed interval.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            out = jax.block_until_ready(call())
            if repeat:
                seconds[name].append(time.perf_counter() - began)
            check(name, out)
    return seconds


@cache
def exact_inputs(dtype: Any, devices: int) -> np.ndarray:
    """Inputs of all devices, [devices, PERIOD] float64, whose sum is exact in `dtype` in any order of additions.

    All partial sums are integers that the dtype represents. If there are too many devices for random integers, the values are 1
    on some devices and 0 on the rest.
    """
    largest, random = 2 ** (jnp.finfo(dtype).nmant + 1), np.random.default_rng(devices)
    if largest >= devices:
        return random.integers(0, largest // devices + 1, (devices, PERIOD)).astype(np.float64)
    counts = np.repeat([[1.0], [0.0]], (largest, devices - largest), axis=0).repeat(PERIOD, 1)
    return random.permuted(counts, axis=0)


class Reduction:
    """A compiled program that sums a tree over the mesh `repetitions` times, with the compiler options of a run.

    shapes: a tree of one device's arrays or `jax.ShapeDtypeStruct`. inputs: the values, integers with an exact sum
    (`exact_inputs`).
    """

    def __init__(
        self,
        mesh: Mesh,
        shapes: Any,
        strategy: str | Stage,
        *,
        wire_dtype: Any = None,
        bucket_bytes: int | None = allreduce.BUCKET_BYTES,
        repetitions: int = 1,
        config: Config | None = None,
    ) -> None:
        rows = PartitionSpec(AXES)

        def sum_once(carry: tuple, _: None) -> tuple:
            tree, _ = carry
            summed = allreduce.all_reduce_sum(tree, strategy, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes)
            summed = lax.pcast(summed, AXES, to="varying")
            return lax.optimization_barrier((tree, summed)), None  # the next repetition starts after this one

        def per_device(tree: Any) -> Any:
            tree = jax.tree.map(lambda x: x[0], tree)
            initial = tree, tree
            (_, summed), _ = (
                sum_once(initial, None) if repetitions == 1 else lax.scan(sum_once, initial, None, length=repetitions)
            )
            return jax.tree.map(lambda x: x[None], summed)

        def period_of(leaf: Any) -> np.ndarray:
            return exact_inputs(jnp.dtype(wire_dtype or leaf.dtype), mesh.size)

        def fill(leaf: Any) -> jax.Array:
            period = jnp.asarray(period_of(leaf), leaf.dtype)
            return jnp.tile(period, -(-leaf.size // PERIOD))[:, : leaf.size].reshape(mesh.size, *leaf.shape)

        self.sums = [period_of(leaf).sum(0).astype(leaf.dtype) for leaf in jax.tree.leaves(shapes)]
        self.inputs = jax.jit(lambda: jax.tree.map(fill, shapes), out_shardings=NamedSharding(mesh, rows))()
        check_vma = allreduce.check_vma(strategy)
        mapped = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma))
        compiler_options = options.compiler_options(config or Config(), mesh.devices.flat[0].platform)
        self.compiled = mapped.lower(self.inputs).compile(compiler_options)

    def __call__(self) -> Any:
        return self.compiled(self.inputs)

    def is_exact(self, out: Any) -> bool:
        """Whether all devices of this process have exactly the sums, bit by bit."""
        return all(
            _repeats(np.asarray(shard.data).ravel(), sums)
            for leaf, sums in zip(jax.tree.leaves(out), self.sums, strict=True)
            for shard in leaf.addressable_shards
        )


def _repeats(values: np.ndarray, period: np.ndarray) -> bool:
    """Whether `values` is bitwise `period`, repeated and cut to its size."""
    complete = values.size // period.size * period.size
    unsigned = f"u{values.itemsize}"
    values, period = values.view(unsigned), period.view(unsigned)
    return bool(
        (values[:complete].reshape(-1, period.size) == period).all()
        and (values[complete:] == period[: values.size - complete]).all()
    )


def max_over_processes(counts: dict[str, int]) -> dict[str, int]:
    """The largest count of any process, by name. All processes must call it with the same names."""
    if jax.process_count() == 1:
        return counts
    from jax.experimental import multihost_utils

    gathered = multihost_utils.process_allgather(np.array(list(counts.values()), np.int32))
    return dict(zip(counts, map(int, np.max(gathered, axis=0)), strict=True))


def time_reductions(reductions: dict[str, Reduction], repeats: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """(seconds of each call, number of calls with a wrong sum on any process), by name."""
    inexact = dict.fromkeys(reductions, 0)

    def check(name: str, out: Any) -> None:
        inexact[name] += not reductions[name].is_exact(out)

    return time_alternately(reductions, repeats, check), max_over_processes(inexact)
