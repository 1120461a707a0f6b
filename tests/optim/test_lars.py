import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.optim import lars


def tree_of(random):
    return {
        "kernel": jnp.asarray(random.normal(size=(3, 3, 4, 5)), jnp.float32),
        "zeros": jnp.zeros((2, 2)),
        "bias": jnp.asarray(random.normal(size=5), jnp.float32),
    }


def test_lars_applies_neither_trust_ratio_nor_decay_to_biases():
    params, gradient = {"bias": jnp.array([3.0, 4.0])}, {"bias": jnp.array([0.5, -1.0])}
    optimizer = lars(0.1, 0.9, weight_decay=0.5)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["bias"], [-0.05, 0.1], rtol=1e-6)


def test_lars_of_zero_weights_or_gradients_has_trust_ratio_one():
    params = {"zeros": jnp.zeros((2, 2)), "still": jnp.ones((2, 2))}
    gradient = {"zeros": jnp.ones((2, 2)), "still": jnp.zeros((2, 2))}
    optimizer = lars(0.1, 0.0, weight_decay=0.01)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["zeros"], -0.1 * np.ones((2, 2)), rtol=1e-6)
    np.testing.assert_allclose(updates["still"], -0.1 * 0.01 * np.ones((2, 2)), rtol=1e-6)


def test_lars_with_schedules_equals_fixed_values_per_step():
    random = np.random.default_rng(2)
    params = tree_of(random)
    scheduled = lars(lambda step: 0.1 * (step + 1), lambda step: 0.5 + 0.1 * step)
    fixed_state, state = lars(0.0, 0.0).init(params), scheduled.init(params)
    for step in range(3):
        gradient = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), jnp.float32), params)
        updates, state = scheduled.update(gradient, state, params)
        expected, fixed_state = lars(0.1 * (step + 1), 0.5 + 0.1 * step).update(gradient, fixed_state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)
