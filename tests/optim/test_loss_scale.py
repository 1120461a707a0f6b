"""The scale of the loss for float16."""

import jax.numpy as jnp

from jaxdp.optim import loss_scale


def scales(kind, outcomes):
    state, seen = loss_scale.create(kind), []
    for finite in outcomes:
        state = loss_scale.update(kind, state, jnp.asarray(finite))
        seen.append(float(state.scale))
    return seen, state


def test_dynamic_scale_doubles_after_growth_steps_and_stays_within_bounds(monkeypatch):
    for name, value in {"INITIAL": 4.0, "GROWTH_STEPS": 2, "MINIMUM": 2.0, "MAXIMUM": 8.0}.items():
        monkeypatch.setattr(loss_scale, name, value)
    seen, state = scales("dynamic", [True, True, True, True, True, True, False, False, False, True, False, True, True])
    assert seen == [4, 8, 8, 8, 8, 8, 4, 2, 2, 2, 2, 2, 4]
    assert (int(state.skipped), int(state.consecutive_skips)) == (4, 0)
    # a step that is not finite starts the count of finite ones anew
    assert scales("dynamic", [True, False, True, True, False, True, False])[0] == [4, 2, 2, 4, 2, 2, 2]


def test_static_scale_stays_and_counts_skipped_steps():
    seen, state = scales(4.0, [True, False, False])
    assert seen == [4, 4, 4]
    assert int(state.consecutive_skips) == 2
