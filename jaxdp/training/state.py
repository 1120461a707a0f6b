"""The state of training: a pytree of arrays, replicated on all devices."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxdp.config import Config
from jaxdp.network import Network
from jaxdp.optim import build_optimizer, loss_scale


class Average(NamedTuple):
    """Sums of an exponential moving average of trained parameters and statistics. Divided by `weight` it is unbiased."""

    params: Any
    batch_stats: Any
    weight: jax.Array

    def include(self, params: dict, batch_stats: dict, decay: float) -> "Average":
        """The average after one more step."""
        new = Average(params, batch_stats, jnp.ones((), jnp.float32))
        return jax.tree.map(lambda old, value: decay * old + (1 - decay) * value, self, new)


class TrainState(NamedTuple):
    """Everything that a step changes.

    params, batch_stats (running statistics of batch normalization), opt_state: float32 trees; opt_state covers the trainable
    parameters. average: an `Average`, or () without averaging. loss_scale: a `jaxdp.optim.loss_scale.LossScale`.
    """

    params: Any
    batch_stats: Any
    opt_state: Any
    average: Any
    loss_scale: Any

    @property
    def evaluated(self) -> tuple[dict, dict]:
        """(params, batch_stats) for evaluation: averaged if averaging is on and a step was taken."""
        if self.average == ():
            return self.params, self.batch_stats
        current = self.params, self.batch_stats
        averaged_names = self.average.params, self.average.batch_stats
        trained = tuple({name: now[name] for name in names} for now, names in zip(current, averaged_names, strict=True))
        return tuple(now | new for now, new in zip(current, _unbiased(self.average, trained), strict=True))


@jax.jit
def _unbiased(average: Average, current: tuple) -> tuple:
    """The average divided by its weight; `current` before the first step."""
    weight = average.weight
    sums = (average.params, average.batch_stats)
    return jax.tree.map(lambda total, now: jnp.where(weight > 0, total / jnp.maximum(weight, 1e-30), now), sums, current)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def from_host(value: Any, mesh: Mesh) -> jax.Array:
    """An array that every process has, replicated on a mesh, without a check that the processes agree."""
    host = np.asarray(value)
    if mesh.is_multi_process:
        return jax.make_array_from_callback(host.shape, replicated(mesh), lambda index: host[index])
    return jax.device_put(host, replicated(mesh))


def make_optimizer(
    config: Config, model: Network, *, learning_rate: float | jax.Array, momentum: float | jax.Array
) -> optax.GradientTransformation:
    """The optimizer of the trainable parameters; the classifier's rate is multiplied by `finetune.head_multiplier`."""
    multiplier = config.finetune.head_multiplier
    multipliers = {} if multiplier == 1.0 else dict.fromkeys(model.segments[-1], multiplier)
    return build_optimizer(config.optimizer, learning_rate, momentum, multipliers=multipliers)


def with_seed(config: Config, seed: jax.Array) -> Config:
    """The config with a seed that is traced, so that all seeds share one program."""
    traced: dict[str, Any] = {"seed": seed}  # an array, which no config file can hold
    return dataclasses.replace(config, **traced)


def _initial_state(config: Config, model: Network) -> TrainState:
    shape = (config.data.image_size, config.data.image_size, 3)
    params, batch_stats = model.init(jax.random.key(config.seed), shape)
    trainable, average = partial(model.trainable, frozen_stages=config.finetune.frozen_stages), ()
    if config.optimizer.average_decay is not None:
        average = jax.tree.map(jnp.zeros_like, Average(trainable(params), trainable(batch_stats), jnp.zeros((), jnp.float32)))
    opt_state = make_optimizer(config, model, learning_rate=0.0, momentum=0.0).init(trainable(params))
    return TrainState(params, batch_stats, opt_state, average, loss_scale.create(config.loss_scale))


def abstract_state(config: Config, model: Network, mesh: Mesh | AbstractMesh) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is computed."""
    shapes = jax.eval_shape(lambda: _initial_state(config, model))
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated(mesh)), shapes)


def create_state(config: Config, model: Network, mesh: Mesh) -> TrainState:
    """The state before the first step, drawn from `config.seed`. All seeds share one compiled program."""

    def initial(seed: jax.Array) -> TrainState:
        return _initial_state(with_seed(config, seed), model)

    return jax.jit(initial, out_shardings=replicated(mesh))(np.uint32(config.seed))
