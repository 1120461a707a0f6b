"""Both implementations of convolution, average pooling, and BlurPool: its filter and its places."""

import re
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdp.config import BlurPool
from jaxdp.models import convolution
from jaxdp.models.convolution import average_pool, blur, convolve
from jaxdp.parallel.forward_dtypes import inner_jaxprs

FORMS = get_args(BlurPool)
SHAPES = [(1, 1), (2, 2), (3, 4), (1, 6), (8, 9)]


@partial(jax.jit, static_argnums=(3, 4))
def values_and_gradients(images, kernel, cotangents, stride, method):
    """For images of each shape: (value, gradients with respect to images and kernel under a cotangent)."""
    results = []
    for image, cotangent in zip(images, cotangents, strict=True):
        value, vjp_fn = jax.vjp(lambda x, k: convolve(x, k, stride, method=method), image, kernel)
        results.append((value, *vjp_fn(cotangent)))
    return results


# 5 and 7 features are fewer and more than the input channels: both forms of the weight gradient.
@pytest.mark.parametrize(("size", "features"), [(1, 5), (3, 5), (3, 7)])
@pytest.mark.parametrize("stride", [1, 2])
def test_forms_of_convolve_agree_in_value_and_gradients(size, stride, features):
    random = np.random.default_rng(0)
    images = [random.normal(size=(3, *shape, 6)).astype(np.float32) for shape in SHAPES]
    kernel = random.normal(size=(size, size, 6, features)).astype(np.float32)
    cotangents = [random.normal(size=(3, *(-(-n // stride) for n in shape), features)).astype(np.float32) for shape in SHAPES]
    direct, *others = (
        values_and_gradients(images, kernel, cotangents, stride, form) for form in ("direct", "product", "cudnn")
    )
    for other in others:
        for shape, expected, actual in zip(SHAPES, direct, other, strict=True):
            for a, b in zip(actual, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=str(shape))


def test_convolve_equals_scipy_in_float64():
    from scipy.signal import correlate

    random = np.random.default_rng(1)
    images, kernel = random.normal(size=(2, 4, 4, 3)), random.normal(size=(3, 3, 3, 2))
    expected = np.zeros((2, 4, 4, 2))
    for b in range(2):
        for f in range(2):
            for c in range(3):
                expected[b, :, :, f] += correlate(images[b, :, :, c], kernel[:, :, c, f], mode="same")
    for method in ("direct", "product", "cudnn"):
        ours = convolve(jnp.asarray(images, jnp.float32), jnp.asarray(kernel, jnp.float32), method=method)
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def jaxpr_equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from jaxpr_equations(inner)


def operands_of_products(function, *shapes):
    """The shapes of both operands of every matrix product of a function; [] if it computes a convolution."""
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    found = [[tuple(v.aval.shape) for v in e.invars] for e in jaxpr_equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert bool(found) != ("conv_general_dilated" in str(jaxpr))
    return found


# Kernel, side of an image, stride -> rows or columns of the kernel that reach a pixel; the direct form has no product.
@pytest.mark.parametrize(
    ("size", "shape", "stride", "taps"),
    [
        *((1, (9, 6), stride, (1, 1)) for stride in (1, 2)),
        (3, (1, 2), 1, (1, 3)),
        (3, (1, 2), 2, (1, 2)),
        (3, (3, 1), 2, (3, 1)),
        (3, (4, 4), 1, (3, 3)),
        (3, (8, 7), 2, (3, 3)),
        *((3, shape, 1, None) for shape in ((5, 1), (1, 5))),
        (3, (9, 8), 2, None),
        (5, (4, 4), 1, None),
    ],
)
def test_products_are_of_1x1_kernels_and_of_maps_of_up_to_4x4_without_taps_of_padding(size, shape, stride, taps):
    found = operands_of_products(partial(convolve, stride=stride, method="product"), (2, *shape, 6), (size, size, 6, 5))
    positions = 2 * np.prod([-(-n // stride) for n in shape])
    assert found == ([] if taps is None else [[(positions, 6 * np.prod(taps)), (6 * np.prod(taps), 5)]])


@pytest.mark.parametrize("features", [5, 6, 7])
def test_weight_gradient_of_a_product_has_the_smaller_matrix_on_the_left(features):
    def gradient(images, kernel, cotangent):
        return jax.vjp(partial(convolve, method="product"), images, kernel)[1](cotangent)[1]

    shapes = (2, 3, 4, 6), (1, 1, 6, features), (2, 3, 4, features)
    (_, (left, _)) = operands_of_products(gradient, *shapes)[-2:]
    assert left == (min(features, 6), 24)
    assert ("optimization_barrier" in str(jax.make_jaxpr(gradient)(*map(jnp.zeros, shapes)))) == (features < 6)


def test_convolve_by_platform_is_the_product_on_a_cpu_only():
    images, kernel = np.ones((2, 8, 8, 3), np.float32), np.ones((1, 1, 3, 4), np.float32)
    traced = jax.jit(partial(convolve, stride=2, method="by_platform")).trace(images, kernel)
    for platform, operation in {"cpu": "dot_general", "cuda": "convolution"}.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert [name for name in ("dot_general", "convolution") if f"stablehlo.{name}" in text] == [operation]
    np.testing.assert_array_equal(convolve(images, kernel, 2, method="by_platform"), convolve(images, kernel, 2))


def numpy_strided_7x7(images, kernel, cotangent):
    """(value, gradients of images and kernel) of the first convolution, tap by tap in float64."""
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), (3, 3), (3, 3), (0, 0)))
    value, of_padded, of_kernel = np.zeros(cotangent.shape), np.zeros(padded.shape), np.zeros(kernel.shape)
    for i, j in np.ndindex(7, 7):
        window = np.s_[:, i : i + height : 2, j : j + width : 2]
        value += padded[window] @ kernel[i, j]
        of_padded[window] += cotangent @ kernel[i, j].T
        of_kernel[i, j] = np.einsum("bhwc,bhwf->cf", padded[window], cotangent)
    return value, of_padded[:, 3:-3, 3:-3], of_kernel


@pytest.mark.parametrize("shape", [(2, 4), (12, 8), (32, 32), (9, 8), (8, 9), (7, 11)])  # by blocks if both are even
def test_first_convolution_and_its_gradients_are_those_of_lax_and_numpy_in_float64(shape):
    random = np.random.default_rng(3)
    images, kernel = random.normal(size=(2, *shape, 3)), random.normal(size=(7, 7, 3, 5))
    cotangent = random.normal(size=(2, *(-(-n // 2) for n in shape), 5))
    with jax.enable_x64():
        plain = partial(lax.conv_general_dilated, window_strides=(2, 2), padding=[(3, 3)] * 2)
        plain = partial(plain, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        found, expected = [], []
        for results, convolved in ((found, partial(convolve, stride=2, method="cudnn")), (expected, plain)):
            value, pull = jax.vjp(convolved, images, kernel)
            results += [value, *pull(jnp.asarray(cotangent))]
    for ours, of_lax, of_numpy in zip(found, expected, numpy_strided_7x7(images, kernel, cotangent), strict=True):
        assert ours.dtype == np.float64
        for reference in (of_lax, of_numpy):
            np.testing.assert_allclose(ours, reference, rtol=1e-13, atol=1e-13 * np.abs(of_numpy).max())


# Kernel, stride, method, height and width, platform -> whether 4x4 taps are convolved.
@pytest.mark.parametrize(
    ("kernel", "stride", "method", "sides", "platform", "blocks"),
    [
        *(((7, 7, 3, 8), 2, method, (8, 12), "cuda", True) for method in ("cudnn", "by_platform")),
        *(((7, 7, 3, 8), 2, "by_platform", (8, 12), platform, False) for platform in ("cpu", "tpu")),
        *(((7, 7, 3, 8), 2, method, (8, 12), "cuda", False) for method in ("direct", "product")),
        *(((7, 7, 3, 8), 2, "cudnn", sides, "cuda", False) for sides in ((9, 12), (8, 13), (9, 13))),
        ((7, 7, 3, 8), 1, "cudnn", (8, 12), "cuda", False),
        ((7, 7, 4, 8), 2, "cudnn", (8, 12), "cuda", False),
        *(((3, 3, 3, 8), stride, "cudnn", (8, 12), "cuda", False) for stride in (1, 2)),  # the small and the deep stem
    ],
)
def test_first_convolution_of_even_images_is_over_blocks_on_a_gpu(kernel, stride, method, sides, platform, blocks):
    shapes = (2, *sides, kernel[2]), kernel
    function = jax.jit(partial(convolve, stride=stride, method=method))
    traced = function.trace(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    [line] = re.findall(r"stablehlo.convolution.*", traced.lower(lowering_platforms=(platform,)).as_text())
    operands = [tuple(map(int, found.split("x"))) for found in re.findall(r"tensor<([\dx]+)xf32>", line)[:2]]
    expected = ((2, sides[0] // 2 + 1, sides[1] // 2 + 1, 16), (8, 4, 4, 16)) if blocks else shapes
    assert tuple(operands) == expected


@pytest.mark.parametrize("stride", [1, 2])
def test_blur_is_the_binomial_filter_of_every_channel(stride):
    images = np.random.default_rng(0).normal(size=(2, 5, 6, 3))
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))[:, ::stride, ::stride]
    expected = (windows * np.outer([1, 2, 1], [1, 2, 1]) / 16).sum((-1, -2))
    blurred = jax.jit(partial(blur, stride=stride))
    np.testing.assert_allclose(blurred(jnp.asarray(images, jnp.float32)), expected, rtol=0, atol=1e-6)
    half = jnp.asarray(images, jnp.bfloat16)  # rounds once
    np.testing.assert_array_equal(blurred(half), blurred(half.astype(jnp.float32)).astype(jnp.bfloat16))


@pytest.mark.parametrize("size", [(4, 6), (5, 7), (1, 2)], ids=str)
def test_average_pool_equals_that_of_torch(size):
    """At odd edges too."""
    torch = pytest.importorskip("torch")
    images = np.random.default_rng(0).normal(size=(2, 3, *size)).astype(np.float32)
    expected = torch.nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False)(torch.from_numpy(images)).numpy()
    found = average_pool(jnp.asarray(images.transpose(0, 2, 3, 1)))
    np.testing.assert_allclose(found, expected.transpose(0, 2, 3, 1), rtol=1e-6, atol=1e-7)
    half = jnp.asarray(images, jnp.bfloat16).transpose(0, 2, 3, 1)  # rounds once
    np.testing.assert_array_equal(average_pool(half), average_pool(half.astype(jnp.float32)).astype(jnp.bfloat16))


def test_blur_pool_is_placed_as_in_its_publications():
    """FFCV and Composer blur before strided convolutions of 16 channels or more, Composer also behind the maxima."""
    cases = [(1, 2), (15, 2), (16, 2), (64, 2), (64, 1)]
    blurred = {form: [case for case in cases if convolution.blurs_input(form, *case)] for form in FORMS}
    assert blurred == {form: [(16, 2), (64, 2)] * form.startswith("convolutions") for form in FORMS}
    assert convolution.BLURS_MAXIMA in FORMS


def test_form_follows_the_platform():
    names = ("cpu", "gpu", "tpu", convolution.EVERY_PLATFORM, None)  # None: this host's CPU
    assert [convolution.form_on(name) for name in names] == ["product", "cudnn", "xla", "by_platform", "product"]
