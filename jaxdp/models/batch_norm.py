"""Batch normalization (Ioffe & Szegedy, arXiv 1502.03167) fused with the residual sum and the ReLU that follow it.

These passes are bound by memory bandwidth on most devices, so both directions read and write activations as rarely as possible:
the forward pass takes one pass for the moments and one for the output, the backward pass one for two sums and one for the
gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = 1e-5
REDUCTION_AXES = (0, 1, 2)  # batch, height and width; not the channels


class BatchNormTerm(NamedTuple):
    """A tensor with its batch normalization parameters and batch statistics.

    x: [B, H, W, C]; scale, bias, mean, var: [C] float32.
    """

    x: jax.Array
    scale: jax.Array
    bias: jax.Array
    mean: jax.Array
    var: jax.Array

    @property
    def inverse_std(self) -> jax.Array:
        """1 / sqrt(var + EPSILON), [C]."""
        return lax.rsqrt(self.var + EPSILON)

    def output(self) -> jax.Array:
        """The normalized tensor, [B, H, W, C] float32."""
        factor = self.scale * self.inverse_std
        return self.x.astype(jnp.float32) * factor + (self.bias - self.mean * factor)


def moments(x: jax.Array, axes: tuple[str, ...] = ()) -> tuple[jax.Array, jax.Array]:
    """Mean and mean square of each channel, [C] float32 each, of x [B, H, W, C]; `axes` names mesh axes to average over too."""
    wide = x.astype(jnp.float32)
    return _mean_over(axes, (wide.mean(REDUCTION_AXES), (wide * wide).mean(REDUCTION_AXES)))


def _mean_over(axes: tuple[str, ...], values: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The mean over mesh axes, marked as varying over them again so that its type is the same as without axes."""
    return lax.pcast(lax.pmean(values, axes), axes, to="varying") if axes else values


def bn_relu(
    terms: tuple[BatchNormTerm, ...],
    shortcut: jax.Array | None = None,
    relu: Callable[[jax.Array], jax.Array] = lambda x: jnp.maximum(x, 0.0),
) -> jax.Array:
    """ReLU of the sum of normalized terms and an optional shortcut; differentiated by JAX. All [B, H, W, C]."""
    total: Any = sum(term.output() for term in terms)
    if shortcut is not None:
        total += shortcut.astype(jnp.float32)
    return relu(total).astype(terms[0].x.dtype)


class Fusion(NamedTuple):
    """Static arguments of `fused_bn_relu`.

    axes: mesh axes over which the batch statistics are synchronized; convolution: "product" if XLA compiles for a CPU.
    """

    axes: tuple[str, ...] = ()
    convolution: str = "direct"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_bn_relu(fusion: Fusion, terms: tuple[BatchNormTerm, ...], shortcut: jax.Array | None = None) -> jax.Array:
    """`bn_relu` for training, with a hand-written gradient.

    Each term's mean and var must be those of its x over the batch and `fusion.axes`: the gradient with respect to x includes
    the path through them, and their own gradient is zero. Pass them behind a `stop_gradient`.
    """
    return bn_relu(terms, shortcut)


def _forward(fusion: Fusion, terms: tuple[BatchNormTerm, ...], shortcut: jax.Array | None) -> tuple[jax.Array, tuple]:
    if len(terms) == 1 and shortcut is None:
        return bn_relu(terms), (terms, None, False)
    # Without a barrier, XLA recomputes y where the next shortcut is added, both where the third is added, and so on. On CPUs
    # XLA drops barriers before fusion; there a square root does it, because XLA considers it too expensive to duplicate.
    if fusion.convolution == "product":
        y = bn_relu(terms, shortcut, relu_by_sqrt)
    else:
        y = lax.optimization_barrier(bn_relu(terms, shortcut))
    return y, (terms, y, shortcut is not None)


def relu_by_sqrt(x: jax.Array) -> jax.Array:
    """ReLU as sqrt(x max(x, 0)): exact for float32 x with a normal square, 1e-19 to 1e19 (Boldo, ENTCS 317, 2015)."""
    return jnp.sqrt(x * jnp.maximum(x, 0.0))


def _backward(fusion: Fusion, residuals: tuple, cotangent: jax.Array) -> tuple:
    terms, y, has_shortcut = residuals
    if y is None:  # recompute the sign from x instead of reading y
        masked = jnp.where(terms[0].output() > 0, cotangent.astype(jnp.float32), 0.0)
    else:
        masked = jnp.where(y > 0, cotangent, 0)
    wide = masked.astype(jnp.float32)
    total = wide.sum(REDUCTION_AXES)
    products = [(wide * term.x.astype(jnp.float32)).sum(REDUCTION_AXES) for term in terms]
    if y is not None:  # write the masked cotangent once, with the sums; the gradients read it again
        masked, total, products = lax.optimization_barrier((masked, total, products))
    gradients = [
        _term_gradient(term, masked, total=total, product=product, axes=fusion.axes)
        for term, product in zip(terms, products, strict=True)
    ]
    return tuple(gradients), masked if has_shortcut else None


def _term_gradient(
    term: BatchNormTerm, masked: jax.Array, *, total: jax.Array, product: jax.Array, axes: tuple[str, ...]
) -> BatchNormTerm:
    """The gradient with respect to a term.

    masked: cotangent behind the ReLU, [B, H, W, C]; total: its sum, product: the sum of it times x, [C] float32.
    """
    wide, inverse_std = term.x.astype(jnp.float32), term.inverse_std
    scale_gradient = (product - term.mean * total) * inverse_std
    count = wide.size // wide.shape[-1]
    means = _mean_over(axes, (total / count, scale_gradient / count))
    factor = term.scale * inverse_std
    slope = -factor * inverse_std * means[1]
    x_gradient = factor * masked.astype(jnp.float32) + slope * wide - (factor * means[0] + slope * term.mean)
    zero = jnp.zeros_like(term.mean)
    return BatchNormTerm(x_gradient.astype(term.x.dtype), scale_gradient, total, zero, zero)


fused_bn_relu.defvjp(_forward, _backward)
