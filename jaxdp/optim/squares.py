"""Sums of squares of whole tensors, however they are stored; optimizers scale gradients and updates by them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

# Replaces each tensor of its trees by a float32 scalar, the sum of squares of the whole tensor.
SumOfSquares = Callable[..., tuple]
ROWS = 1024  # of a large tensor, each summed by one block of a GPU


def local_sums_of_squares(*trees: Any) -> tuple:
    """The sums of squares of tensors that a device holds whole."""
    each = partial(jax.tree.map, _sum_of_squares)
    return lax.platform_dependent(trees, cuda=_sums_by_rows, rocm=_sums_by_rows, default=each)


def _sum_of_squares(tensor: jax.Array, axis: int | None = None) -> jax.Array:
    return jnp.sum(jnp.square(tensor.astype(jnp.promote_types(tensor.dtype, jnp.float32))), axis)


def _sums_by_rows(trees: Any) -> Any:
    """The sums where one kernel adds the rows of all large tensors, in place of one kernel for each tensor."""
    leaves, structure = jax.tree.flatten(trees)
    large = [index for index, leaf in enumerate(leaves) if leaf.ndim > 1 and leaf.size and leaf.size % ROWS == 0]
    sums = [None if index in large else _sum_of_squares(leaf) for index, leaf in enumerate(leaves)]
    if large:
        rows = jnp.stack([_sum_of_squares(leaves[index].reshape(ROWS, -1), axis=1) for index in large])  # [T, ROWS]
        for index, total in zip(large, jnp.sum(rows, axis=1), strict=True):
            sums[index] = total
    return jax.tree.unflatten(structure, sums)


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
