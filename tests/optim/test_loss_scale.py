"""The scale of the loss for float16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.optim import loss_scale


def states(kind, outcomes):
    """The state after every step."""

    def step(state, finite):
        state = loss_scale.update(kind, state, finite)
        return state, state

    return jax.lax.scan(step, loss_scale.create(kind), jnp.asarray(outcomes))[1]


def states_by_hand(kind, outcomes):
    """PyTorch's rule with its interval of 2,000 steps, from 32,768, within 1 and 2^24."""
    dynamic, finite_steps, skipped, consecutive = kind == "dynamic", 0, 0, 0
    scale = {"none": 1.0, "dynamic": 32768.0}.get(kind, kind)
    for finite in outcomes:
        finite_steps, consecutive, skipped = (finite_steps + 1, 0, skipped) if finite else (0, consecutive + 1, skipped + 1)
        if dynamic and not finite:
            scale = max(scale / 2, 1.0)
        elif dynamic and finite_steps == 2000:
            scale, finite_steps = min(2 * scale, 16777216.0), 0
        yield scale, finite_steps, skipped, consecutive


@pytest.mark.parametrize("kind", ["dynamic", "none", 128.0])
def test_scale_and_counts_equal_a_loop_by_hand(kind):
    """To the upper bound and beyond, to the lower one and beyond, and up again from an interrupted interval."""
    runs = [(20_001, True), (26, False), (1999, True), (1, False), (2000, True), (2001, True), (1, False), (1, True)]
    outcomes = np.repeat([finite for _, finite in runs], [count for count, _ in runs])
    found, expected = states(kind, outcomes), zip(*states_by_hand(kind, outcomes), strict=True)
    for name, values in zip(loss_scale.LossScale._fields, expected, strict=True):
        np.testing.assert_array_equal(getattr(found, name), np.array(values), err_msg=name)
    assert {leaf.dtype.name for leaf in found} == {"float32", "int32"}
