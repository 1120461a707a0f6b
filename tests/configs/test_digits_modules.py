"""The recipes that train Flax modules on the digits. Whole runs, killed, resumed, exported and predicted from: notebook 05."""

import math
import runpy

import jax
import numpy as np

from jaxdp.recipes import find_config


def test_block_of_the_convnext_is_that_of_the_paper():
    """On one pixel, where a convolution sees only its center: layer norm, perceptron with the erf form of GELU, layer scale."""
    block = runpy.run_path(str(find_config("digits_convnext")))["Block"](4)
    x = np.linspace(-2, 2, 12).reshape(3, 1, 1, 4)
    shapes = jax.eval_shape(lambda: block.init(jax.random.key(0), x, train=False)["params"])
    params = jax.tree.map(lambda p: np.random.default_rng(p.size).normal(size=p.shape), shapes)
    convolution, expand, reduce = params["Conv_0"], params["Dense_0"], params["Dense_1"]
    y = x * convolution["kernel"][1, 1, 0] + convolution["bias"]
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
    y = y * params["LayerNorm_0"]["scale"] + params["LayerNorm_0"]["bias"]
    y = y @ expand["kernel"] + expand["bias"]
    y = y * (1 + np.vectorize(math.erf)(y / math.sqrt(2))) / 2
    expected = x + (y @ reduce["kernel"] + reduce["bias"]) * params["layer_scale"]
    found = jax.jit(lambda params, x: block.apply({"params": params}, x, train=False))(params, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
