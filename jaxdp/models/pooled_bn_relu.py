"""Batch normalization, ReLU and max pooling of the ResNet stem, whose gradient takes its sums over the pooled map.

The cotangent of the normalized tensor is zero except at the maxima. The forward pass keeps the tensor's value at each maximum,
so that both sums of the gradient read maps of a quarter of the size, and one pass over the large map writes the gradient.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.models.batch_norm import BatchNormTerm, Fusion, sums
from jaxdp.models.bn_relu import bn_relu
from jaxdp.models.convolution import at_maxima, max_and_index


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def pooled_bn_relu(fusion: Fusion, term: BatchNormTerm) -> jax.Array:
    """`max_pool` of `fused_bn_relu` of one term: [B, H, W, C] to [B, ceil(H / 2), ceil(W / 2), C]."""
    return _forward(fusion, term)[0]


def _forward(fusion: Fusion, term: BatchNormTerm) -> tuple[jax.Array, tuple]:
    # Without a barrier, XLA finds x at the maxima again in the backward pass.
    y, index, x = lax.optimization_barrier(max_and_index(bn_relu((term,)), term.x))
    return y, (term, index, x)


def _backward(fusion: Fusion, residuals: tuple, cotangent: jax.Array) -> tuple[BatchNormTerm]:
    term, index, x = residuals
    masked = jnp.where(term._replace(x=x).plus(0.0, fusion) > 0, cotangent.astype(jnp.float32), 0.0)
    total, product = sums(masked, masked * x.astype(jnp.float32))
    count = term.x.size // term.x.shape[-1]
    norm, (factor, slope, constant) = term.norm.gradient(total, product, count=count, axes=fusion.axes)
    masked = lax.optimization_barrier(masked.astype(cotangent.dtype))
    scattered = at_maxima(index, masked, term.x.shape[1:3]).astype(jnp.float32)
    x_gradient = factor * scattered + slope * term.x.astype(jnp.float32) + constant
    return (BatchNormTerm(x_gradient.astype(term.x.dtype), norm),)


pooled_bn_relu.defvjp(_forward, _backward)
