"""Batch normalisation with ReLU and shortcut: value and gradient against Flax's own, differentiated by JAX in float64."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp import models
from jaxdp.config import Model
from jaxdp.models.normalization import Normalised, moments, relu_of_sum, root_of_square, trained_relu_of_sum
from jaxdp.parallel.mesh import AXES, make_mesh

SHAPE = (16, 5, 5, 7)
KINDS = {"alone": (1, False), "with a shortcut": (1, True), "two": (2, False)}


def made(count: int, shortcut: bool):
    """([(x, scale, bias), ...], shortcut or None, a cotangent), float64."""
    draw = np.random.default_rng(0)
    terms = [(draw.normal(2.0, 3.0, SHAPE), draw.uniform(0.5, 2, 7), draw.normal(size=7)) for _ in range(count)]
    return terms, draw.normal(size=SHAPE) if shortcut else None, draw.normal(size=SHAPE)


def flaxes(terms, shortcut):
    """The same by Flax's BatchNorm."""
    norm = nn.BatchNorm(use_running_average=False, epsilon=1e-5, dtype=jnp.float64, param_dtype=jnp.float64)
    total = 0 if shortcut is None else shortcut
    for x, scale, bias in terms:
        stats = {"mean": jnp.zeros(7), "var": jnp.ones(7)}
        total += norm.apply({"params": {"scale": scale, "bias": bias}, "batch_stats": stats}, x, mutable=["batch_stats"])[0]
    return jnp.maximum(total, 0)


def ours(terms, shortcut, axes=(), own=True, form="direct"):
    def normalised(x, scale, bias):
        mean, square = moments(lax.stop_gradient(x) if own else x, axes)
        return Normalised(x, scale, bias, mean, square - mean * mean)

    given = tuple(normalised(*term) for term in terms)
    return trained_relu_of_sum(axes, form, given, shortcut) if own else relu_of_sum(given, shortcut)


@pytest.mark.parametrize("form", ["direct", "product"])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_flax_in_float64(kind, form):
    terms, shortcut, cotangent = made(*KINDS[kind])
    with jax.enable_x64():
        expected, pull = jax.vjp(flaxes, terms, shortcut)
        wanted = jax.tree.map(np.asarray, pull(jnp.asarray(cotangent)))
    narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (terms, shortcut, cotangent))
    found, pull = jax.vjp(partial(ours, form=form), *narrow[:2])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(jax.tree.leaves(pull(narrow[2])), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


def test_relu_as_the_root_of_a_square_is_relu():
    draw = np.random.default_rng(0)
    values = np.concatenate([[0.0, np.nan], draw.choice([-1, 1], 10**6) * np.exp(draw.uniform(-43, 43, 10**6))])
    np.testing.assert_array_equal(jax.jit(root_of_square)(values.astype(np.float32)), np.maximum(values.astype(np.float32), 0))


@pytest.mark.parametrize("kind", KINDS)
def test_synchronised_over_devices_it_is_that_of_the_whole_batch(kind):
    terms, shortcut, cotangent = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), made(*KINDS[kind]))
    _, pull = jax.vjp(ours, terms, shortcut)
    wanted_terms, wanted_shortcut = pull(cotangent)
    mesh, rows, everywhere = make_mesh(2, 4), PartitionSpec(AXES), PartitionSpec()

    def on_each(images, weights, shortcut, cotangent):
        def value(images, weights, shortcut):
            return ours([(x, *pair) for x, pair in zip(images, weights, strict=True)], shortcut, AXES)

        _, pull = jax.vjp(value, images, lax.pcast(weights, AXES, to="varying"), shortcut)
        images, weights, shortcut = pull(cotangent)
        return images, lax.psum(weights, AXES), shortcut

    specs = (rows, everywhere, rows, rows)
    mapped = jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=(rows, everywhere, rows)))
    images, weights, found = mapped([term[0] for term in terms], [term[1:] for term in terms], shortcut, cotangent)
    for (x, *pair), one, two in zip(wanted_terms, images, weights, strict=True):
        for wanted, got in zip((x, *pair), (one, *two), strict=True):
            assert np.linalg.norm(got - wanted) <= 1e-5 * np.linalg.norm(wanted)
    if shortcut is not None:
        np.testing.assert_allclose(found, wanted_shortcut, rtol=1e-6)


@pytest.mark.parametrize("depth", [18, pytest.param(50, marks=pytest.mark.slow)])
def test_a_models_gradient_is_the_one_that_jax_derives(depth):
    images = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32, 32, 3)), jnp.float32)
    config = partial(Model, depth=depth, width=8, classes=5, convolution="direct")
    model = models.create(config())
    params, stats = jax.jit(lambda: model.init(jax.random.key(0), (32, 32, 3)))()
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: leaf + np.float32(0.1) * rng.normal(size=leaf.shape).astype(np.float32), params)

    def gradient(config):
        model = models.create(config)

        def loss(params):
            logits, moments = model.apply(params, stats, images, train=True)
            return jnp.sin(logits).sum(), moments

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    own, derived = gradient(config()), gradient(config(gradients="autodiff"))
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(derived), strict=True):
        assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other) + 1e-6
