"""Checks of a registered all-reduce strategy on the devices of a run, before it trains."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.config import Config
from jaxdp.distributed import status
from jaxdp.distributed.signal_handler import SignalHandler
from jaxdp.errors import ConfigError
from jaxdp.optim.checks import check_elementwise
from jaxdp.parallel import allreduce, timing
from jaxdp.parallel.mesh import AXES
from jaxdp.parallel.shards import own_shard
from jaxdp.planning import Plan
from jaxdp.strategies import STRATEGIES
from jaxdp.training.step_compiler import mesh_of

CHECKED_ELEMENTS = 1001  # not divisible by most numbers of devices


def check_reduction(plan: Plan, devices: list[jax.Device], signals: SignalHandler) -> None:
    """Raise ConfigError if a registered strategy does not add up, or a registered optimizer cannot update shards."""
    signals.group.set_activity("compile", detail="checking the reduction")
    if plan.config.reduce.strategy in STRATEGIES.registered:  # built-in ones have tests
        for phase in {phase.shape: phase for phase in plan.phases if phase.devices > 1}.values():
            signals.raise_if_stop_agreed()  # before the collectives
            _check_sums(plan.config, mesh_of(phase, devices))
    if plan.config.reduce.update == "sharded":
        check_elementwise(plan.config.optimizer)


def _check_sums(config: Config, mesh: Mesh) -> None:
    """Raise ConfigError if a strategy does not return the sum over a mesh, or does not scatter as declared.

    It is run on a short message of integers.
    """
    name, shape = config.reduce.strategy, "x".join(map(str, mesh.devices.shape))
    message = jax.ShapeDtypeStruct((CHECKED_ELEMENTS,), "float32")
    reduction = timing.Reduction(mesh, message, name, bucket_bytes=None, config=config)
    with status.current().waiting(status.DEVICES):
        is_exact = reduction.is_exact(reduction())
    if not is_exact:
        reason = f"its stages do not return the sum over all devices of the {shape} mesh"
        hint = "correct them; jaxdp.first_gradient(config) must equal the gradient of psum"
        raise ConfigError("reduce.strategy", name, reason=reason, hint=hint)
    if STRATEGIES[name].scatters and not _leaves_shards(name, mesh):
        reason = f"before its last stage, the devices of a row of the {shape} mesh do not hold the sum's shards in order"
        raise ConfigError("reduce.strategy", name, reason=reason, hint="correct its stages, or register without scatters")


def _leaves_shards(strategy: str, mesh: Mesh) -> bool:
    """Whether each device of this process has its shard of a sum of integers before the last stage of a strategy."""

    def per_device(row: jax.Array) -> jax.Array:
        values = jnp.arange(CHECKED_ELEMENTS, dtype=jnp.float32) % 64
        shard = allreduce.all_reduce_sum(values + row, strategy, bucket_bytes=None, sharded=True)
        devices = mesh.size
        return jnp.all(shard == own_shard(devices * values + devices * (devices - 1) / 2))[None]

    rows = PartitionSpec(AXES)
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    numbers = jax.jit(lambda: jnp.arange(mesh.size, dtype=jnp.float32), out_shardings=NamedSharding(mesh, rows))()
    program = jax.jit(mapped).lower(numbers).compile()  # calls the stages
    with status.current().waiting(status.DEVICES):
        return all(bool(shard.data.all()) for shard in program(numbers).addressable_shards)
