"""Squeeze-and-excitation (Hu et al., arXiv 1709.01507): a factor for each image and channel of a normalized tensor.

The mean over positions passes two dense layers; the sigmoid of their result is the factor. Sizes and names are timm's
`seresnet50`: 1/16 of the channels, in whole eighths, and biases.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.models.batch_norm import REDUCTION_AXES, BatchNormTerm, Fusion

POSITIONS = (1, 2)


def mean_over_positions(term: BatchNormTerm) -> jax.Array:
    """The normalized tensor's mean over positions, [B, 1, 1, C] float32; differentiated by JAX."""
    means = term.x.astype(jnp.float32).mean(POSITIONS, keepdims=True)
    return term._replace(x=means).plus(0.0, Fusion())


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def squeeze(fusion: Fusion, term: BatchNormTerm) -> jax.Array:
    """`mean_over_positions` for training, with a hand-written gradient; see `jaxdp.models.bn_relu.fused_bn_relu`."""
    return mean_over_positions(term)


def _forward(fusion: Fusion, term: BatchNormTerm) -> tuple[jax.Array, tuple]:
    means = term.x.astype(jnp.float32).mean(POSITIONS, keepdims=True)
    return term._replace(x=means).plus(0.0, fusion), (term, means)


def _backward(fusion: Fusion, residuals: tuple, cotangent: jax.Array) -> tuple[BatchNormTerm]:
    term, means = residuals
    shape = term.x.shape
    everywhere = jnp.broadcast_to(cotangent / (shape[1] * shape[2]), shape)
    total, product = cotangent.sum(REDUCTION_AXES), (cotangent * means).sum(REDUCTION_AXES)
    return (term.gradient(fusion, everywhere, total=total, sums=product),)


squeeze.defvjp(_forward, _backward)


class Dense(nn.Module):
    """A dense layer with a bias, of [B, 1, 1, C] float32. timm has a 1x1 convolution: the kernel is [1, 1, C, features]."""

    features: int
    std: nn.initializers.Initializer
    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.std, (1, 1, x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        product = jnp.dot(x.astype(self.dtype), kernel[0, 0].astype(self.dtype), preferred_element_type=jnp.float32)
        return product + bias


class Excitation(nn.Module):
    """The factor [B, 1, 1, C] float32 of means over positions [B, 1, 1, C]. std: of kernels; dtype: of products."""

    std: nn.initializers.Initializer
    dtype: jax.typing.DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, means: jax.Array) -> jax.Array:
        channels = means.shape[-1]
        reduced = max(8, (channels // 16 + 4) // 8 * 8)  # a sixteenth, rounded half up to a multiple of 8
        hidden = jnp.maximum(Dense(reduced, self.std, self.dtype, name="fc1")(means), 0.0)
        return jax.nn.sigmoid(Dense(channels, self.std, self.dtype, name="fc2")(hidden))
