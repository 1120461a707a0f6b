"""Measured ceilings of the devices of a mesh: matrix multiplication and memory bandwidth."""

import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.parallel import timing
from jaxdp.parallel.mesh import AXES

MATRIX_SIDE = {"cpu": 2048, "gpu": 8192}
CALLS = {"cpu": 1, "gpu": 20}  # between two waits; each takes a noticeable part of a call on a GPU
VECTOR_ELEMENTS = {"cpu": 2**25, "gpu": 2**29}  # over all devices; larger than any cache


def measure(mesh: Mesh, dtype: str, *, repeats: int = 7) -> dict[str, float]:
    """{"flops", "bytes_per_second"}, medians of all devices of a mesh together, each working independently.

    flops: of the product of two square matrices of `dtype`. bytes_per_second: read and written when adding to a long float32
    vector.
    """
    kind = "cpu" if mesh.devices.flat[0].platform == "cpu" else "gpu"
    side, calls, elements = MATRIX_SIDE[kind], CALLS[kind], VECTOR_ELEMENTS[kind] // mesh.size
    rows = PartitionSpec(AXES)

    def on_each_device(function: Callable, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Callable[[], jax.Array]:
        make_inputs = jax.jit(
            lambda: jax.random.normal(jax.random.key(0), (mesh.size, *shape), dtype), out_shardings=NamedSharding(mesh, rows)
        )
        inputs = make_inputs()
        mapped = jax.jit(jax.shard_map(lambda x: function(x[0])[None], mesh=mesh, in_specs=rows, out_specs=rows))
        compiled = mapped.lower(inputs).compile()

        def call() -> jax.Array:
            for _ in range(calls):
                out = compiled(inputs)
            return out

        return call

    measured = {
        "flops": on_each_device(lambda x: x @ x, (side, side), jnp.dtype(dtype)),
        "bytes_per_second": on_each_device(lambda x: x + 1, (elements,), jnp.float32),
    }
    work = {"flops": 2 * side**3 * mesh.size, "bytes_per_second": 2 * 4 * elements * mesh.size}
    seconds = timing.time_alternately(measured, repeats)
    return {name: calls * work[name] / statistics.median(seconds[name]) for name in measured}
