"""Batch normalization folded into the 1x1 convolution before it, in training: the convolution's result is never written.

With S = mean(h h^T) and m = mean(h), x = h W has the mean m W and the variance diag(W^T (S - m m^T) W). Both are known before
x, so scale and shift go into the kernel and a bias. The gradient needs no x either: docs/performance.md derives it. Folding
pays where h has fewer channels than x: at the end of a bottleneck block, and in most downsampling shortcuts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.models.batch_norm import REDUCTION_AXES, Fusion, Normalization, mean_over
from jaxdp.models.convolution import convolve


class Projection(NamedTuple):
    """A 1x1 convolution that is not computed yet: of h + center with a kernel [K, C] float32.

    h: [B, H, W, K]; center: [K] float32, the same on all devices; None: 0. Batch normalization cancels what `center` adds to
    the result, so only the reported mean contains it. The smaller the mean of h, the smaller is the effect of rounding.
    """

    h: jax.Array
    kernel: jax.Array
    center: jax.Array | None = None

    def projected_center(self, kernel: jax.Array) -> jax.Array | float:
        """What `center` adds to the result with a kernel [K, C]: [C] float32, or 0."""
        return 0.0 if self.center is None else _matmul(self.center, kernel)

    @property
    def rounded_kernel(self) -> jax.Array:
        """The kernel rounded to the dtype of h, as float32."""
        info = jnp.finfo(self.h.dtype)
        return lax.reduce_precision(self.kernel, exponent_bits=info.nexp, mantissa_bits=info.nmant)


class InputMoments(NamedTuple):
    """Moments of h over the batch and the positions of this device, float32: mean [K], and covariance [K, K]."""

    mean: jax.Array
    covariance: jax.Array

    @classmethod
    def of(cls, h: jax.Array) -> "InputMoments":
        """The moments of h [B, H, W, K]."""
        count = h.size // h.shape[-1]
        mean = h.astype(jnp.float32).sum(REDUCTION_AXES) / count
        return cls(mean, _product_over_positions(h, h) / count - mean[:, None] * mean)

    def projected(self, kernel: jax.Array, axes: tuple[str, ...] = ()) -> tuple[jax.Array, jax.Array]:
        """Mean and mean square of each channel of h times a kernel [K, C], [C] float32 each; see `batch_norm.moments`."""
        mean = _matmul(self.mean, kernel)
        variance = jnp.maximum((kernel * _matmul(self.covariance, kernel)).sum(0), 0.0)
        return mean_over(axes, (mean, variance + mean * mean))


class FoldedTerm(NamedTuple):
    """The normalized result of a 1x1 convolution, which is never written. moments: of its input; norm: of the result."""

    projection: Projection
    moments: InputMoments
    norm: Normalization

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations."""
        return self.projection.h.dtype

    def plus(self, total: jax.Array | float, fusion: Fusion) -> jax.Array:
        """`total` plus the normalized tensor, [B, H, W, C] in the dtype of h, as one convolution with bias and addend."""
        h, kernel = self.projection.h, self.projection.rounded_kernel
        folded = (kernel * self.norm.factor).astype(h.dtype)
        # The rounding of the folded kernel moves the mean of this device's batch; the bias moves it back.
        bias = self.norm.bias - _matmul(self.moments.mean, folded.astype(jnp.float32))
        if fusion.axes:  # the mean of this device's batch differs from the mean of all
            bias += self.norm.factor * (_matmul(self.moments.mean, kernel) - self.norm.mean)
        # All in the dtype of h: XLA makes one cuDNN call of this form only. On CPUs products give float32, and so the bias is.
        result = _convolve(h, folded, fusion)
        return result + bias.astype(result.dtype) + jnp.asarray(total, result.dtype)

    def sums(self, masked: jax.Array) -> tuple[()]:
        """None: the gradient needs products of channels, which read the written cotangent."""
        return ()

    def gradient(self, fusion: Fusion, masked: jax.Array, *, total: jax.Array, sums: tuple[()]) -> "FoldedTerm":
        """The gradient with respect to this term; see `BatchNormTerm.gradient`."""
        h, kernel = self.projection.h, self.projection.rounded_kernel
        count = masked.size // masked.shape[-1]
        product = _product_over_positions(h, masked)
        norm, (factor, slope, constant) = self.norm.gradient(total, (product * kernel).sum(0), count=count, axes=fusion.axes)
        # The gradient with respect to the result x = h kernel is factor * masked + slope * x + constant. Its products with h
        # and the kernel are taken around the mean of x, `center` there without the masked part.
        mean = _matmul(self.moments.mean, kernel) if fusion.axes else self.norm.mean
        sloped, center = kernel * slope, slope * mean + constant
        centered = _matmul(self.moments.covariance, sloped) + self.moments.mean[:, None] * center

        # As in the forward pass, the bias moves the mean back that the rounding of the matrix moves.
        square = _matmul(sloped, kernel.T).astype(h.dtype)
        bias = _matmul(kernel, center) - _matmul(self.moments.mean, square.astype(jnp.float32))
        sloped_part = _convolve(h, square, fusion)
        masked_part = _convolve(masked, (kernel * factor).T.astype(h.dtype), fusion)
        h_gradient = (masked_part + (sloped_part + bias.astype(sloped_part.dtype))).astype(h.dtype)
        zeros = jax.tree.map(jnp.zeros_like, self.moments)
        no_center = jax.tree.map(jnp.zeros_like, self.projection.center)
        return FoldedTerm(Projection(h_gradient, product * factor + count * centered, no_center), zeros, norm)


def _convolve(images: jax.Array, matrix: jax.Array, fusion: Fusion) -> jax.Array:
    """The 1x1 convolution of [B, H, W, K] with [K, C], in the dtype of both; float32 if it is a product on a CPU."""
    if fusion.convolution == "product":
        rows = images.reshape(-1, images.shape[-1])
        precision = lax.Precision.HIGHEST if images.dtype == jnp.float32 else None
        product = jnp.matmul(rows, matrix, precision=precision, preferred_element_type=jnp.float32)
        return product.reshape(*images.shape[:-1], -1)
    return convolve(images, matrix[None, None])


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """A small product in float32, without TF32."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _product_over_positions(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum over batch and positions of a [B, H, W, K] times b [B, H, W, C]: [K, C] float32, without TF32."""
    return lax.dot_general(
        a.reshape(-1, a.shape[-1]),
        b.reshape(-1, b.shape[-1]),
        (((0,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
