"""`optimizer.average_decay`: an exponential moving average (EMA) of what a step trains, with which a run is evaluated."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.config import Config, Optimizer
from jaxdp.training.objective import Batch, Metrics, Step
from jaxdp.training.state import Average, StateLayout, TrainState

WARMUP_POWER = 2 / 3  # of the average's decay, timm's default


def with_average(step: Step, config: Config, layout: StateLayout) -> Step:
    """An average of the trained parameters and statistics includes each new state."""

    def averaging(state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        new, metrics = step(state, batch, hyperparameters)
        with jax.named_scope("optimizer"):
            average = include(
                state.average, layout.trained(new.params), layout.trained(new.batch_stats), optimizer=config.optimizer
            )
        return new._replace(average=average), metrics

    return averaging


def include(average: Average, params: dict, batch_stats: dict, *, optimizer: Optimizer) -> Average:
    """The average after one more step. optimizer: with `average_decay`."""
    steps = average.steps + 1
    share = _share(optimizer, steps)

    def move(mean: jax.Array, value: jax.Array) -> jax.Array:
        """With 1 - share as a factor, its rounding to float32 would add up over the steps."""
        return mean + share * (value - mean)

    params, batch_stats = jax.tree.map(move, (average.params, average.batch_stats), (params, batch_stats))
    return Average(params, batch_stats, steps)


def _share(optimizer: Optimizer, step: jax.Array) -> jax.Array:
    """The share of a step's values in the average after it. step: its number, from 1 on, where the share is 1."""
    decay: Any = optimizer.average_decay
    share = jnp.float32(1 - decay)  # subtracted in float64
    if optimizer.average_start == "initial":
        return jnp.where(step > 1, share, 1)
    if optimizer.average_start == "warmup":
        return jnp.maximum(share, step ** jnp.float32(-WARMUP_POWER))
    return share / -jnp.expm1(step * jnp.log1p(-share))  # over 1 - decay^step, the sum of the weights
