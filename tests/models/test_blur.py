"""BlurPool's filter and the maxima of stride 1 before it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.models.blur import blur
from jaxdp.models.convolution import max_pool


@pytest.mark.parametrize("padding", ["constant", "reflect"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", [(2, 5, 6, 3), (1, 2, 2, 1)])
def test_blur_is_the_binomial_filter_of_every_channel(shape, stride, padding):
    images = np.random.default_rng(0).normal(size=shape)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), padding)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))[:, ::stride, ::stride]
    expected = (windows * np.outer([1, 2, 1], [1, 2, 1]) / 16).sum((-1, -2))
    ours = jax.jit(partial(blur, stride=stride, padding=padding))(jnp.asarray(images, jnp.float32))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)


def test_blur_of_bfloat16_rounds_once():
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 6, 3)), jnp.bfloat16)
    rounded = jax.jit(lambda images: (blur(images), blur(images.astype(jnp.float32)).astype(jnp.bfloat16)))(images)
    np.testing.assert_array_equal(*rounded)


def test_maxima_of_stride_1_and_their_gradient_equal_those_of_jax():
    """Few distinct values: many maxima are tied."""
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 5, (2, 6, 7, 3)), jnp.float32)
    cotangent = jnp.asarray(rng.normal(size=images.shape), jnp.float32)

    @partial(jax.jit, static_argnums=0)
    def value_and_gradient(custom_vjp, images):
        value, vjp_fn = jax.vjp(lambda x: max_pool(x, 1, custom_vjp=custom_vjp), images)
        return value, vjp_fn(cotangent)[0]

    (own, own_gradient), (derived, derived_gradient) = (value_and_gradient(custom, images) for custom in (True, False))
    np.testing.assert_array_equal(own, derived)
    np.testing.assert_allclose(own_gradient, derived_gradient, rtol=0, atol=1e-6)
