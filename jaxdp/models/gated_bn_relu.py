"""The ReLU of a residual block whose branch has a factor for each image: drop-path.

Like `bn_relu`, with sums over positions before sums over images: they give the gradient of the factor without a second pass.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.models.batch_norm import REDUCTION_AXES, Fusion
from jaxdp.models.bn_relu import Term, rectify, total_of

POSITIONS = (1, 2)


def gated_bn_relu(terms: tuple[Term, ...], gate: jax.Array, shortcut: jax.Array | None = None) -> jax.Array:
    """ReLU of gate times the first term, plus other terms and a shortcut; differentiated by JAX.

    The first term is a `BatchNormTerm`. gate: [B, 1, 1, 1] float32; all else [B, H, W, C].
    """
    return jnp.maximum(_total(Fusion(), terms, (gate, shortcut)), 0.0).astype(terms[0].dtype)


def _total(fusion: Fusion, terms: tuple[Term, ...], rest: tuple[jax.Array, jax.Array | None]) -> jax.Array:
    gate, shortcut = rest
    gated = gate * terms[0].plus(0.0, fusion)
    return total_of(fusion, terms[1:], gated if shortcut is None else gated + shortcut.astype(jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_gated_bn_relu(  # noqa: PLR0917 - custom_vjp takes arguments by position
    fusion: Fusion, terms: tuple[Term, ...], gate: jax.Array, shortcut: jax.Array | None = None
) -> jax.Array:
    """`gated_bn_relu` for training, with a hand-written gradient; see `jaxdp.models.bn_relu.fused_bn_relu`."""
    return _forward(fusion, terms, gate, shortcut)[0]


def _forward(  # noqa: PLR0917 - as above
    fusion: Fusion, terms: tuple[Term, ...], gate: jax.Array, shortcut: jax.Array | None
) -> tuple[jax.Array, tuple]:
    y = rectify(fusion, terms, _total(fusion, terms, (gate, shortcut)))
    return y, (terms, gate, y, shortcut is not None)


def _backward(fusion: Fusion, residuals: tuple, cotangent: jax.Array) -> tuple:
    terms, gate, y, has_shortcut = residuals
    branch, *others = terms
    masked = jnp.where(y > 0, cotangent, 0)
    wide = masked.astype(jnp.float32)
    totals = wide.sum(POSITIONS, keepdims=True)  # of each image: [B, 1, 1, C]
    products = (wide * branch.x.astype(jnp.float32)).sum(POSITIONS, keepdims=True)
    sums = [term.sums(masked) for term in others]
    masked, totals, products, sums = lax.optimization_barrier((masked, totals, products, sums))
    norm = branch.norm
    gate_gradient = norm.factor * products + (norm.bias - norm.mean * norm.factor) * totals
    branch_gradient = branch.gradient(
        fusion,
        gate * masked.astype(jnp.float32),
        total=(gate * totals).sum(REDUCTION_AXES),
        sums=(gate * products).sum(REDUCTION_AXES),
    )
    total = totals.sum(REDUCTION_AXES)
    gradients = [term.gradient(fusion, masked, total=total, sums=part) for term, part in zip(others, sums, strict=True)]
    return (branch_gradient, *gradients), gate_gradient.sum((1, 2, 3), keepdims=True), masked if has_shortcut else None


fused_gated_bn_relu.defvjp(_forward, _backward)
