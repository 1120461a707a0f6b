"""Pillow's operations on the pixels of one image, on the device and without branches.

Every image of a batch may have another operation, so `apply_operation` computes each shared step once and selects by the
numbers of an `Operation`: one resample for all geometric operations, one elementwise expression for the others. Images are
uint8 [H, W, 3].
"""

from enum import IntEnum, auto
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from PIL import Image

FIXED = 1 << 16  # steps of a coordinate in a pixel, with which Pillow picks the nearest pixel
ROUNDING = 2.0**-10  # more than the float32 error of a resample, whose result Pillow truncates from float64
LUMA = (19595, 38470, 7471)  # weights of red, green and blue in Pillow's gray, of 2^16
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
    of solarize, addend of solarize_add. matrix: [2, 2, 3] int32, from (column, row, 1) of the result to column and row of the
    image: in 1 / FIXED of a pixel, then the rest in 1 / FIXED^2; float32 could not decide on which side of the edge a place is.
    cubic: bool, whether to resample bicubically, not bilinearly.
    """

    kind: Any
    value: Any
    matrix: Any
    cubic: Any = None


def fixed_point(matrix: Any, *, nearest: bool) -> Any:
    """A matrix [..., 2, 3] of pixel coordinates as `Operation` has it: int32 [..., 2, 2, 3]. matrix: NumPy's or JAX's.

    nearest: rounded to 1 / FIXED of a pixel, as Pillow does to pick the nearest pixel.
    """
    xp = np if isinstance(matrix, np.ndarray) else jnp
    steps = matrix * FIXED
    whole = xp.floor(steps + 0.5 if nearest else steps)
    parts = 0 * steps if nearest else xp.floor((steps - whole) * FIXED)
    return xp.stack([whole, parts], axis=-3).astype(xp.int32)


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
    present, pixels = counts > 0, image.shape[0] * image.shape[1]
    last = jnp.take_along_axis(counts, 255 - lax.argmax(present[:, ::-1], 1, jnp.int32)[:, None], axis=1)
    step = (pixels - last) // 255
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
    column, row = (_place(matrix[:, axis], x, y) for axis in (0, 1))
    if interpolation == "nearest":
        result = pixels(row[0] >> 16, column[0] >> 16)
    else:
        (top, down), (left, across) = (_center_before(*place) for place in (row, column))
        total = jnp.zeros((), jnp.float32)
        for i, weight in _taps(down, cubic, interpolation).items():
            for j, other in _taps(across, cubic, interpolation).items():
                total += (weight * other)[..., None] * pixels(top + i, left + j).astype(jnp.float32)
        result = jnp.floor(jnp.clip(total + ROUNDING, 0, 255)).astype(jnp.uint8)
    inside = (column[0] >= 0) & (column[0] < width * FIXED) & (row[0] >= 0) & (row[0] < height * FIXED)
    return jnp.where(inside[..., None], result, fill.astype(jnp.uint8))


def _place(weights: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A coordinate in 1 / FIXED of a pixel, and the rest in 1 / FIXED^2; int32. weights: [2, 3], one row of a matrix."""
    whole, parts = (word[0] * x + word[1] * y + word[2] for word in weights)
    return whole + (parts >> 16), parts & (FIXED - 1)


def _center_before(whole: jax.Array, parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the last pixel whose center is not behind a place, int32; the place's distance from it, float32). See `_place`."""
    whole -= FIXED // 2
    return whole >> 16, ((whole & (FIXED - 1)).astype(jnp.float32) + parts.astype(jnp.float32) / FIXED) / FIXED


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


@cache
def _hues_rounded_down() -> np.ndarray:
    """Whether Pillow's float arithmetic stores a hue of exactly n / 255 as n - 1: bool [255], by n."""
    sector, rest = np.divmod(6 * np.arange(255), 255)
    zero, one = np.zeros_like(rest), np.full_like(rest, 255)
    up, down = rest, 255 - rest
    colors = ((one, up, zero), (down, one, zero), (zero, one, up), (zero, down, one), (up, zero, one), (one, zero, down))
    pixels = np.choose(sector[:, None], [np.stack(channels, axis=-1) for channels in colors]).astype(np.uint8)
    return np.asarray(Image.fromarray(pixels[None]).convert("HSV"))[0, :, 0] != np.arange(255)


def hue_saturation_value(image: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pillow's conversion to HSV: three times int32 [H, W] from 0 to 255.

    In integers, since a device's division may round otherwise than Pillow's, and one level of hue is up to six of a color.
    """
    red, green, blue = (image[..., channel].astype(jnp.int32) for channel in range(3))
    high, low = jnp.maximum(jnp.maximum(red, green), blue), jnp.minimum(jnp.minimum(red, green), blue)
    spread = jnp.maximum(high - low, 1)
    sixths = jnp.where(red == high, green - blue, jnp.where(green == high, 2 * spread + blue - red, 4 * spread + red - green))
    turns = 255 * jnp.where(sixths < 0, sixths + 6 * spread, sixths)
    hue = lax.div(turns, 6 * spread)
    hue -= (hue * 6 * spread == turns) & jnp.asarray(_hues_rounded_down()).at[hue].get(mode="promise_in_bounds")
    return jnp.where(high > low, hue, 0), lax.div(255 * (high - low), jnp.maximum(high, 1)), high


def shift_hue(image: jax.Array, share: jax.Array) -> jax.Array:
    """The image with its hue turned by `share` of a full turn, -1/2 to 1/2, as torchvision does on Pillow images; uint8."""
    hue, saturation, value = hue_saturation_value(image)
    hue = hue + jnp.trunc(share * 255).astype(jnp.int32) & 255
    sector = lax.div(6 * hue, jnp.int32(255))
    f, s, v = (6 * hue - 255 * sector) / 255, saturation / 255, value.astype(jnp.float32)
    p, q, t = (jnp.floor(v * (1 - s * part) + 0.5) for part in (1.0, f, 1 - f))
    order = ((v, t, p), (q, v, p), (p, v, t), (p, q, v), (t, p, v), (v, p, q), (v, t, p))
    channels = [jnp.select([sector == i for i in range(7)], [colors[c] for colors in order]) for c in range(3)]
    return jnp.clip(jnp.stack(channels, axis=-1), 0, 255).astype(jnp.uint8)
