"""Reduce-scatter and all-gather along the rows of the mesh, in the form that suits the platform that runs the program.

Over several CPU processes XLA passes `lax.psum_scatter` to gloo. With JAX 0.10 gloo sometimes returns wrong sums without an
error (https://github.com/jax-ml/jax/issues/40830), and it aborts if a process is more than 30 s late
(https://github.com/jax-ml/jax/issues/40831). `benchmarks/collectives.py` counts wrong sums; `EXACT_OVER_GLOO` follows its
results.

On TPUs XLA replaces both by an all-reduce of the whole vector unless shards consist of whole tiles. A reduce-scatter also needs
an array with the two axes of a tile, pairs of tiles, and not too many; for an odd number of devices it fails. So it is in
programs that libtpu 0.0.42.1 compiled.
"""

from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from packaging.version import Version

from jaxdp.parallel.mesh import HORIZONTAL

# The first release of jaxlib whose psum_scatter is exact over gloo, by benchmarks/results/collectives_*.json.
EXACT_OVER_GLOO = Version("0.12.0.1")
LANES, TILES = 128, 2 * 8 * 128  # elements of the last axis of a TPU's tile, and of two tiles
MOST = 2**20  # elements of a reduce-scatter on TPUs; XLA replaces some larger ones


def psum_scatter(vector: jax.Array) -> jax.Array:
    """XLA's reduce-scatter. vector: [n], n a multiple of the devices of a row; returns this device's sums, [n / devices]."""
    return lax.psum_scatter(vector, HORIZONTAL, scatter_dimension=0, tiled=True)


def all_to_all_sum(vector: jax.Array) -> jax.Array:
    """An all-to-all and a local sum: the arguments, result, order of additions and bytes sent of `psum_scatter`."""
    shards = vector.reshape(lax.axis_size(HORIZONTAL), -1)
    return lax.all_to_all(shards, HORIZONTAL, split_axis=0, concat_axis=0, tiled=True).sum(0)


def tiled_psum_scatter(vector: jax.Array) -> jax.Array:
    """`psum_scatter` in pieces whose shards are padded to whole tiles, as XLA keeps it on TPUs."""
    shards = vector.reshape(lax.axis_size(HORIZONTAL), -1)
    size = max(1, MOST // len(shards) // TILES) * TILES
    pieces = [shards[:, start : start + size] for start in range(0, max(1, shards.shape[1]), size)]
    padded = [jnp.pad(piece, ((0, 0), (0, -piece.shape[1] % TILES))).reshape(-1, LANES) for piece in pieces]
    sums = [lax.psum_scatter(piece, HORIZONTAL, scatter_dimension=0, tiled=True).ravel() for piece in padded]
    return jnp.concatenate(sums)[: shards.shape[1]]


def tiled_all_gather(shard: jax.Array, **options: Any) -> jax.Array:
    """The tiled `lax.all_gather` along the rows of a shard, [n], that is padded to whole tiles, as XLA keeps it on TPUs."""
    whole = lax.all_gather(jnp.pad(shard, (0, -shard.size % TILES)), HORIZONTAL, tiled=True, **options)
    return whole.reshape(lax.axis_size(HORIZONTAL), -1)[:, : shard.size].ravel()


def on_tpu() -> bool:
    """Whether the mesh inside `shard_map` consists of TPUs."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "tpu"


def uses_gloo(platform: str | None = None) -> bool:
    """Whether gloo runs the collectives of a platform: on CPUs once `jax.distributed` is initialized, even with one process.

    platform: "cpu", "gpu", ...; None for the platform of the mesh inside `shard_map`, or of JAX's default devices.
    """
    if not jax.distributed.is_initialized():  # first, because a plan must not start JAX's devices
        return False
    if platform is None:
        device = jax.sharding.get_abstract_mesh().abstract_device
        platform = device.platform if device else jax.default_backend()
    return platform == "cpu"


def reduce_scatter(vector: jax.Array) -> jax.Array:
    """`all_to_all_sum` over gloo and for an odd number of TPUs, `tiled_psum_scatter` for an even one, else `psum_scatter`."""
    if on_tpu() and lax.axis_size(HORIZONTAL) % 2 == 0:
        return tiled_psum_scatter(vector)
    return all_to_all_sum(vector) if uses_gloo() or on_tpu() else psum_scatter(vector)


def inexact_collective_reason(primitives: Container[str], platform: str) -> str | None:
    """Why a program with these primitives (names as in a jaxpr) may return wrong sums on a platform, or None."""
    import jaxlib

    if "reduce_scatter" not in primitives or not uses_gloo(platform) or Version(jaxlib.__version__) >= EXACT_OVER_GLOO:
        return None
    return (
        f"lax.psum_scatter returns wrong sums over CPU processes with jaxlib {jaxlib.__version__} (jax-ml/jax#40830); use "
        f"jaxdp.parallel.allreduce.reduce_scatter_rows, or jaxlib {EXACT_OVER_GLOO} or newer"
    )
