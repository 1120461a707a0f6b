"""What training changes: pure data, the same on every device."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.config import Config
from jaxdp.optim import build
from jaxdp.training import loss_scale


class Average(NamedTuple):
    """A moving average of trained parameters and their statistics that starts from nothing: divided by its weight it has no
    bias."""

    params: Any
    batch_stats: Any
    weight: jax.Array

    def include(self, params, batch_stats, decay: float) -> "Average":
        """The average after one more step."""
        new = Average(params, batch_stats, jnp.ones(()))
        return jax.tree.map(lambda old, value: decay * old + (1 - decay) * value, self, new)


class TrainState(NamedTuple):
    """params, batch_stats (statistics of batch normalisation for evaluation) and opt_state: float32 trees, the last one of the
    trained parameters only.

    average (`Average`) is () where there is none; loss_scale: `jaxdp.training.loss_scale.LossScale`.
    """

    params: Any
    batch_stats: Any
    opt_state: Any
    average: Any
    loss_scale: Any

    @property
    def evaluated(self) -> tuple:
        """(params, batch_stats) that evaluation uses: the averages where there are any and a step was taken."""
        if self.average == ():
            return self.params, self.batch_stats
        present = self.params, self.batch_stats
        held = self.average.params, self.average.batch_stats
        own = tuple({name: now[name] for name in of} for now, of in zip(present, held, strict=True))
        return tuple(now | new for now, new in zip(present, _unbiased(self.average, own), strict=True))


@jax.jit
def _unbiased(average: Average, present: tuple) -> tuple:
    """The average over its weight; what is present where no step has been taken."""
    weight = average.weight
    totals = (average.params, average.batch_stats)
    return jax.tree.map(lambda total, now: jnp.where(weight > 0, total / jnp.maximum(weight, 1e-30), now), totals, present)


def replicated(mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def from_host(value, mesh) -> jax.Array:
    """An array that every process has, on all devices of a mesh, without asking the other processes whether theirs is equal."""
    host = np.asarray(value)
    if mesh.is_multi_process:
        return jax.make_array_from_callback(host.shape, replicated(mesh), lambda index: host[index])
    return jax.device_put(host, replicated(mesh))


def moved(tree, mesh):
    """A replicated tree on the devices of another mesh, of which each process has some."""
    if not mesh.is_multi_process:
        return jax.device_put(tree, replicated(mesh))

    def one(leaf):
        copies = [jax.device_put(leaf.addressable_data(0), device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(leaf.shape, replicated(mesh), copies)

    return jax.tree.map(one, tree)


def build_optimizer(config: Config, model, learning_rate, momentum):
    """The optax transformation of a config's trained parameters, with a rate of its own for the classifier."""
    multiplier = config.finetune.head_multiplier
    return build(
        config.optimizer, learning_rate, momentum, {} if multiplier == 1.0 else dict.fromkeys(model.parts[-1], multiplier)
    )


def _initial(config: Config, model):
    shape = (config.data.image_size, config.data.image_size, 3)
    params, batch_stats = model.init(jax.random.key(config.seed), shape)
    trained, average = partial(model.trained, frozen_stages=config.finetune.frozen_stages), ()
    if config.optimizer.average_decay is not None:
        average = jax.tree.map(jnp.zeros_like, Average(trained(params), trained(batch_stats), jnp.zeros(())))
    opt_state = build_optimizer(config, model, 0.0, 0.0).init(trained(params))
    return TrainState(params, batch_stats, opt_state, average, loss_scale.create(config.loss_scale))


def abstract_state(config: Config, model, mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, nothing computed."""
    shapes = jax.eval_shape(lambda: _initial(config, model))
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated(mesh)), shapes)


def create_state(config: Config, model, mesh) -> TrainState:
    """The state before the first step, from the config's seed, replicated over the mesh. Other seeds are the same program."""
    initial = jax.jit(lambda seed: _initial(dataclasses.replace(config, seed=seed), model), out_shardings=replicated(mesh))
    return initial(np.uint32(config.seed))
