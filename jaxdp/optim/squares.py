"""Sums of squares of whole tensors, however they are stored; optimizers scale gradients and updates by them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# Replaces each tensor of its trees by a float32 scalar, the sum of squares of the whole tensor.
SumOfSquares = Callable[..., tuple]


def local_sums_of_squares(*trees: Any) -> tuple:
    """The sums of squares of tensors that a device holds whole."""
    return jax.tree.map(lambda tensor: jnp.sum(jnp.square(tensor.astype(jnp.promote_types(tensor.dtype, jnp.float32)))), trees)


class SquaredNorms(NamedTuple):
    """Sums of squares of every tensor of a gradient and of the parameters, and the function that computed them.

    params: () for an optimizer that does not use them.
    """

    gradient: Any
    params: Any
    of: SumOfSquares

    @classmethod
    def compute(cls, gradient: Any, params: Any, of: SumOfSquares = local_sums_of_squares) -> "SquaredNorms":
        """The sums of two trees, in one call of `of`."""
        of_gradient, of_params = of(gradient, params)
        return cls(of_gradient, of_params, of)

    def scale_gradient(self, factor: jax.Array) -> "SquaredNorms":
        """The sums with the gradient times a factor."""
        return self._replace(gradient=jax.tree.map(lambda square: factor**2 * square, self.gradient))


def norm(squares: Any) -> jax.Array:
    """The norm of a tree of tensors from the sums of squares of each, or of one tensor."""
    return jnp.sqrt(optax.tree.sum(squares))
