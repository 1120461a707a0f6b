"""What the devices of a mesh can do at most, measured: multiply matrices, move memory."""

import statistics

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.parallel import measure
from jaxdp.parallel.mesh import AXES

SIDE = {"cpu": 2048, "gpu": 8192}  # of the matrices
ELEMENTS = {"cpu": 2**25, "gpu": 2**29}  # of the vector, more than any cache holds


def measured(mesh, dtype: str, repeats: int = 7) -> dict:
    """{"flops", "bytes_per_second"} of all devices of a mesh together, each working by itself: medians.

    flops: of the product of two square matrices of `dtype`. bytes_per_second: of adding to a long vector in float32, bytes read
    and bytes written.
    """
    platform = mesh.devices.flat[0].platform
    side, elements = SIDE.get(platform, SIDE["gpu"]), ELEMENTS.get(platform, ELEMENTS["gpu"]) // mesh.size
    rows = PartitionSpec(AXES)

    def on_each(function, shape, dtype):
        make = jax.jit(
            lambda: jax.random.normal(jax.random.key(0), (mesh.size, *shape), dtype), out_shardings=NamedSharding(mesh, rows)
        )
        given = make()
        mapped = jax.jit(jax.shard_map(lambda x: function(x[0])[None], mesh=mesh, in_specs=rows, out_specs=rows))
        compiled = mapped.lower(given).compile()
        return lambda: compiled(given)

    calls = {
        "flops": on_each(lambda x: x @ x, (side, side), jnp.dtype(dtype)),
        "bytes_per_second": on_each(lambda x: x + 1, (elements,), jnp.float32),
    }
    work = {"flops": 2 * side**3 * mesh.size, "bytes_per_second": 2 * 4 * elements * mesh.size}
    seconds = measure.alternated(calls, repeats)
    return {name: work[name] / statistics.median(seconds[name]) for name in calls}
