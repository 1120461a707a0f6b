"""The ReLU of a sum of normalized tensors and a shortcut, which ends every part of a residual block.

Memory bandwidth bounds these passes on most devices, so both directions read and write activations as rarely as possible. The
forward pass takes one pass for the moments and one for the output. The backward pass takes one for two sums and one for the
gradients.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.models.batch_norm import REDUCTION_AXES, BatchNormTerm, Fusion
from jaxdp.models.batch_norm import sums as reduce_sums
from jaxdp.models.folded_batch_norm import FoldedTerm

Term = BatchNormTerm | FoldedTerm


def bn_relu(
    terms: tuple[Term, ...],
    shortcut: jax.Array | None = None,
    relu: Callable[[jax.Array], jax.Array] = lambda x: jnp.maximum(x, 0.0),
) -> jax.Array:
    """ReLU of the sum of normalized terms and an optional shortcut; differentiated by JAX. All [B, H, W, C]."""
    return relu(total_of(Fusion(), terms, shortcut)).astype(terms[0].dtype)


def total_of(fusion: Fusion, terms: tuple[Term, ...], shortcut: jax.Array | None) -> jax.Array:
    """The sum of terms and shortcut. Folded terms come last: each is a convolution that adds the sum of the previous terms."""
    total: jax.Array | float = 0.0 if shortcut is None else shortcut.astype(jnp.float32)
    for term in sorted(terms, key=lambda term: isinstance(term, FoldedTerm)):
        total = term.plus(total, fusion)
    return jnp.asarray(total)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_bn_relu(fusion: Fusion, terms: tuple[Term, ...], shortcut: jax.Array | None = None) -> jax.Array:
    """`bn_relu` for training, with a hand-written gradient.

    Each term's mean and var must be computed from its tensor over the batch and `fusion.axes`: the gradient includes the path
    through them, and their own gradient is zero. Pass them behind a `stop_gradient`.
    """
    return _forward(fusion, terms, shortcut)[0]


def _forward(fusion: Fusion, terms: tuple[Term, ...], shortcut: jax.Array | None) -> tuple[jax.Array, tuple]:
    if shortcut is None and [type(term) for term in terms] == [BatchNormTerm]:
        return bn_relu(terms), (terms, None, False)
    y = rectify(fusion, terms, total_of(fusion, terms, shortcut))
    return y, (terms, y, shortcut is not None)


def rectify(fusion: Fusion, terms: tuple[Term, ...], total: jax.Array) -> jax.Array:
    """The ReLU of the sum of these terms and others."""
    # Without a barrier, XLA recomputes y where the next shortcut is added, both where the third is added, and so on. Behind a
    # folded term it keeps the sum for the sign, and computes the ReLU in a separate pass. On CPUs XLA drops barriers before
    # fusion. There a square root is the barrier, because XLA considers it too expensive to duplicate.
    if fusion.convolution == "product":
        return relu_by_sqrt(total.astype(jnp.float32)).astype(terms[0].dtype)
    return lax.optimization_barrier(jnp.maximum(total, 0).astype(terms[0].dtype))


def relu_by_sqrt(x: jax.Array) -> jax.Array:
    """ReLU as sqrt(x max(x, 0)): exact for float32 x with a normal square, 1e-19 to 1e19 (Boldo, ENTCS 317, 2015)."""
    return jnp.sqrt(x * jnp.maximum(x, 0.0))


def _backward(fusion: Fusion, residuals: tuple, cotangent: jax.Array) -> tuple:
    terms, y, has_shortcut = residuals
    if y is None and fusion.accelerated:
        # XLA's GPU compiler would write a comparison to memory for the second pass. A product stays in the passes. If the
        # cotangent is not finite and the mask is 0, the product is NaN. A step with such a cotangent is never finite anyway.
        terms = (terms[0]._replace(x=lax.optimization_barrier(terms[0].x)),)
        masked = cotangent.astype(jnp.float32) * jnp.maximum(jnp.sign(terms[0].plus(0.0, fusion)), 0.0)
        total, *sums = reduce_sums(masked, masked * terms[0].x.astype(jnp.float32))
    else:
        if y is None:  # take the sign from x, in place of reading y
            masked = jnp.where(terms[0].plus(0.0, fusion) > 0, cotangent.astype(jnp.float32), 0.0)
        else:
            masked = jnp.where(y > 0, cotangent, 0)
        total = masked.astype(jnp.float32).sum(REDUCTION_AXES)
        sums = [term.sums(masked) for term in terms]
    if y is not None:  # write the masked cotangent once, with the sums; the gradients read it again
        masked, total, sums = lax.optimization_barrier((masked, total, sums))
    gradients = [term.gradient(fusion, masked, total=total, sums=part) for term, part in zip(terms, sums, strict=True)]
    return tuple(gradients), masked if has_shortcut else None


fused_bn_relu.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def centered_bn_relu(fusion: Fusion, term: BatchNormTerm) -> jax.Array:
    """`fused_bn_relu` of one term minus its `center_behind_relu`, which has no gradient; rounded once."""
    return _centered_forward(fusion, term)[0]


def _centered_forward(_: Fusion, term: BatchNormTerm) -> tuple[jax.Array, tuple]:
    y = bn_relu((term,), relu=lambda x: jnp.maximum(x, 0.0) - term.norm.center_behind_relu)
    return y, ((term,), None, False)


def _centered_backward(fusion: Fusion, residuals: tuple, cotangent: jax.Array) -> Term:
    return _backward(fusion, residuals, cotangent)[0]


centered_bn_relu.defvjp(_centered_forward, _centered_backward)


@jax.custom_vjp
def gradient_barrier(x: jax.Array) -> jax.Array:
    """x; XLA computes its gradient apart from what uses the gradient."""
    return x


gradient_barrier.defvjp(lambda x: (x, None), lambda _, cotangent: (lax.optimization_barrier(cotangent),))
