"""Batch normalization (Ioffe & Szegedy, arXiv 1502.03167) of a tensor: moments of the batch, output and gradient.

`training/batch_statistics.py` combines the moments of all devices into the running statistics.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.errors import ConfigError

EPSILON = 1e-5
REDUCTION_AXES = (0, 1, 2)  # batch, height and width; not the channels


class OneValue(ConfigError):
    """A batch normalization has only one value of each channel: its result is the bias, whatever the value."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        super().__init__(
            "per_worker_batch",
            1,
            reason=f"{layer} has one value of each channel, and batch normalization needs two",
            hint="use a larger one or, on several devices, --model.norm synchronized",
        )


class Fusion(NamedTuple):
    """Static arguments of `fused_bn_relu`.

    axes: mesh axes over which the batch statistics are synchronized; convolution: see `jaxdp.models.convolution.convolve`.
    """

    axes: tuple[str, ...] = ()
    convolution: str = "direct"

    @property
    def on_accelerator(self) -> bool:
        """Whether XLA is known to compile for an accelerator."""
        return self.convolution in {"direct", "xla", "cudnn"}


class Normalization(NamedTuple):
    """The parameters of a batch normalization, and the statistics of the batch that it normalizes. All [C] float32."""

    scale: jax.Array
    bias: jax.Array
    mean: jax.Array
    var: jax.Array

    @property
    def inverse_std(self) -> jax.Array:
        """1 / sqrt(var + EPSILON)."""
        return lax.rsqrt(self.var + EPSILON)

    @property
    def factor(self) -> jax.Array:
        """The factor on x."""
        return self.scale * self.inverse_std

    @property
    def center_behind_relu(self) -> jax.Array:
        """[C] float32 near the mean of the ReLU of the normalized tensor.

        For a normal distribution the mean is 0 to 0.69 standard deviations of the ReLU above this value.
        """
        return lax.stop_gradient(jnp.maximum(self.bias, 0.0))

    def gradient(
        self, total: jax.Array, product: jax.Array, *, count: int, axes: tuple[str, ...]
    ) -> tuple["Normalization", tuple[jax.Array, jax.Array, jax.Array]]:
        """(gradient with respect to the parameters, (factor, slope, constant), [C] float32 each).

        total: the sum of the cotangent behind the ReLU; product: the sum of this cotangent times x. Both are [C] float32, over
        `count` positions of this device. axes: mesh axes over which the statistics are synchronized. The gradient of x,
        factor * masked + slope * x + constant, includes the path through mean and var; their gradients are zero.
        """
        scale_gradient = (product - self.mean * total) * self.inverse_std
        total_mean, scale_mean = mean_over(axes, (total / count, scale_gradient / count))
        slope = -self.factor * self.inverse_std * scale_mean
        zero = jnp.zeros_like(self.mean)
        constant = -(self.factor * total_mean + slope * self.mean)
        return Normalization(scale_gradient, total, zero, zero), (self.factor, slope, constant)


class BatchNormTerm(NamedTuple):
    """A tensor x [B, H, W, C] and its normalization."""

    x: jax.Array
    norm: Normalization

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations."""
        return self.x.dtype

    def plus(self, total: jax.Array | float, fusion: Fusion) -> jax.Array:
        """`total` plus the normalized tensor, [B, H, W, C] float32."""
        factor = self.norm.factor
        return self.x.astype(jnp.float32) * factor + (self.norm.bias - self.norm.mean * factor) + total

    def sums(self, masked: jax.Array) -> jax.Array:
        """The sum of `masked` [B, H, W, C] times x, [C] float32."""
        return (masked.astype(jnp.float32) * self.x.astype(jnp.float32)).sum(REDUCTION_AXES)

    def gradient(self, fusion: Fusion, masked: jax.Array, *, total: jax.Array, sums: jax.Array) -> "BatchNormTerm":
        """The gradient with respect to this term.

        masked: cotangent behind the ReLU, [B, H, W, C]; total: its sum, [C] float32; sums: see `sums`.
        """
        count = masked.size // masked.shape[-1]
        norm, (factor, slope, constant) = self.norm.gradient(total, sums, count=count, axes=fusion.axes)
        x_gradient = factor * masked.astype(jnp.float32) + slope * self.x.astype(jnp.float32) + constant
        return BatchNormTerm(x_gradient.astype(self.x.dtype), norm)


def moments(x: jax.Array, axes: tuple[str, ...] = ()) -> tuple[jax.Array, jax.Array]:
    """Mean and mean square of each channel, [C] float32 each, of x [B, H, W, C]; `axes` names mesh axes to average over too."""
    wide = x.astype(jnp.float32)
    return mean_over(axes, (wide.mean(REDUCTION_AXES), (wide * wide).mean(REDUCTION_AXES)))


def moments_in_one_reduction(x: jax.Array, axes: tuple[str, ...] = ()) -> tuple[jax.Array, jax.Array]:
    """`moments` with fewer kernels on a GPU, and on a CPU up to 500 times the rounding. JAX cannot differentiate it."""
    wide = x.astype(jnp.float32)
    count = wide.size // wide.shape[-1]
    total, square = sums(wide, wide * wide)
    return mean_over(axes, (total / count, square / count))


def sums(*values: jax.Array) -> list[jax.Array]:
    """Sums over batch and positions of float32 tensors [B, H, W, C], in one reduction: [C] each."""
    zeros = (jnp.float32(0),) * len(values)
    return lax.reduce(values, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], REDUCTION_AXES)


def mean_over(axes: tuple[str, ...], values: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The mean over mesh axes, marked as varying over them again, so its type is the same as without axes."""
    return lax.pcast(lax.pmean(values, axes), axes, to="varying") if axes else values
