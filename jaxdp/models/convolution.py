"""Convolution and max pooling, each in two forms that compute the same numbers.

A convolution is `direct`, one `conv_general_dilated`, as every accelerator wants it, or a `product`: XLA's CPU backend is slow
at 1x1 kernels and maps of a few pixels, which there are written as matrix products. `model.convolution` is the switch.
The gradient of max pooling that JAX derives is slow everywhere; ours notes which entry of a window was the largest, in a byte.
`model.gradients` is the switch.
"""

import jax
import jax.numpy as jnp
from jax import lax

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
SMALL_MAP = 4


def convolve(images, kernel, stride: int = 1, form: str = "direct"):
    """Cross-correlate with zero padding of half the kernel on every side.

    images: [B, H, W, C]; kernel: [K, K, C, F], K odd; returns [B, ceil(H / stride), ceil(W / stride), F].
    """
    size = kernel.shape[0]
    if form == "product":
        if size == 1:
            return _product(images[:, ::stride, ::stride, :], kernel[0, 0])
        height, width = (-(-n // stride) for n in images.shape[1:3])
        if max(height, width) <= SMALL_MAP and size == 3:
            return _small_map(images, kernel, stride, height, width)
    pad = size // 2
    return lax.conv_general_dilated(images, kernel, (stride, stride), [(pad, pad), (pad, pad)], dimension_numbers=DIMENSIONS)


def _product(images, matrix):
    """[B, H, W, C] times [C, F] as one two-dimensional product."""
    return _matmul(images.reshape(-1, images.shape[-1]), matrix).reshape(*images.shape[:-1], matrix.shape[-1])


@jax.custom_vjp
def _matmul(rows, matrix):
    return rows @ matrix


def _matmul_backward(saved, gradient):
    """Of the two products that give the weights' gradient, transposed or not, the one with the smaller matrix on the left."""
    rows, matrix = saved
    if matrix.shape[0] <= matrix.shape[1]:
        return gradient @ matrix.T, rows.T @ gradient
    return gradient @ matrix.T, lax.optimization_barrier(gradient.T @ rows).T  # or XLA would turn it round again


_matmul.defvjp(lambda rows, matrix: (rows @ matrix, (rows, matrix)), _matmul_backward)


def _taps(size: int, stride: int, out: int, inside: int):
    """The kernel rows that touch at least one of `inside` real rows from `out` outputs."""
    pad = size // 2
    return [k for k in range(size) if any(0 <= o * stride + k - pad < inside for o in range(out))]


def _small_map(images, kernel, stride: int, height: int, width: int):
    """Patches times kernel, leaving out the taps that only ever see padding."""
    size, pad = kernel.shape[0], kernel.shape[0] // 2
    rows = _taps(size, stride, height, images.shape[1])
    columns = _taps(size, stride, width, images.shape[2])
    padded = jnp.pad(images, ((0, 0), (pad, pad + stride), (pad, pad + stride), (0, 0)))
    patches = [padded[:, i : i + stride * height : stride, j : j + stride * width : stride, :] for i in rows for j in columns]
    used = kernel[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return _product(jnp.concatenate(patches, axis=-1), used.reshape(-1, kernel.shape[-1]))


def max_pool(images, own_gradient: bool = True):
    """3x3 maximum with stride 2 and padding 1: [B, H, W, C] to [B, ceil(H / 2), ceil(W / 2), C]; of equals the first counts."""
    if own_gradient:
        return _max_pool_by_slices(images)
    return lax.reduce_window(images, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)])


def _window(images, row: int, column: int, height: int, width: int):
    return lax.slice(
        images,
        (0, row, column, 0),
        (images.shape[0], row + 2 * height - 1, column + 2 * width - 1, images.shape[3]),
        (1, 2, 2, 1),
    )


def _max_and_place(images):
    """The maximum of each window and which of its nine entries holds it (the first, where several do)."""
    height, width = (-(-n // 2) for n in images.shape[1:3])
    low = jnp.array(-jnp.inf, images.dtype)
    padded = lax.pad(images, low, [(0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)])
    best = _window(padded, 0, 0, height, width)
    place = jnp.zeros(best.shape, jnp.int8)
    for k in range(1, 9):
        entry = _window(padded, k // 3, k % 3, height, width)
        place = jnp.where(entry > best, jnp.int8(k), place)
        best = jnp.maximum(best, entry)
    return best, place


@jax.custom_vjp
def _max_pool_by_slices(images):
    return _max_and_place(images)[0]


def _max_pool_forward(images):
    best, place = _max_and_place(images)
    return best, (place, jnp.zeros((0, *images.shape[1:3], 0)))


def _max_pool_backward(saved, gradient):
    place, like = saved
    height, width = like.shape[1:3]
    total = 0
    for k in range(9):
        row, column = k // 3, k % 3
        part = jnp.where(place == k, gradient, 0)
        total += lax.pad(
            part,
            jnp.zeros((), gradient.dtype),
            [
                (0, 0, 0),
                (row - 1, height - (row - 1) - (2 * part.shape[1] - 1), 1),
                (column - 1, width - (column - 1) - (2 * part.shape[2] - 1), 1),
                (0, 0, 0),
            ],
        )
    return (total,)


_max_pool_by_slices.defvjp(_max_pool_forward, _max_pool_backward)
