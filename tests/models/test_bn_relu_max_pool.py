"""Max pooling behind batch normalization and ReLU, against Flax's normalization and NumPy's first maximum in float64."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.models.batch_norm import BatchNormTerm, Fusion, Normalization, moments
from jaxdp.models.bn_relu_max_pool import bn_relu_max_pool
from jaxdp.parallel.mesh import AXES, make_mesh

SCALE, BIAS = np.array([1.5, -0.75, 0.0, 0.0, 1.0]), np.array([0.25, 0.5, 0.5, -0.5, -9.0])  # the last channel is 0 everywhere


def case(shape, stride, ties=False):
    """x and a cotangent, float64; with ties, x has 9 values."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (16, *shape, 5)).astype(float) if ties else rng.normal(1.0, 2.0, (16, *shape, 5))
    return x, rng.normal(size=(16, *(-(-size // stride) for size in shape), 5))


def reference(x, scale, bias, *, stride):
    norm = nn.BatchNorm(use_running_average=False, epsilon=1e-5, dtype=jnp.float64, param_dtype=jnp.float64)
    stats = {"mean": jnp.zeros(5), "var": jnp.ones(5)}
    y = nn.relu(norm.apply({"params": {"scale": scale, "bias": bias}, "batch_stats": stats}, x, mutable=["batch_stats"])[0])
    b, h, w, c = np.ogrid[tuple(map(slice, y.shape))]
    # The normalized values, rounded to 12 digits, so that equal x have equal values.
    known = np.pad(np.round(lax.stop_gradient(y), 12), ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(known, (3, 3), (1, 2))[:, ::stride, ::stride]
    first = windows.reshape(*windows.shape[:4], 9).argmax(-1)
    h, w = (stride * grid[:, : windows.shape[n + 1]][:, :, : windows.shape[2]] for n, grid in enumerate((h, w)))
    return y[b, h + first // 3 - 1, w + first % 3 - 1, c]


def pooled(x, scale, bias, *, stride, fusion):
    mean, square = moments(lax.stop_gradient(x), fusion.axes)
    return bn_relu_max_pool(fusion, stride, BatchNormTerm(x, Normalization(scale, bias, mean, square - mean * mean)))


def in_float64(x, cotangent, stride):
    with jax.enable_x64():
        value, vjp_fn = jax.vjp(partial(reference, stride=stride), *map(jnp.asarray, (x, SCALE, BIAS)))
        return jax.tree.map(np.asarray, (value, *vjp_fn(jnp.asarray(cotangent))))


def in_dtype(dtype, x, cotangent, stride, convolution):
    @jax.jit
    def run(x, scale, bias, cotangent):
        value, vjp_fn = jax.vjp(partial(pooled, stride=stride, fusion=Fusion((), convolution)), x, scale, bias)
        return value, *vjp_fn(cotangent)

    return run(
        jnp.asarray(x, dtype), *(jnp.asarray(each, jnp.float32) for each in (SCALE, BIAS)), jnp.asarray(cotangent, dtype)
    )


def error(found, wanted):
    return np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("shape", "stride", "ties"),
    [((6, 8), 2, False), ((6, 8), 2, True), ((5, 7), 2, True), ((5, 7), 1, True), ((1, 2), 2, False)],
    ids=str,
)
def test_gradient_goes_to_the_first_maximum_of_a_window(shape, stride, ties):
    """With positive, negative and zero scales; without one where the maximum is 0."""
    x, cotangent = case(shape, stride, ties)
    wanted = in_float64(x, cotangent, stride)
    for convolution in ("direct", "product"):
        found = in_dtype(jnp.float32, x, cotangent, stride, convolution)
        assert max(map(error, found, wanted)) <= 1e-5, convolution


@pytest.mark.parametrize("convolution", ["direct", "product"])
def test_sums_in_bfloat16_are_of_x_and_in_float32(convolution):
    """The gradients of scale and bias are far below the rounding of bfloat16, which the normalized maximum would have."""
    x, cotangent = case((6, 8), 2, ties=True)
    cotangent = np.asarray(jnp.asarray(cotangent, jnp.bfloat16), np.float64)
    _, x_gradient, *found = in_dtype(jnp.bfloat16, x, cotangent, 2, convolution)
    _, x_wanted, *wanted = in_float64(x, cotangent, 2)
    assert error(x_gradient, x_wanted) <= 2**-8
    assert max(map(error, found, wanted)) <= 1e-5


def test_synchronized_over_devices_equals_the_whole_batch():
    x, cotangent = case((6, 8), 2)

    def on_each(x, cotangent):
        scale, bias = (lax.pcast(jnp.asarray(each, jnp.float32), AXES, to="varying") for each in (SCALE, BIAS))
        value, vjp_fn = jax.vjp(partial(pooled, stride=2, fusion=Fusion(AXES)), x, scale, bias)
        x_gradient, *gradients = vjp_fn(cotangent)
        return value, x_gradient, *lax.psum(gradients, AXES)

    rows, everywhere = PartitionSpec(AXES), PartitionSpec()
    mapped = jax.shard_map(on_each, mesh=make_mesh(2, 4), in_specs=rows, out_specs=(rows, rows, everywhere, everywhere))
    found = jax.jit(mapped)(*(jnp.asarray(each, jnp.float32) for each in (x, cotangent)))
    assert max(map(error, found, in_float64(x, cotangent, 2))) <= 1e-5


def test_backward_pass_keeps_x_and_of_each_window_a_value_and_a_byte():
    x, cotangent = (jnp.zeros(each.shape, jnp.bfloat16) for each in case((6, 8), 2))
    kept = jax.eval_shape(lambda x: jax.vjp(partial(pooled, scale=SCALE, bias=BIAS, stride=2, fusion=Fusion()), x)[1], x)
    maps = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept) if leaf.ndim == 4)
    assert maps == 2 * x.size + (2 + 1) * cotangent.size


def test_nan_is_the_maximum_of_its_windows():
    x, _ = case((6, 8), 2)
    x[3, 2, 5, 1] = np.nan
    value = bn_relu_max_pool(
        Fusion(), 2, BatchNormTerm(jnp.asarray(x), Normalization(*map(jnp.asarray, (SCALE, BIAS, BIAS, SCALE**2))))
    )
    assert np.argwhere(np.isnan(value)).tolist() == [[3, 1, 2, 1], [3, 1, 3, 1]]
