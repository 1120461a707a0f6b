"""3x3 max pooling behind batch normalization and ReLU, as in the stem of a ResNet, with a hand-written gradient.

The gradient that JAX derives from pooling is slow on every backend. The forward pass here stores the place of each window's
maximum in a byte, and the value that was normalized there, so that the backward pass reads the large feature map only once.
"""

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.models.batch_norm import REDUCTION_AXES, BatchNormTerm, Fusion
from jaxdp.models.bn_relu import bn_relu

SIZE = 3
NOWHERE = 0  # place of a maximum of 0, where the ReLU has no gradient


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def bn_relu_max_pool(fusion: Fusion, stride: int, term: BatchNormTerm) -> jax.Array:
    """`max_pool` of `bn_relu` of a term [B, H, W, C]: [B, ceil(H / stride), ceil(W / stride), C].

    The gradient goes to the first maximum of a window. It includes the path through mean and var, see `fused_bn_relu`.
    """
    return _maxima(fusion, stride, term)[0]


def _place(row: Any, column: Any) -> Any:
    """A number from 1 to 9 for each entry of a window."""
    return 1 + SIZE * row + column


def _take(array: jax.Array, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
    """The given rows and columns. XLA's GPU compiler reads several channels at once, which it does not behind a padding."""
    return array.at[:, rows[:, None], columns].get(mode="promise_in_bounds")


def _maxima(fusion: Fusion, stride: int, term: BatchNormTerm) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The maximum of each window, x where the maximum is, and its place: [B, ceil(H / stride), ceil(W / stride), C] each."""
    on_cpu = fusion.convolution == "product"
    number = jnp.int32 if on_cpu else jnp.int8  # XLA's CPU compiler vectorizes operations on elements of one size only
    height, width = sizes = term.x.shape[1:3]
    padded = jnp.pad(term.x, ((0, 0), (1, 1), (1, 1), (0, 0)))  # for a CPU, where strided slices are faster
    best, winner, place = jnp.array(-jnp.inf, term.dtype), jnp.zeros((), term.dtype), number(NOWHERE)
    first_row, first_column = (stride * np.arange(-(-size // stride)) - 1 for size in sizes)
    for i, j in product(range(SIZE), repeat=2):
        # In place of an entry outside the map, the nearest one inside is taken, which is in the same window.
        rows, columns = np.clip(first_row + i, 0, height - 1), np.clip(first_column + j, 0, width - 1)
        here = _place((rows - first_row)[:, None], columns - first_column)[..., None].astype(number)
        if on_cpu:
            x = padded[:, i : i + height : stride, j : j + width : stride]
            entry = jnp.where(here == _place(i, j), bn_relu((term._replace(x=x),)), -jnp.inf)
        else:
            x = _take(term.x, rows, columns)
            entry = bn_relu((term._replace(x=x),))
        larger = entry > best
        winner, place = jnp.where(larger, x, winner), jnp.where(larger, here, place)
        best = jnp.maximum(best, entry)
    if on_cpu:  # the compiler considers a division too expensive to repeat it, and what is before it, in the backward pass
        return best, winner, lax.div(place, jnp.where(best > 0, number(1), number(16)))
    return best, winner, jnp.where(best > 0, place, number(NOWHERE))


def _forward(fusion: Fusion, stride: int, term: BatchNormTerm) -> tuple[jax.Array, tuple]:
    # Without a barrier, XLA's GPU compiler stores eight comparisons of each window in place of the place.
    best, winner, place = lax.optimization_barrier(_maxima(fusion, stride, term))
    return best, (term, winner, place)


def _backward(  # noqa: PLR0917 - custom_vjp passes arguments by position
    fusion: Fusion, stride: int, residuals: tuple, cotangent: jax.Array
) -> tuple[BatchNormTerm]:
    term, winner, place = residuals
    wide = cotangent.astype(jnp.float32)
    masked = jnp.where(place != NOWHERE, wide, 0.0)
    total, product_sum = (each.sum(REDUCTION_AXES) for each in (masked, masked * winner.astype(jnp.float32)))
    count = term.x.size // term.x.shape[-1]
    norm, (factor, slope, constant) = term.norm.gradient(total, product_sum, count=count, axes=fusion.axes)
    x_gradient = (
        factor * _unpool(wide, place, sizes=term.x.shape[1:3], stride=stride) + slope * term.x.astype(jnp.float32) + constant
    )
    return (BatchNormTerm(x_gradient.astype(term.x.dtype), norm),)


bn_relu_max_pool.defvjp(_forward, _backward)


def _unpool(cotangent: jax.Array, place: jax.Array, *, sizes: tuple[int, ...], stride: int) -> jax.Array:
    """The sum, at each position of a map of `sizes`, of the cotangents of the windows with their maximum there."""
    counts = place.shape[1:3]
    total: Any = 0.0
    for before in product(range(0, SIZE, stride), repeat=2):
        # Of the windows over a position, the one that begins `before` entries earlier than the last one.
        indices = [(np.arange(1, size + 1) - n) // stride for size, n in zip(sizes, before, strict=True)]
        rows, columns = (np.clip(index, 0, count - 1) for index, count in zip(indices, counts, strict=True))
        offsets = [np.arange(1, size + 1) - stride * index for size, index in zip(sizes, indices, strict=True)]
        over = ((rows == indices[0]) & (offsets[0] < SIZE))[:, None] & (columns == indices[1]) & (offsets[1] < SIZE)
        here = np.where(over, _place(offsets[0][:, None], offsets[1]), -1)[..., None].astype(place.dtype)
        total += jnp.where(_take(place, rows, columns) == here, _take(cotangent, rows, columns), 0.0)
    return total
