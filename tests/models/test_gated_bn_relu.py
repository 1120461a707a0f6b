"""The factor on a residual branch, compared with Flax's BatchNorm differentiated by JAX in float64."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.models.batch_norm import BatchNormTerm, Fusion, Normalization, moments
from jaxdp.models.gated_bn_relu import fused_gated_bn_relu, gated_bn_relu
from jaxdp.models.squeeze_excitation import mean_over_positions, squeeze
from jaxdp.parallel.mesh import AXES, make_mesh

SHAPE = (16, 5, 4, 8)
CASES = {"with a shortcut": (1, True), "two terms": (2, False)}


def random_case(count: int, shortcut: bool, *, of_channels: bool):
    """([(x, scale, bias), ...], gate, shortcut or None, a cotangent), float64. The gate is 0 for some images."""
    rng = np.random.default_rng(0)
    terms = [(rng.normal(2.0, 3.0, SHAPE), rng.uniform(0.5, 2, 8), rng.normal(size=8)) for _ in range(count)]
    gate = rng.uniform(0.2, 2, (16, 1, 1, 8 if of_channels else 1)) * (rng.random((16, 1, 1, 1)) < 0.7)
    return terms, gate, rng.normal(size=SHAPE) if shortcut else None, rng.normal(size=SHAPE)


def flax_norm(x, scale, bias):
    norm = nn.BatchNorm(use_running_average=False, epsilon=1e-5, dtype=jnp.float64, param_dtype=jnp.float64)
    stats = {"mean": jnp.zeros(8), "var": jnp.ones(8)}
    return norm.apply({"params": {"scale": scale, "bias": bias}, "batch_stats": stats}, x, mutable=["batch_stats"])[0]


def flax_gated(terms, gate, shortcut, squeezes=False):
    branch, *others = (flax_norm(*term) for term in terms)
    if squeezes:
        gate = gate * jax.nn.sigmoid(branch.mean((1, 2), keepdims=True))
    return jnp.maximum(gate * branch + sum(others) + (0 if shortcut is None else shortcut), 0)


def jaxdp_gated(terms, gate, shortcut, squeezes=False, fusion=Fusion(), custom_vjp=True):  # noqa: B008 - immutable
    def term(x, scale, bias):
        mean, square = moments(lax.stop_gradient(x) if custom_vjp else x, fusion.axes)
        return BatchNormTerm(x, Normalization(scale, bias, mean, square - mean * mean))

    inputs = tuple(term(*arrays) for arrays in terms)
    if squeezes:
        means = squeeze(fusion, inputs[0]) if custom_vjp else mean_over_positions(inputs[0])
        gate = gate * jax.nn.sigmoid(means)
    return fused_gated_bn_relu(fusion, inputs, gate, shortcut) if custom_vjp else gated_bn_relu(inputs, gate, shortcut)


@partial(jax.jit, static_argnums=0)
def value_and_gradient(function, arguments, cotangent):
    value, vjp_fn = jax.vjp(function, *arguments)
    return value, vjp_fn(cotangent)


def narrow(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def assert_equal(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(np.asarray(one, np.float64) - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"fusion": Fusion(convolution="product")},
        {"custom_vjp": False},
    ],
    ids=["direct", "product", "autodiff"],
)
@pytest.mark.parametrize("squeezes", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_match_flax_in_float64(case, squeezes, form):
    """A gate for each image, or for each image and channel, which also depends on the branch's mean."""
    *arguments, cotangent = random_case(*CASES[case], of_channels=squeezes)
    with jax.enable_x64():
        wanted = jax.tree.map(
            np.asarray, value_and_gradient(partial(flax_gated, squeezes=squeezes), tuple(arguments), jnp.asarray(cotangent))
        )
    found = value_and_gradient(partial(jaxdp_gated, squeezes=squeezes, **form), *narrow((tuple(arguments), cotangent)))
    assert_equal(found, wanted)


def test_synchronized_over_devices_equals_the_whole_batch():
    terms, gate, shortcut, cotangent = narrow(random_case(1, True, of_channels=True))
    wanted = value_and_gradient(partial(jaxdp_gated, squeezes=True), (terms, gate, shortcut), cotangent)[1]
    mesh, rows, everywhere = make_mesh(2, 4), PartitionSpec(AXES), PartitionSpec()

    def on_each(x, weights, gate, shortcut, cotangent):
        def value(x, weights, gate, shortcut):
            return jaxdp_gated([(x, *weights)], gate, shortcut, squeezes=True, fusion=Fusion(AXES))

        _, vjp_fn = jax.vjp(value, x, lax.pcast(weights, AXES, to="varying"), gate, shortcut)
        x, weights, gate, shortcut = vjp_fn(cotangent)
        return x, lax.psum(weights, AXES), gate, shortcut

    ((x, *weights),) = terms
    specs = (rows, everywhere, rows, rows)
    mapped = jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=(*specs, rows), out_specs=specs))
    x, weights, *others = mapped(x, tuple(weights), gate, shortcut, cotangent)
    assert_equal(([(x, *weights)], *others), wanted)
