"""Changes to the table of all-reduce strategies that end with a test, and the collectives of a strategy."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.parallel import allreduce, traffic
from jaxdp.parallel.mesh import AXES, abstract_mesh
from jaxdp.strategies import STRATEGIES, Strategy


def without_device_three(vector):
    """A strategy from whose sum one device is missing in the last elements, as gloo's reduce-scatter had it."""
    lost = (lax.axis_index(AXES) == 3) & (jnp.arange(vector.size) >= vector.size - 2)
    return lax.psum(jnp.where(lost, 0, vector), AXES)


def set_stages(monkeypatch, name, *stages):
    """Give a strategy other stages, or add one with these stages."""
    strategy = STRATEGIES.get(name) or Strategy("")
    monkeypatch.setitem(STRATEGIES.entries, name, dataclasses.replace(strategy, scatters=False))
    monkeypatch.setitem(STRATEGIES.implementations, name, lambda: stages)


def replace_strategies(monkeypatch, stages):
    """Let the table hold only these strategies: name -> stages."""
    for name in STRATEGIES.keys() - stages.keys():
        monkeypatch.delitem(STRATEGIES.entries, name)
    for name, functions in stages.items():
        set_stages(monkeypatch, name, *functions)


def vector_program(strategy, mesh, *, elements, wire_dtype=None) -> jax.stages.Traced:
    """The mean of one float32 vector on a mesh."""

    def per_device(x):
        return allreduce.all_reduce_mean(lax.pcast(x, AXES, to="varying"), strategy, wire_dtype=wire_dtype, bucket_bytes=None)

    check_vma = allreduce.check_vma(strategy)
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=check_vma)
    return jax.jit(mapped).trace(jax.ShapeDtypeStruct((elements,), jnp.float32))


def vector_traffic(strategy, mesh_shape, *, elements, wire_dtype=None) -> traffic.StepTraffic:
    """The collectives of the mean of one float32 vector."""
    mesh = abstract_mesh(*mesh_shape)
    traced = vector_program(strategy, mesh, elements=elements, wire_dtype=wire_dtype)
    found = traffic.find_collectives(traced.jaxpr, dict(mesh.shape))
    return traffic.StepTraffic(*mesh_shape, strategy, (0,), tuple(found))
