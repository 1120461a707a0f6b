"""Loss scaling for float16 (Micikevicius et al., arXiv 1710.03740, section 3.2): static, or dynamic with skipped steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.config import LossScale as LossScaleConfig


class LossScale(NamedTuple):
    """scale: float32. good: finite steps since the scale last changed. skipped: steps skipped. in_a_row: the last ones."""

    scale: jax.Array
    good: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array


def create(config: LossScaleConfig) -> LossScale:
    """The scale before the first step; 1 where there is no scaling."""
    zero = jnp.zeros((), jnp.int32)
    return LossScale(jnp.float32(1.0 if config.name == "none" else config.initial), zero, zero, zero)


def update(config: LossScaleConfig, state: LossScale, finite) -> LossScale:
    """After a step whose gradient was `finite` (bool scalar) or not: double after `growth_steps` finite ones, else halve.

    The scale stays within [minimum, maximum]; without dynamic scaling it never changes. A step that was not finite
    counts as skipped.
    """
    missed = (~finite).astype(jnp.int32)
    scale, good = state.scale, state.good + 1
    if config.name == "dynamic":
        grown = good >= config.growth_steps
        up = jnp.where(grown, jnp.minimum(scale * 2, config.maximum), scale)
        scale = jnp.where(finite, up, jnp.maximum(scale / 2, config.minimum))
        good = jnp.where(grown, 0, good)
    return LossScale(
        scale=scale,
        good=jnp.where(finite, good, 0),
        skipped=state.skipped + missed,
        in_a_row=jnp.where(finite, 0, state.in_a_row + 1),
    )
