"""`jaxdp.optim.lars` and `lamb` inside optax's own combinators, against optax's rules where the definitions agree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp


def rates(step):
    return 0.1 * (step + 1)


PAIRS = {
    "lars": (
        lambda: optax.inject_hyperparams(jaxdp.optim.lars)(rates, weight_decay=0.0, eps=0.0),
        lambda: optax.lars(rates, weight_decay=0.0, eps=0.0, momentum=0.9),
    ),
    "lamb": (
        lambda: optax.inject_hyperparams(jaxdp.optim.lamb)(rates, weight_decay=0.01),
        lambda: optax.lamb(rates, weight_decay=0.01),
    ),
}


def walk(rule):
    """The weights after six micro-batches, by clipped gradients of two each."""
    random = np.random.default_rng(0)

    def draw():
        return {"kernel": jnp.asarray(random.normal(size=(3, 4)), jnp.float32), "more": jnp.ones((2, 2), jnp.float32)}

    params = draw()
    optimizer = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), rule), every_k_schedule=2)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(6):
        updates, state = update(draw(), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", PAIRS)
def test_rule_composes_as_that_of_optax(name):
    ours, peer = PAIRS[name]
    (params, state), (expected, _) = walk(ours()), walk(peer())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, expected)
    assert state.inner_opt_state[1].hyperparams["learning_rate"] == pytest.approx(rates(2))


def dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype, tree)


def test_updates_keep_the_dtypes_of_their_weights():
    params = {"a": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.ones((4, 4))}
    rule = jaxdp.optim.lars(0.1)
    updates, state = rule.update(params, rule.init(params), params)
    assert dtypes(updates) == dtypes(params)
    assert dtypes(state) == dtypes(rule.init(params))
