"""Precision of fused batch normalization and ReLU in 16 bits; test_folded_batch_norm.py has that in float32."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdp import models
from jaxdp.config import Model
from jaxdp.models import resnet
from jaxdp.models.batch_norm import BatchNormTerm, Fusion, Normalization, moments, moments_in_one_reduction
from jaxdp.models.bn_relu import bn_relu, fused_bn_relu, relu_by_sqrt
from jaxdp.models.resnet import TWO_BLOCKS

SHAPE = (16, 5, 5, 7)
CASES = {"one term": (1, False), "with a shortcut": (1, True), "two terms": (2, False)}


def random_case(count: int, shortcut: bool):
    """([(x, scale, bias), ...], shortcut or None, a cotangent), float64."""
    rng = np.random.default_rng(0)
    terms = [(rng.normal(2.0, 3.0, SHAPE), rng.uniform(0.5, 2, 7), rng.normal(size=7)) for _ in range(count)]
    return terms, rng.normal(size=SHAPE) if shortcut else None, rng.normal(size=SHAPE)


def flax_bn_relu(terms, shortcut):
    """The same with Flax's BatchNorm."""
    norm = nn.BatchNorm(use_running_average=False, epsilon=1e-5, dtype=jnp.float64, param_dtype=jnp.float64)
    total = 0 if shortcut is None else shortcut
    for x, scale, bias in terms:
        stats = {"mean": jnp.zeros(7), "var": jnp.ones(7)}
        total += norm.apply({"params": {"scale": scale, "bias": bias}, "batch_stats": stats}, x, mutable=["batch_stats"])[0]
    return jnp.maximum(total, 0)


def jaxdp_bn_relu(terms, shortcut, custom_vjp=True, convolution="direct"):
    def term(x, scale, bias):
        mean, square = moments(lax.stop_gradient(x) if custom_vjp else x)
        return BatchNormTerm(x, Normalization(scale, bias, mean, square - mean * mean))

    inputs = tuple(term(*arrays) for arrays in terms)
    return fused_bn_relu(Fusion((), convolution), inputs, shortcut) if custom_vjp else bn_relu(inputs, shortcut)


@pytest.mark.parametrize("form", [{}, {"convolution": "product"}, {"custom_vjp": False}], ids=["direct", "product", "autodiff"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_scale_and_bias_in_bfloat16_are_summed_in_float32(case, form):
    """Of inputs that are exact in bfloat16: far below its rounding of 2^-9, which one sum or one product in it would have."""
    terms, shortcut, cotangent = jax.tree.map(
        lambda leaf: np.asarray(leaf, jnp.bfloat16).astype(np.float64), random_case(*CASES[case])
    )
    with jax.enable_x64():
        wanted, _ = jax.jit(lambda *given: jax.vjp(flax_bn_relu, *given)[1](jnp.asarray(cotangent)))(terms, shortcut)

    def narrow(array):
        return jnp.asarray(array, jnp.bfloat16 if array.ndim > 1 else jnp.float32)

    terms, shortcut, cotangent = jax.tree.map(narrow, (terms, shortcut, cotangent))
    found, _ = jax.vjp(partial(jaxdp_bn_relu, **form), terms, shortcut)[1](cotangent)  # compiled, XLA may leave out a rounding
    for (_, *ours), (_, *expected) in zip(found, wanted, strict=True):
        for one, other in zip(ours, expected, strict=True):
            assert np.linalg.norm(one - np.asarray(other)) <= 1e-5 * np.linalg.norm(other)


def test_relu_by_sqrt_equals_relu_bitwise():
    rng = np.random.default_rng(0)
    values = np.concatenate([[0.0, np.nan], rng.choice([-1, 1], 10**6) * np.exp(rng.uniform(-43, 43, 10**6))])
    np.testing.assert_array_equal(jax.jit(relu_by_sqrt)(values.astype(np.float32)), np.maximum(values.astype(np.float32), 0))


@pytest.mark.parametrize("depth", [TWO_BLOCKS, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("direct_convolutions")
def test_model_gradient_equals_the_one_that_jax_derives(monkeypatch, depth):
    monkeypatch.setitem(resnet.BLOCKS, 50, (2, 1, 1, 1))
    images = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32, 32, 3)), jnp.float32)
    config = Model(depth=depth, width=8, classes=5)
    model = models.create(config)
    params, stats = jax.jit(lambda: model.init(jax.random.key(0), (32, 32, 3)))()
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: leaf + np.float32(0.1) * rng.normal(size=leaf.shape).astype(np.float32), params)

    def gradient(**options):
        model = models.create(config, **options)

        def loss(params):
            logits, moments = model.apply(params, stats, images, train=True)
            return jnp.sin(logits).sum(), moments

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    own, derived = gradient(), gradient(custom_vjp=False)
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(derived), strict=True):
        assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other) + 1e-6


def test_moments_in_one_reduction_equal_moments():
    x = jnp.asarray(np.random.default_rng(0).normal(2.0, 3.0, SHAPE), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    for found in (moments(x), moments_in_one_reduction(x)):
        np.testing.assert_allclose(found, (wide.mean((0, 1, 2)), (wide**2).mean((0, 1, 2))), rtol=1e-6)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_gradient_of_a_cotangent_that_is_not_finite_is_not_finite(value):
    """Also where the ReLU is zero, so that a step with an overflow is skipped."""
    (terms, _, cotangent) = random_case(1, False)
    terms, cotangent = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (terms, cotangent))
    y, vjp_fn = jax.vjp(partial(jaxdp_bn_relu, shortcut=None), terms)
    for positive in (True, False):
        place = tuple(np.argwhere(np.asarray(y > 0) == positive)[0])
        ((x_gradient, scale_gradient, _),) = vjp_fn(cotangent.at[place].set(value))[0]
        assert not np.isfinite(x_gradient[place])
        assert not np.isfinite(scale_gradient[place[-1]])
