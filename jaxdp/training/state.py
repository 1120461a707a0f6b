"""What training changes: pure data, the same on every device."""

from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.config import Config
from jaxdp.optim import build


class TrainState(NamedTuple):
    """params, batch_stats (moving averages of batch normalisation) and opt_state: float32 trees."""

    params: Any
    batch_stats: Any
    opt_state: Any


def replicated(mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _initial(config: Config, model):
    shape = (config.data.image_size, config.data.image_size, 3)
    params, batch_stats = model.init(jax.random.key(config.seed), shape)
    return TrainState(params, batch_stats, build(config.optimizer, 0.0, 0.0).init(params))


def abstract_state(config: Config, model, mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, nothing computed."""
    shapes = jax.eval_shape(lambda: _initial(config, model))
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated(mesh)), shapes)


def create_state(config: Config, model, mesh) -> TrainState:
    """The state before the first step, from the config's seed, replicated over the mesh."""
    return jax.jit(lambda: _initial(config, model), out_shardings=replicated(mesh))()
