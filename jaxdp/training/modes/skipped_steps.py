"""Skipped steps: with loss scaling or `guard.non_finite skip`, a loss or gradient that is not finite changes no parameter."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxdp.config import Config
from jaxdp.optim import loss_scale
from jaxdp.training.objective import Batch, Metrics, Step
from jaxdp.training.state import TrainState


def with_skipped_steps(step: Step, config: Config) -> Step:
    """A skipped step changes only the loss scale and the counters of skipped steps."""
    kind = config.optimizer.loss_scale

    def skipping(state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        new, metrics = step(state, batch, hyperparameters)
        finite = jnp.isfinite(metrics["gradient_norm"]) & jnp.isfinite(metrics["loss"])
        new = jax.tree.map(partial(jnp.where, finite), new, state)
        new = new._replace(loss_scale=loss_scale.update(kind, state.loss_scale, finite))
        counters = {"skipped_steps": new.loss_scale.skipped, "skipped_in_a_row": new.loss_scale.consecutive_skips}
        return new, metrics | ({"loss_scale": state.loss_scale.scale} if kind != "none" else {}) | counters

    return skipping
