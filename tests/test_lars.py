import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp.config import Optimizer
from jaxdp.optim import build, lars

GRADIENTS = [(0.6, 0.8), (-1.0, 0.0), (0.0, 2.0)]
RATES = [1.0, 10.0, 5.0]
KNOWN = {"trust_coefficient": 0.01, "weight_decay": 0.1, "eps": 1e-6}


def walk(**options):
    """Three steps from (3, 4), as in the known answer, in float64."""
    with jax.enable_x64(True):
        weights = jnp.array([[3.0, 4.0]], jnp.float64)
        state = lars(0.0, 0.9, **KNOWN, **options).init(weights)
        for rate, gradient in zip(RATES, GRADIENTS, strict=True):
            updates, state = lars(rate, 0.9, **KNOWN, **options).update(jnp.array([gradient]), state, weights)
            weights = optax.apply_updates(weights, updates)
        return np.asarray(weights)[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (3.3294678758415452, 3.4065762650195457)),
        ({"denominator": "norm_of_sum"}, (3.7029147648494014, 3.182829069181082)),
        ({"nesterov": True}, (3.4627738315226155, 3.066217669030627)),
    ],
)
def test_known_answers_after_three_steps(options, expected):
    np.testing.assert_allclose(walk(**options), expected, rtol=1e-14)


def tree_of(random):
    return {
        "kernel": jnp.asarray(random.normal(size=(3, 3, 4, 5)), jnp.float32),
        "zeros": jnp.zeros((2, 2)),
        "bias": jnp.asarray(random.normal(size=5), jnp.float32),
    }


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("denominator", ["sum_of_norms", "norm_of_sum"])
def test_equals_optax_lars_at_zero_decay(nesterov, denominator):
    random = np.random.default_rng(0)
    params, mask = tree_of(random), {"kernel": True, "zeros": True, "bias": False}
    ours = lars(0.3, 0.9, weight_decay=0.0, eps=0.0, nesterov=nesterov, denominator=denominator)
    peer = optax.lars(0.3, 0.0, mask, 0.001, 0.0, mask, 0.9, nesterov)
    our_state, peer_state = ours.init(params), peer.init(params)
    for _ in range(4):
        gradient = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), jnp.float32), params)
        our_updates, our_state = ours.update(gradient, our_state, params)
        peer_updates, peer_state = peer.update(gradient, peer_state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-9), our_updates, peer_updates)
        params = optax.apply_updates(params, our_updates)


def test_biases_get_neither_trust_ratio_nor_decay():
    params, gradient = {"bias": jnp.array([3.0, 4.0])}, {"bias": jnp.array([0.5, -1.0])}
    optimizer = lars(0.1, 0.9, weight_decay=0.5)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["bias"], [-0.05, 0.1], rtol=1e-6)


def test_zero_weights_and_zero_gradients_have_trust_ratio_one():
    params = {"zeros": jnp.zeros((2, 2)), "still": jnp.ones((2, 2))}
    gradient = {"zeros": jnp.ones((2, 2)), "still": jnp.zeros((2, 2))}
    optimizer = lars(0.1, 0.0, weight_decay=0.01)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["zeros"], -0.1 * np.ones((2, 2)), rtol=1e-6)
    np.testing.assert_allclose(updates["still"], -0.1 * 0.01 * np.ones((2, 2)), rtol=1e-6)


def test_rate_and_momentum_may_be_schedules():
    random = np.random.default_rng(2)
    params = tree_of(random)
    scheduled = lars(lambda step: 0.1 * (step + 1), lambda step: 0.5 + 0.1 * step)
    fixed_state, state = lars(0.0, 0.0).init(params), scheduled.init(params)
    for step in range(3):
        gradient = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), jnp.float32), params)
        updates, state = scheduled.update(gradient, state, params)
        expected, fixed_state = lars(0.1 * (step + 1), 0.5 + 0.1 * step).update(gradient, fixed_state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)


def test_an_unknown_denominator_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"denominator: 'sum' is not allowed; give 'sum_of_norms' or 'norm_of_sum'"):
        lars(0.1, denominator="sum")


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_equals_optax_while_the_rate_changes(nesterov):
    """The rate outside the velocity, equation 9 of Goyal et al.: no momentum correction is needed."""
    random = np.random.default_rng(3)
    params = tree_of(random)
    mask = jax.tree.map(lambda p: p.ndim > 1, params)
    rates = (0.3, 0.1, 0.7)
    schedule = optax.piecewise_constant_schedule(0.3, {1: 0.1 / 0.3, 2: 7.0})
    peer = optax.chain(optax.add_decayed_weights(0.01, mask), optax.sgd(schedule, 0.9, nesterov))
    config = Optimizer(name="sgd", weight_decay=0.01, nesterov=nesterov)
    state, peer_state = build(config, 0.0, 0.9).init(params), peer.init(params)
    for rate in rates:
        ours = build(config, rate, 0.9)
        gradient = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), jnp.float32), params)
        updates, state = ours.update(gradient, state, params)
        expected, peer_state = peer.update(gradient, peer_state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), updates, expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (3.3294678758415452, 3.4065762650195457)),
        ({"denominator": "norm_of_sum"}, (3.7029147648494014, 3.182829069181082)),
        ({"nesterov": True}, (3.4627738315226155, 3.066217669030627)),
        ({"eps": 0.5}, None),
    ],
)
def test_every_field_of_the_config_reaches_lars(options, expected):
    """The known answers once more, by way of the config that a recipe writes."""
    config = Optimizer(name="lars", **KNOWN | options)
    with jax.enable_x64(True):
        weights = jnp.array([[3.0, 4.0]], jnp.float64)
        state = build(config, 0.0, 0.9).init(weights)
        for rate, gradient in zip(RATES, GRADIENTS, strict=True):
            updates, state = build(config, rate, 0.9).update(jnp.array([gradient]), state, weights)
            weights = optax.apply_updates(weights, updates)
    if expected is None:
        assert abs(float(weights[0, 0]) - 3.3294678758415452) > 1e-3
    else:
        np.testing.assert_allclose(np.asarray(weights)[0], expected, rtol=1e-14)


@pytest.mark.parametrize("name", ["lars", "sgd"])
def test_the_gradient_is_clipped_before_either_optimiser(name):
    """For one tensor without decay: LARS divides by the norm, so clipping shows in a tensor without trust ratio, a bias."""
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    gradient = {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full(2, 4.0)}
    norm = np.sqrt(4 * 9 + 2 * 16)
    config = Optimizer(name=name, weight_decay=0.0, clip_norm=norm / 2)
    optimizer = build(config, 0.5, 0.9)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["bias"], -0.5 * 4.0 / 2 * np.ones(2), rtol=1e-6)


@pytest.mark.parametrize("name", ["lars", "sgd"])
def test_momentum_may_change_from_step_to_step(name):
    """A tensor without trust ratio or decay, by hand: the rate inside the velocity for LARS, outside for SGD."""
    params, velocity, expected = {"bias": jnp.zeros(2)}, np.zeros(2), np.zeros(2)
    state = build(Optimizer(name=name), 0.0, 0.0).init(params)
    for rate, momentum, g in [(0.1, 0.9, (1.0, -2.0)), (0.3, 0.95, (0.5, 0.5)), (0.2, 0.5, (-1.0, 4.0))]:
        g = np.array(g)
        updates, state = build(Optimizer(name=name), rate, momentum).update(
            {"bias": jnp.asarray(g, jnp.float32)}, state, params
        )
        params = optax.apply_updates(params, updates)
        velocity = momentum * velocity + (rate * g if name == "lars" else g)
        expected -= velocity if name == "lars" else rate * velocity
        np.testing.assert_allclose(params["bias"], expected, rtol=1e-6)
