"""Time of reduction and update of the parameters, replicated or sharded, as `jaxdp bench allreduce` compares them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxdp import models
from jaxdp.choices import OPTIMIZERS
from jaxdp.config import Config
from jaxdp.network import Network
from jaxdp.optim.squares import norm
from jaxdp.parallel import allreduce, timing
from jaxdp.parallel.mesh import AXES
from jaxdp.strategies import STRATEGIES
from jaxdp.training.state import TrainState, create_state, make_optimizer
from jaxdp.training.step import make_layout
from jaxdp.validation import with_fields
from jaxdp.xla import options


def time_updates(config: Config, mesh: Mesh, repeats: int) -> dict[str, float]:
    """Median seconds of reduction and update in each form, by form; {} if the update cannot be sharded on this mesh."""
    scattering, calls = [name for name, each in STRATEGIES.items() if each.scatters], dict[str, Callable[[], Any]]()
    if not (scattering and mesh.devices.shape[1] > 1 and OPTIMIZERS[config.optimizer.name].shards):
        return {}
    for update in ("replicated", "sharded"):
        form = with_fields(config, {"reduce.strategy": scattering[0], "reduce.update": update})
        calls[f"{scattering[0]}, {update} update"] = _compile_update(form, models.create(config.model), mesh)
    return timing.agreed_medians(timing.time_alternately(calls, repeats))


def _compile_update(config: Config, model: Network, mesh: Mesh) -> Callable[[], Any]:
    """A compiled function of no arguments that reduces a gradient, updates the state, and gathers the parameters."""
    layout = make_layout(config, model, mesh)
    gather_params, reduce = layout.params_gatherer(), config.reduce

    def trainable(tree: dict) -> dict:
        return model.trainable(tree, config.finetune.frozen_stages)

    def update(state: TrainState) -> tuple[Any, Any, jax.Array]:
        params = gather_params(state.params)
        # As in a step, the gradient follows from the gathered parameters and differs between devices.
        device = lax.axis_index(AXES).astype(jnp.float32)
        gradient = jax.tree.map(lambda p: p * (1e-3 + 1e-6 * device), lax.pcast(trainable(params), AXES, to="varying"))
        gradient = allreduce.all_reduce_sum(
            gradient,
            reduce.strategy,
            wire_dtype=allreduce.wire_dtype_of(reduce),
            bucket_bytes=reduce.bucket_bytes,
            sharded=layout.sharded,
        )
        shards = trainable(state.params)
        squares = layout.squares(gradient, shards)
        optimizer = make_optimizer(config, model, learning_rate=1e-3, momentum=0.9)
        updates, opt_state = optimizer.update(gradient, state.opt_state, shards, squares=squares)
        return optax.apply_updates(shards, updates), opt_state, norm(squares.gradient)  # the step logs the norm

    specs = layout.specs
    if layout.sharded:
        specs_out: Any = (trainable(specs.params), specs.opt_state, PartitionSpec())
    else:
        specs_out = PartitionSpec()
    check_vma = allreduce.check_vma(reduce.strategy)
    mapped = jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=specs_out, check_vma=check_vma)
    state = layout.place(create_state(config, model, mesh))
    compiled = jax.jit(mapped).lower(state).compile(options.compiler_options(config.compile, mesh.devices.flat[0].platform))
    return lambda: compiled(state)
