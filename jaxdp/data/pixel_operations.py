"""Pillow's operations on the pixels of one image, on the device and without branches.

A channel is at most 1 of 255 levels off Pillow's. Exceptions are places on the edge of a pixel and hues on one of Pillow's
255 steps: rounding decides these.

Every image of a batch may have another operation, so `apply_operation` computes each shared step once and selects by the
numbers of an `Operation`: one resample for all geometric operations, one elementwise expression for the others. Images are
uint8 [H, W, 3].
"""

from enum import IntEnum, auto
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FIXED = 1 << 16  # steps of a coordinate in a pixel, as in Pillow's choice of the nearest pixel
LUMA = (19595, 38470, 7471)  # weights of red, green and blue in Pillow's gray, of 2^16
HUE_TIE = 1e-3  # more than the float32 error of a hue in Pillow's 255 steps, less than the distance of two hues
SMOOTH_SUM = 13  # of Pillow's filter SMOOTH: 5 in the middle, 1 around it


class Kind(IntEnum):
    """What an operation does to the value of a pixel, after the resample. The first four blend: see `_blended`."""

    BRIGHTNESS = auto()
    COLOR = auto()
    CONTRAST = auto()
    SHARPNESS = auto()
    POSTERIZE = auto()
    SOLARIZE = auto()
    SOLARIZE_ADD = auto()
    AUTO_CONTRAST = auto()
    EQUALIZE = auto()
    INVERT = auto()
    NONE = auto()


class Operation(NamedTuple):
    """One operation.

    kind: a `Kind`. value: its float32 argument, in Pillow's units: the factor of a blend, bits that posterize keeps, threshold
    of solarize, addend of solarize_add. matrix: [2, 3] int32, from (column, row, 1) of a pixel of the result to column and row
    of a place in the image, in 1 / FIXED of a pixel; the first pixel reaches from 0 to FIXED. cubic: bool, whether to resample
    bicubically, not bilinearly.
    """

    kind: Any
    value: Any
    matrix: Any
    cubic: Any = None


def gray(image: jax.Array) -> jax.Array:
    """Pillow's gray of [H, W, 3]: int32 [H, W]."""
    return (jnp.sum(image.astype(jnp.int32) * jnp.array(LUMA, jnp.int32), axis=-1, dtype=jnp.int32) + (1 << 15)) >> 16


def mean_gray(image: jax.Array) -> jax.Array:
    """The mean of `gray`, rounded half up: int32. Exact: sums of up to 4096x4096 pixels fit in uint32."""
    whole, rest = jnp.divmod(jnp.sum(gray(image), dtype=jnp.uint32), jnp.uint32(image.shape[0] * image.shape[1]))
    return (whole + (2 * rest >= image.shape[0] * image.shape[1])).astype(jnp.int32)


def histogram(image: jax.Array) -> jax.Array:
    """The number of pixels of each value in each channel, int32 [3, 256].

    A scatter of integers is exact and deterministic. Products of one-hot nibbles need no atomics but write and read 64 times
    the bytes of the image (docs/data.md).
    """
    bins = image.astype(jnp.int32) + 256 * jnp.arange(3, dtype=jnp.int32)
    return jnp.zeros(3 * 256, jnp.int32).at[bins.ravel()].add(1, mode="promise_in_bounds").reshape(3, 256)


def equalized(image: jax.Array) -> jax.Array:
    """Pillow's ImageOps.equalize, int32: each channel through the running sum of its histogram."""
    counts = histogram(image)
    last = jnp.take_along_axis(counts, image.max((0, 1)).astype(jnp.int32)[:, None], axis=1)
    step = (image.shape[0] * image.shape[1] - last) // 255
    below = jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts
    table = jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255)
    table = jnp.where(step > 0, table, jnp.arange(256, dtype=jnp.int32))
    return table.ravel().at[image.astype(jnp.int32) + 256 * jnp.arange(3, dtype=jnp.int32)].get(mode="promise_in_bounds")


def smoothed(image: jax.Array) -> jax.Array:
    """Pillow's filter SMOOTH, int32; pixels at the border stay."""
    height, width, _ = image.shape
    pixels = image.astype(jnp.int32)
    padded = jnp.pad(pixels, ((1, 1), (1, 1), (0, 0)))
    total = 4 * pixels + sum(padded[i : i + height, j : j + width] for i in range(3) for j in range(3))
    rows, columns = jnp.arange(height, dtype=jnp.int32)[:, None, None], jnp.arange(width, dtype=jnp.int32)[:, None]
    inner = (rows > 0) & (rows < height - 1) & (columns > 0) & (columns < width - 1)
    return jnp.where(inner, (2 * total + SMOOTH_SUM) // (2 * SMOOTH_SUM), pixels)


def blended(degenerate: jax.Array, image: jax.Array, factor: jax.Array) -> jax.Array:
    """Pillow's Image.blend, float32 of integers from 0 to 255: `degenerate` at factor 0, `image` at 1, beyond it above."""
    start = degenerate.astype(jnp.float32)
    return jnp.floor(jnp.clip(start + factor * (image.astype(jnp.float32) - start), 0, 255))


def transform(image: jax.Array, matrix: jax.Array, cubic: jax.Array, *, interpolation: str, fill: jax.Array) -> jax.Array:
    """Pillow's Image.transform with an affine matrix; uint8.

    matrix, cubic: see `Operation`. interpolation: nearest, bilinear, bicubic or random, which obeys `cubic`. fill: [3], the
    pixel for places outside of the image.
    """
    height, width, _ = image.shape
    flat = image.reshape(-1, 3)

    def pixels(rows: jax.Array, columns: jax.Array) -> jax.Array:
        index = jnp.clip(rows, 0, height - 1) * width + jnp.clip(columns, 0, width - 1)
        return flat.at[index].get(mode="promise_in_bounds")

    x, y = jnp.arange(width, dtype=jnp.int32), jnp.arange(height, dtype=jnp.int32)[:, None]
    column, row = (by_column * x + by_row * y + start for by_column, by_row, start in matrix)
    if interpolation == "nearest":
        result = pixels(row >> 16, column >> 16)
    else:
        after_row, after_column = row - FIXED // 2, column - FIXED // 2  # from the centers of pixels
        down, across = ((place & (FIXED - 1)).astype(jnp.float32) / FIXED for place in (after_row, after_column))
        total = jnp.zeros((), jnp.float32)
        for i, weight in _taps(down, cubic, interpolation).items():
            for j, other in _taps(across, cubic, interpolation).items():
                neighbor = pixels((after_row >> 16) + i, (after_column >> 16) + j)
                total += (weight * other)[..., None] * neighbor.astype(jnp.float32)
        result = (jnp.clip(total, 0, 255) + 0.5).astype(jnp.uint8)
    inside = (column >= 0) & (column < width * FIXED) & (row >= 0) & (row < height * FIXED)
    return jnp.where(inside[..., None], result, fill.astype(jnp.uint8))


def _taps(d: jax.Array, cubic: jax.Array, interpolation: str) -> dict[int, jax.Array]:
    """Offset -> weight of the pixels around a place at distance `d` behind a pixel's center.

    The bicubic kernel is Keys' (1981) with a = -1, as in Pillow's transforms; its resize has -1/2.
    """
    e = 1 - d
    linear = {0: e, 1: d}
    if interpolation == "bilinear":
        return linear
    keys = {-1: -d * e**2, 0: 1 - 2 * d**2 + d**3, 1: 1 - 2 * e**2 + e**3, 2: -e * d**2}
    return {offset: jnp.where(cubic, weight, linear.get(offset, 0.0)) for offset, weight in keys.items()}


def change_values(image: jax.Array, kind: jax.Array, value: jax.Array) -> jax.Array:
    """What an operation does after the resample: uint8 to uint8. kind, value: of `Operation`, scalars."""
    pixels = image.astype(jnp.int32)
    degenerates = {Kind.COLOR: gray(image)[..., None], Kind.CONTRAST: mean_gray(image), Kind.SHARPNESS: smoothed(image)}
    degenerate = jnp.zeros_like(pixels)
    for blend, other in degenerates.items():
        degenerate = jnp.where(kind == blend, other, degenerate)
    low, high = pixels.min((0, 1)), pixels.max((0, 1))
    stretched = jnp.where(high > low, (pixels - low) * 255 // jnp.maximum(high - low, 1), pixels)
    whole = value.astype(jnp.int32)
    results = {
        Kind.POSTERIZE: pixels & ~((1 << (8 - whole)) - 1),
        Kind.SOLARIZE: jnp.where(pixels < value, pixels, 255 - pixels),
        Kind.SOLARIZE_ADD: jnp.where(pixels < 128, jnp.minimum(pixels + whole, 255), pixels),
        Kind.AUTO_CONTRAST: stretched,
        Kind.EQUALIZE: equalized(image),
        Kind.INVERT: 255 - pixels,
        Kind.NONE: pixels,
    }
    result = blended(degenerate, pixels, value).astype(jnp.int32)
    for other_kind, other in results.items():
        result = jnp.where(kind == other_kind, other, result)
    return result.astype(jnp.uint8)


def apply_operation(image: jax.Array, operation: Operation, *, interpolation: str, fill: jax.Array) -> jax.Array:
    """One operation on one image, uint8 [H, W, 3]. operation: of scalars. interpolation, fill: see `transform`."""
    moved = transform(image, operation.matrix, operation.cubic, interpolation=interpolation, fill=fill)
    return change_values(moved, operation.kind, operation.value)


def shift_hue(image: jax.Array, share: jax.Array) -> jax.Array:
    """The image with its hue turned by `share` of a full turn, -1/2 to 1/2, as torchvision does on Pillow images; uint8."""
    red, green, blue = (image[..., channel].astype(jnp.float32) for channel in range(3))
    high, low = jnp.maximum(jnp.maximum(red, green), blue), jnp.minimum(jnp.minimum(red, green), blue)
    spread = jnp.maximum(high - low, 1)
    sixths = jnp.where(red == high, green - blue, jnp.where(green == high, 2 * spread + blue - red, 4 * spread + red - green))
    turn = sixths / (6 * spread)
    hue = (255 * (turn - jnp.floor(turn)) + HUE_TIE).astype(jnp.int32) + jnp.trunc(255 * share).astype(jnp.int32) & 255

    def turned(start: int) -> jax.Array:
        place = hue.astype(jnp.float32) * (6 / 255) + start
        distance = jnp.where(place >= 6, place - 6, place)
        return high - (high - low) * jnp.clip(jnp.minimum(distance, 4 - distance), 0, 1)

    return (jnp.stack([turned(5), turned(3), turned(1)], axis=-1) + 0.5).astype(jnp.uint8)
