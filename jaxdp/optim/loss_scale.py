"""Loss scaling for float16 (Micikevicius et al., arXiv 1710.03740, section 3.2): static, or dynamic with skipped steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.config import LossScale as LossScaleConfig


class LossScale(NamedTuple):
    """scale: float32. finite_steps: finite steps since the last change of the scale. skipped: skipped steps, of which the last
    `consecutive_skips` were consecutive."""

    scale: jax.Array
    finite_steps: jax.Array
    skipped: jax.Array
    consecutive_skips: jax.Array


def create(config: LossScaleConfig) -> LossScale:
    """The state before the first step; the scale is 1 without loss scaling."""
    zero = jnp.zeros((), jnp.int32)
    return LossScale(jnp.float32(1.0 if config.name == "none" else config.initial), zero, zero, zero)


def update(config: LossScaleConfig, state: LossScale, finite: jax.Array) -> LossScale:
    """The state after a step. finite: bool scalar, whether the gradient was finite; if not, the step counts as skipped.

    A dynamic scale doubles after GROWTH_STEPS finite steps and halves after a non-finite one, within [MINIMUM, MAXIMUM].
    """
    skipped = (~finite).astype(jnp.int32)
    scale, finite_steps = state.scale, state.finite_steps + 1
    if config.name == "dynamic":
        grows = finite_steps >= config.GROWTH_STEPS
        after_finite = jnp.where(grows, jnp.minimum(scale * 2, config.MAXIMUM), scale)
        scale = jnp.where(finite, after_finite, jnp.maximum(scale / 2, config.MINIMUM))
        finite_steps = jnp.where(grows, 0, finite_steps)
    return LossScale(
        scale=scale,
        finite_steps=jnp.where(finite, finite_steps, 0),
        skipped=state.skipped + skipped,
        consecutive_skips=jnp.where(finite, 0, state.consecutive_skips + 1),
    )
