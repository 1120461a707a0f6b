"""What training changes: pure data, the same on every device."""

from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.config import Config
from jaxdp.optim import build
from jaxdp.training import loss_scale


class TrainState(NamedTuple):
    """params, batch_stats (statistics of batch normalisation for evaluation) and opt_state: float32 trees.

    average (a moving average of params) and loss_scale (`jaxdp.training.loss_scale.LossScale`) are () where there is none.
    """

    params: Any
    batch_stats: Any
    opt_state: Any
    average: Any
    loss_scale: Any

    @property
    def evaluated_params(self):
        """What evaluation uses: the average of the parameters where there is one."""
        return self.average if self.average != () else self.params


def replicated(mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _initial(config: Config, model):
    shape = (config.data.image_size, config.data.image_size, 3)
    params, batch_stats = model.init(jax.random.key(config.seed), shape)
    average = () if config.optimizer.average_decay is None else params
    opt_state = build(config.optimizer, 0.0, 0.0).init(params)
    return TrainState(params, batch_stats, opt_state, average, loss_scale.create(config.loss_scale))


def abstract_state(config: Config, model, mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, nothing computed."""
    shapes = jax.eval_shape(lambda: _initial(config, model))
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated(mesh)), shapes)


def create_state(config: Config, model, mesh) -> TrainState:
    """The state before the first step, from the config's seed, replicated over the mesh."""
    return jax.jit(lambda: _initial(config, model), out_shardings=replicated(mesh))()
