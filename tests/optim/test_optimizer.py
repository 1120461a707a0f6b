"""Construction of optimizers from their config."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.runs import outcome, train_until

from jaxdp import train
from jaxdp.choices import OPTIMIZERS
from jaxdp.config import Optimizer
from jaxdp.optim import build_optimizer, lamb, lars, squares
from jaxdp.optim.rules import in_float32

GRADIENTS = [(0.6, 0.8), (-1.0, 0.0), (0.0, 2.0)]
RATES = [1.0, 10.0, 5.0]
KNOWN = {"trust_coefficient": 0.01, "weight_decay": 0.1, "eps": 1e-6}


def tree_of(random):
    return {
        "kernel": jnp.asarray(random.normal(size=(3, 3, 4, 5)), jnp.float32),
        "zeros": jnp.zeros((2, 2)),
        "bias": jnp.asarray(random.normal(size=5), jnp.float32),
    }


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_a_changing_rate_equals_optax(nesterov):
    """The rate outside the velocity, equation 9 of Goyal et al.: no momentum correction is needed."""
    random = np.random.default_rng(3)
    params = tree_of(random)
    mask = jax.tree.map(lambda p: p.ndim > 1, params)
    rates = (0.3, 0.1, 0.7)
    schedule = optax.piecewise_constant_schedule(0.3, {1: 0.1 / 0.3, 2: 7.0})
    peer = optax.chain(optax.add_decayed_weights(0.01, mask), optax.sgd(schedule, 0.9, nesterov))
    config = Optimizer(name="sgd", weight_decay=0.01, nesterov=nesterov)
    state, peer_state = build_optimizer(config, 0.0, 0.9).init(params), peer.init(params)
    for rate in rates:
        ours = build_optimizer(config, rate, 0.9)
        gradient = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), jnp.float32), params)
        updates, state = ours.update(gradient, state, params)
        expected, peer_state = peer.update(gradient, peer_state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), updates, expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (3.3294678758415452, 3.4065762650195457)),
        ({"nesterov": True}, (3.4627738315226155, 3.066217669030627)),
        ({"eps": 0.5}, None),
    ],
)
def test_build_optimizer_passes_every_config_field_to_lars(options, expected):
    """The known answers once more, by way of the config that a recipe writes."""
    config = Optimizer(name="lars", **KNOWN | options)
    with jax.enable_x64(True):
        weights = jnp.array([[3.0, 4.0]], jnp.float64)
        state = build_optimizer(config, 0.0, 0.9).init(weights)
        step = jax.jit(lambda rate, *given: build_optimizer(config, rate, 0.9).update(*given))
        for rate, gradient in zip(RATES, GRADIENTS, strict=True):
            updates, state = step(rate, jnp.array([gradient]), state, weights)
            weights = optax.apply_updates(weights, updates)
    if expected is None:
        assert abs(float(weights[0, 0]) - 3.3294678758415452) > 1e-3
    else:
        np.testing.assert_allclose(np.asarray(weights)[0], expected, rtol=1e-14)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_build_optimizer_with_clip_norm_equals_the_optimizer_of_clipped_gradients(name):
    """Two steps. Only the second clips, so that optimizers that ignore a gradient's norm differ too."""
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    gradient = {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full(2, 4.0)}
    norm = np.sqrt(4 * 9 + 2 * 16)

    def updates_of(clip_norm, gradients):
        transform = build_optimizer(Optimizer(name=name, clip_norm=clip_norm), 0.5, 0.9)
        state, update = transform.init(params), jax.jit(transform.update)
        for one in gradients:
            updates, state = update(one, state, params)
        return jax.tree.leaves((updates, state))

    halved, third = (jax.tree.map(lambda g, k=k: g / k, gradient) for k in (2, 3))
    clipped = updates_of(norm / 2, [third, gradient])
    expected = updates_of(None, [third, halved])
    unclipped = updates_of(None, [third, gradient])
    for one, other in zip(clipped, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)  # with the trust ratio of the clipped gradient
    assert not all(np.allclose(one, other, rtol=1e-3) for one, other in zip(clipped, unclipped, strict=True))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_constructor_reads_exactly_the_fields_that_the_table_lists(name):
    read = set()

    class Recording(Optimizer):
        def __getattribute__(self, field):
            read.add(field)
            return super().__getattribute__(field)

    OPTIMIZERS.implementation(name)(Recording(name=name), 0.1, 0.9)
    assert {field for field in read if not field.startswith("__")} == {"weight_decay"} | {
        field.removeprefix("optimizer.") for field in OPTIMIZERS.read_fields(name)
    }


def lars_in_float64(config, rate, momentum, *, weight, gradient, velocity):
    """(update, velocity) of a tensor, equations of You et al., with the rate inside the velocity."""
    if weight.ndim > 1:
        decay, norm = config.weight_decay, np.linalg.norm
        bottom = norm(gradient) + decay * norm(weight) + config.eps
        ratio = config.trust_coefficient * norm(weight) / bottom if norm(weight) and norm(gradient) else 1.0
        gradient = ratio * (gradient + decay * weight)
    velocity = momentum * velocity + rate * gradient
    return -velocity, velocity


def nnablas_lars_in_float64(config, rate, momentum, *, weight, gradient, velocity):
    """(update, velocity) of a tensor as in nnabla's documentation: no tensor is left out, and eps is added only if needed."""
    norm, decay = np.linalg.norm(weight), config.weight_decay
    bottom = np.linalg.norm(gradient) + decay * norm
    bottom += config.eps if bottom < config.eps else 0.0
    ratio = 1.0 if norm < config.eps else config.trust_coefficient * norm / bottom
    velocity = momentum * velocity + rate * ratio * (gradient + decay * weight)
    return -velocity, velocity


def test_lars_that_adapts_every_tensor_equals_nnabla():
    """After the known answer of the reference itself, biases, scales and matrices for four steps."""
    weight, velocity, config = np.array([3.0, 4.0]), 0.0, Optimizer(**KNOWN)
    for rate, gradient in zip(RATES, GRADIENTS, strict=True):
        update, velocity = nnablas_lars_in_float64(
            config, rate, 0.9, weight=weight, gradient=np.array(gradient), velocity=velocity
        )
        weight = weight + update
    np.testing.assert_allclose(weight, (3.329468103096923, 3.406575936845014), rtol=1e-14)

    config, velocities = Optimizer(weight_decay=0.01, trust_coefficient=0.02, eps=1e-12, adapt="all"), {}
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), tree_of(np.random.default_rng(5)))
        params["scale"] = jnp.linspace(0.5, 2.0, 7)
        weights, state = jax.tree.map(np.asarray, params), build_optimizer(config, 0.0, 0.0).init(params)
        step = jax.jit(lambda rate, momentum, *given: build_optimizer(config, rate, momentum).update(*given))
        for number, (rate, momentum) in enumerate([(0.1, 0.9), (0.3, 0.95), (0.2, 0.5), (0.2, 0.99)]):
            gradients = {key: np.cos(3 * tensor + number) for key, tensor in weights.items()}
            updates, state = step(rate, momentum, jax.tree.map(jnp.asarray, gradients), state, params)
            params = optax.apply_updates(params, updates)
            for key, weight in weights.items():
                update, velocities[key] = nnablas_lars_in_float64(
                    config, rate, momentum, weight=weight, gradient=gradients[key], velocity=velocities.get(key, 0.0)
                )
                weights[key] = weight + update
                np.testing.assert_allclose(params[key], weights[key], rtol=1e-9, err_msg=f"{key} at step {number}")


def sgd_in_float64(config, rate, momentum, *, weight, gradient, velocity):
    """(update, velocity) of a tensor, equation 9 of Goyal et al., with the rate outside the velocity."""
    velocity = momentum * velocity + gradient + config.weight_decay * weight * (weight.ndim > 1)
    return -rate * velocity, velocity


def adam_in_float64(config, momentum, gradient, history, *, eps):
    """(direction, history): averages of all gradients; a later step's momentum multiplies the earlier weights."""
    history = [*(history or []), (momentum, gradient)]
    shares, squares = np.zeros(0), np.zeros(0)
    for b1, _ in history:
        shares, squares = (np.append(old * b, 1 - b) for old, b in ((shares, b1), (squares, config.beta2)))
    gradients = np.stack([gradient for _, gradient in history])
    mean = np.average(gradients, axis=0, weights=shares)
    return mean / (np.sqrt(np.average(gradients**2, axis=0, weights=squares)) + eps), history


def adamw_in_float64(config, rate, momentum, *, weight, gradient, velocity):
    """Algorithm 2 of Loshchilov & Hutter; the velocity is the history of momenta and gradients."""
    direction, velocity = adam_in_float64(config, momentum, gradient, velocity, eps=1e-8)
    return -rate * (direction + config.weight_decay * weight * (weight.ndim > 1)), velocity


def lamb_in_float64(config, rate, momentum, *, weight, gradient, velocity):
    """Algorithm 2 of You et al. (arXiv 1904.00962); the velocity is the history of momenta and gradients."""
    direction, velocity = adam_in_float64(config, momentum, gradient, velocity, eps=1e-6)
    if weight.ndim > 1:
        direction = direction + config.weight_decay * weight
        norms = np.linalg.norm(weight), np.linalg.norm(direction)
        direction = direction * (norms[0] / norms[1] if all(norms) else 1.0)
    return -rate * direction, velocity


# name: (config, rate, momentum, *, weight, gradient, velocity) -> (update, velocity) of one tensor; the first velocity is 0.0
REFERENCES = {"lars": lars_in_float64, "sgd": sgd_in_float64, "adamw": adamw_in_float64, "lamb": lamb_in_float64}


@pytest.mark.parametrize("given", [True, False])
def test_updates_have_the_dtype_of_the_parameters_or_of_the_gradient_without_them(given):
    rule = in_float32(optax.sgd(0.5))
    params, gradient = {"a": jnp.ones(3, jnp.float16)}, {"a": jnp.full(3, 2.0, jnp.bfloat16)}
    updates, _ = rule.update(gradient, rule.init(params), params if given else None)
    assert updates["a"].dtype == (jnp.float16 if given else jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(updates["a"], np.float32), -1.0)


@pytest.mark.parametrize(("name", "build"), [("lars", lars), ("lamb", lamb)])
def test_default_hyperparameters_are_those_of_the_papers(name, build):
    """Of LARS with the decay of a ResNet, and of LAMB. The gradients are as small as both epsilons."""
    config = SimpleNamespace(weight_decay=1e-4, trust_coefficient=0.001, eps=1e-6, beta2=0.999)
    random, params, rule = np.random.default_rng(0), {"a": jnp.full((2, 3), 1e-3)}, build(0.3)
    state, velocity, weight = rule.init(params), 0.0, np.full((2, 3), 1e-3)
    for _ in range(3):
        gradient = 1e-6 * random.normal(size=(2, 3))
        updates, state = rule.update({"a": jnp.asarray(gradient, jnp.float32)}, state, params)
        expected, velocity = REFERENCES[name](config, 0.3, 0.9, weight=weight, gradient=gradient, velocity=velocity)
        np.testing.assert_allclose(updates["a"], expected, rtol=1e-4)


RULES = {  # of jaxdp.optim, and of a config
    "lars": (lambda config, rate, momentum: lars(rate, momentum, weight_decay=config.weight_decay)),
    "lamb": (lambda config, rate, momentum: lamb(rate, momentum, weight_decay=config.weight_decay)),
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rates", ["constant", "traced", "scheduled"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_updates_in_a_scan_differ_from_float64_by_the_rounding_of_their_dtype_alone(name, rates, dtype):
    """Of norms whose squares float16 cannot hold."""
    if rates == "scheduled" and name not in RULES:
        return
    build = RULES[name] if rates == "scheduled" else build_optimizer
    random, steps, config = np.random.default_rng(5), 4, Optimizer(name=name, weight_decay=0.01)
    params = {key: jnp.asarray(random.normal(size=(4, 5)) * 9, dtype) for key in ("small", "large")}
    factors = {"small": 1e-5, "large": 3e3}
    drawn = {key: jnp.asarray(random.normal(size=(steps, 4, 5)) * factors[key], dtype) for key in params}
    slope = 0.1 if rates == "scheduled" else 0.0

    def walk(rate, momentum):
        rule = build(config, (lambda step: 0.3 + slope * step) if rates == "scheduled" else rate, momentum)

        def body(state, gradient):
            updates, state = rule.update(gradient, state, params)
            return state, updates

        return jax.lax.scan(body, rule.init(params), drawn)[1]

    found = jax.jit(walk)(0.3, 0.9) if rates == "traced" else walk(0.3, 0.9)
    for key, tensor in params.items():
        weight, velocity = np.asarray(tensor, np.float64), 0.0
        for step in range(steps):
            gradient = np.asarray(drawn[key][step], np.float64)
            expected, velocity = REFERENCES[name](
                config, 0.3 + slope * step, 0.9, weight=weight, gradient=gradient, velocity=velocity
            )
            assert found[key].dtype == dtype
            tiny = float(jnp.finfo(dtype).smallest_subnormal)
            atol = max(1e-6 * np.abs(expected).max(), tiny)  # of the sums in float32; some cancel
            rtol, update = float(jnp.finfo(dtype).eps), np.asarray(found[key][step], np.float64)
            np.testing.assert_allclose(update, expected, rtol=max(rtol, 1e-5), atol=atol, err_msg=key)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_build_optimizer_with_changing_rate_and_momentum_equals_float64_reference(name):
    """Rate and momentum are traced, as in a training step."""
    assert name in REFERENCES, f"add the update of {name} in float64 to REFERENCES"
    config, params = Optimizer(name=name, weight_decay=0.01), tree_of(np.random.default_rng(5))
    step = jax.jit(lambda rate, momentum, g, state, params: build_optimizer(config, rate, momentum).update(g, state, params))
    state = build_optimizer(config, 0.0, 0.0).init(params)
    weights = {key: np.asarray(tensor, np.float64) for key, tensor in params.items()}
    velocities = dict.fromkeys(params, 0.0)
    for number, (rate, momentum) in enumerate([(0.1, 0.9), (0.3, 0.95), (0.2, 0.5), (0.2, 0.99)]):
        gradients = {key: np.cos(tensor + number) for key, tensor in weights.items()}
        updates, state = step(rate, momentum, {key: jnp.asarray(g, jnp.float32) for key, g in gradients.items()}, state, params)
        params = optax.apply_updates(params, updates)
        for key, weight in weights.items():
            expected, velocities[key] = REFERENCES[name](
                config, rate, momentum, weight=weight, gradient=gradients[key], velocity=velocities[key]
            )
            np.testing.assert_allclose(updates[key], expected, rtol=1e-4, atol=1e-7, err_msg=key)
            weights[key] = weight + expected


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow if one != "adamw" else []) for one in OPTIMIZERS])
def test_interrupted_run_resumes_bitwise(name, tiny, tmp_path):
    config = dataclasses.replace(tiny, optimizer=dataclasses.replace(tiny.optimizer, name=name))
    train(config, tmp_path / "whole")
    train_until(config, tmp_path / "cut", step=9)
    train(config, tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


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


def test_sums_of_squares_by_rows_equal_float64():
    random = np.random.default_rng(0)
    shapes = [(3, 3, 64, 32), (7, 7, 3, 64), (2048,), (32, 96), (0, 4), ()]
    trees = (
        [jnp.asarray(random.normal(size=shape) * 1e3, jnp.bfloat16) for shape in shapes],
        {"again": jnp.full((64, 64), 1e10)},
    )
    for ours, tensor in zip(*map(jax.tree.leaves, (squares._sums_by_rows(trees), trees)), strict=True):
        assert ours.dtype == jnp.float32
        assert float(ours) == pytest.approx(np.square(np.asarray(tensor, np.float64)).sum(), rel=1e-6)
