"""Loss scaling for float16 (Micikevicius et al., arXiv 1710.03740, section 3.2): the scale, static or dynamic.

`training/modes/loss_scaling.py` scales the gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# A dynamic scale doubles after GROWTH_STEPS finite steps, as in PyTorch and Apex, and stays between MINIMUM and MAXIMUM.
INITIAL, GROWTH_STEPS, MINIMUM, MAXIMUM = 2.0**15, 2000, 1.0, 2.0**24


class LossScale(NamedTuple):
    """scale: float32. finite_steps: finite steps since the last change of the scale. skipped: skipped steps; the last
    `consecutive_skips` of them were consecutive."""

    scale: jax.Array
    finite_steps: jax.Array
    skipped: jax.Array
    consecutive_skips: jax.Array


def create(kind: str | float) -> LossScale:
    """The state before the first step. kind: `optimizer.loss_scale`; the scale is 1 without loss scaling."""
    zero = jnp.zeros((), jnp.int32)
    scale = {"none": 1.0, "dynamic": INITIAL}[kind] if isinstance(kind, str) else kind
    return LossScale(jnp.float32(scale), zero, zero, zero)


def update(kind: str | float, state: LossScale, finite: jax.Array) -> LossScale:
    """The state after a step. kind: as in `create`. finite: bool scalar, whether the gradient was finite; if not, the step
    counts as skipped.

    A dynamic scale doubles after GROWTH_STEPS finite steps and halves after a non-finite one, within [MINIMUM, MAXIMUM].
    """
    skipped = (~finite).astype(jnp.int32)
    scale, finite_steps = state.scale, state.finite_steps + 1
    if kind == "dynamic":
        grows = finite_steps >= GROWTH_STEPS
        after_finite = jnp.where(grows, jnp.minimum(scale * 2, MAXIMUM), scale)
        scale = jnp.where(finite, after_finite, jnp.maximum(scale / 2, MINIMUM))
        finite_steps = jnp.where(grows, 0, finite_steps)
    return LossScale(
        scale=scale,
        finite_steps=jnp.where(finite, finite_steps, 0),
        skipped=state.skipped + skipped,
        consecutive_skips=jnp.where(finite, 0, state.consecutive_skips + 1),
    )
