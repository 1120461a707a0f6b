"""Batch normalisation (Ioffe & Szegedy, arXiv 1502.03167) with what follows it: the sum with the shortcut, and ReLU.

On most devices these passes take the time that it takes to move the activations, so both directions are written to move them as
seldom as can be: forward one pass for the moments and one for the rest; backward one for two sums and one for the gradients.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = 1e-5
PLACES = (0, 1, 2)  # all but the channels


class Normalised(NamedTuple):
    """A tensor [B, H, W, C] that is to be normalised: scale, bias, mean and var (the variance) are float32, [C]."""

    x: jax.Array
    scale: jax.Array
    bias: jax.Array
    mean: jax.Array
    var: jax.Array

    @property
    def inverse(self):
        """One over the standard deviation."""
        return lax.rsqrt(self.var + EPSILON)

    def value(self):
        """The normalised tensor, in float32."""
        factor = self.scale * self.inverse
        return self.x.astype(jnp.float32) * factor + (self.bias - self.mean * factor)


def moments(x, axes: tuple[str, ...] = ()):
    """Mean and squared mean by channel, float32 [C]; over the devices of mesh axes as well."""
    wide = x.astype(jnp.float32)
    return _mean_over(axes, (wide.mean(PLACES), (wide * wide).mean(PLACES)))


def _mean_over(axes, values):
    """The mean over the devices of mesh axes; marked as each device's own again, so that it is treated as without axes."""
    return lax.pcast(lax.pmean(values, axes), axes, to="varying") if axes else values


def relu_of_sum(terms, shortcut=None, relu=lambda x: jnp.maximum(x, 0.0)):
    """ReLU of the sum of normalised tensors and, if there is one, a plain one; differentiated as it stands."""
    total = sum(term.value() for term in terms)
    if shortcut is not None:
        total += shortcut.astype(jnp.float32)
    return relu(total).astype(terms[0].x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def trained_relu_of_sum(axes, form, terms, shortcut=None):
    """`relu_of_sum` in training, with a gradient of its own; mean and var are those of x over the batch and `axes`.

    form: of the convolutions, `product` where XLA is to compile for a CPU (see `jaxdp.models.convolution`).
    The gradient for x is the whole one, which goes through mean and var too; for these themselves it is zero, so that they are
    to be given behind a `stop_gradient`.
    """
    return relu_of_sum(terms, shortcut)


def _forward(axes, form, terms, shortcut):
    if len(terms) == 1 and shortcut is None:
        return relu_of_sum(terms), (terms, None, False)
    # XLA would compute y once more where the next shortcut is added, both once more where the third is, and so on. A barrier
    # prevents it; on a CPU, where XLA drops barriers before it fuses, a root does: XLA takes it for too costly to be computed
    # twice.
    if form == "product":
        y = relu_of_sum(terms, shortcut, root_of_square)
    else:
        y = lax.optimization_barrier(relu_of_sum(terms, shortcut))
    return y, (terms, y, shortcut is not None)


def root_of_square(x):
    """ReLU of float32 x, without error (Boldo, ENTCS 317, 2015) where its square is a normal number, from 1e-19 to 1e19."""
    return jnp.sqrt(x * jnp.maximum(x, 0.0))


def _backward(axes, form, saved, gradient):
    terms, y, has_shortcut = saved
    if y is None:  # the sign is known from x, so that y need not be read
        passed = jnp.where(terms[0].value() > 0, gradient.astype(jnp.float32), 0.0)
    else:
        passed = jnp.where(y > 0, gradient, 0)
    wide = passed.astype(jnp.float32)
    total = wide.sum(PLACES)
    products = [(wide * term.x.astype(jnp.float32)).sum(PLACES) for term in terms]
    if y is not None:  # written once, with the sums, and read again for the gradients
        passed, total, products = lax.optimization_barrier((passed, total, products))
    found = [_for_term(axes, term, passed, total, product) for term, product in zip(terms, products, strict=True)]
    return tuple(found), passed if has_shortcut else None


def _for_term(axes, term: Normalised, passed, total, product) -> Normalised:
    """The gradient for one term: passed is what comes through the ReLU, total its sum, product that of it times x."""
    wide, inverse = term.x.astype(jnp.float32), term.inverse
    for_scale = (product - term.mean * total) * inverse
    count = wide.size // wide.shape[-1]
    means = _mean_over(axes, (total / count, for_scale / count))
    factor = term.scale * inverse
    slope = -factor * inverse * means[1]
    for_x = factor * passed.astype(jnp.float32) + slope * wide - (factor * means[0] + slope * term.mean)
    none = jnp.zeros_like(term.mean)
    return Normalised(for_x.astype(term.x.dtype), for_scale, total, none, none)


trained_relu_of_sum.defvjp(_forward, _backward)
