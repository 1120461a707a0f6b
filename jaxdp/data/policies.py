"""Random pixel operations on the device: RandAugment, TrivialAugment and timm's variant, color jitter, random erasing.

Every draw is a function of (seed, position), so it is equal on any mesh. Operations act on cropped images, uint8, before
normalization; erasing acts after it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.choices import AUTO_AUGMENTS
from jaxdp.config import LARGEST_LEVEL, Augment, Config
from jaxdp.data.augment import PixelStat, Seed, image_keys
from jaxdp.data.pixel_operations import FIXED, Kind, Operation, apply_operation, blended, gray, mean_gray, shift_hue

POLICY_KEY, JITTER_KEY, ERASE_KEY = 3, 4, 5  # uses of a position's key; the crops split off 0 to 2
BINS = 31  # of the magnitudes, in torchvision
ERASED_AREA, ERASED_RATIO, ERASE_ATTEMPTS = (0.02, 0.33), (0.3, 3.3), 10  # as in torchvision
DRAWS = 2  # operations of an image by RandAugment, in torchvision and in timm's published policies
MAGNITUDE_STD = 0.5  # of rand_augment_increasing: timm's mstd0.5, as in ResNet strikes back
APPLIED = 0.5  # timm's probability of an operation


class Space(NamedTuple):
    """The strongest operations of a policy. shift: in pixels, None: 150/331 of the size. bits: that posterize clears."""

    shear: float
    shift: float | None
    degrees: float
    blend: float
    bits: int


SPACES = {
    "rand_augment": Space(shear=0.3, shift=None, degrees=30.0, blend=0.9, bits=4),
    "trivial_augment": Space(shear=0.99, shift=32.0, degrees=135.0, blend=0.99, bits=6),
}
# Operations in torchvision's order. Geometric ones name an argument of `affine`, others a Kind.
GEOMETRIC = ("shear_x", "shear_y", "right", "down", "degrees")
BLENDS = (Kind.BRIGHTNESS, Kind.COLOR, Kind.CONTRAST, Kind.SHARPNESS)
OPERATIONS: tuple[Kind | str, ...] = (
    Kind.NONE,
    *GEOMETRIC,
    *BLENDS,
    Kind.POSTERIZE,
    Kind.SOLARIZE,
    Kind.AUTO_CONTRAST,
    Kind.EQUALIZE,
)
INCREASING: tuple[Kind | str, ...] = (*OPERATIONS[1:], Kind.INVERT, Kind.SOLARIZE_ADD)  # timm's


def affine(size: int, moves: dict[str, jax.Array]) -> jax.Array:
    """The matrix [2, 3] of an `Operation` for images of size x size. moves: each of GEOMETRIC in pixels, at most one not 0.

    shear_x, shear_y, right, down: moves of the place in the input; degrees: a rotation counter-clockwise around the center.
    """
    shear_x, shear_y, right, down, degrees = (moves[name] for name in GEOMETRIC)
    angle = jnp.deg2rad(degrees)
    cos, sin, center = jnp.cos(angle), jnp.sin(angle), size / 2
    by_column, by_row = (cos, shear_y + sin), (shear_x - sin, cos)
    start = right + center * (1 - cos + sin), down + center * (1 - cos - sin)
    rows = [(c, r, s + (c + r) / 2) for c, r, s in zip(by_column, by_row, start, strict=True)]  # of pixel centers
    return jnp.round(FIXED * jnp.array(rows)).astype(jnp.int32)


def linspace(start: float, end: float) -> np.ndarray:
    """BINS magnitudes as torch.linspace rounds them: a float32 step, from both ends, each rounded once; float64 [BINS]."""
    first, last = np.float32(start), np.float32(end)
    step, index = np.float64((last - first) / np.float32(BINS - 1)), np.arange(BINS)
    exact = np.where(index < BINS // 2, first + step * index, last - step * (BINS - 1 - index))
    return exact.astype(np.float32).astype(np.float64)


def magnitudes(policy: str, operation: Kind | str, size: int) -> np.ndarray:
    """[BINS] of an operation of torchvision's, before the sign. size: of the image."""
    space = SPACES[policy]
    if operation in ("right", "down"):
        return np.trunc(linspace(0.0, 150 / 331 * size if space.shift is None else space.shift))
    if operation is Kind.POSTERIZE:
        return 8 - np.round(np.arange(BINS) * space.bits / (BINS - 1))
    if operation is Kind.SOLARIZE:
        return linspace(255.0, 0.0)
    strongest = space.degrees if operation == "degrees" else space.shear if operation in GEOMETRIC else space.blend
    return linspace(0.0, strongest) if operation in (*GEOMETRIC, *BLENDS) else np.zeros(BINS)


def operation_of(operations: Sequence[Kind | str], index: jax.Array, amount: jax.Array, *, size: int) -> Operation:
    """Number `index` of `operations` (-1: none), with an argument of `affine` or a `value` of `Operation`."""
    moves = {name: jnp.where(index == operations.index(name), amount, 0.0) for name in GEOMETRIC}
    kinds = [*(each if isinstance(each, Kind) else Kind.NONE for each in operations), Kind.NONE]
    return Operation(jnp.array(kinds, jnp.int32)[index], amount, affine(size, moves))


def amounts(policy: str, size: int) -> np.ndarray:
    """Of every operation of a torchvision policy, at every magnitude with every sign: float32 [operations, BINS, 2]."""
    signed = {operation: np.multiply.outer(magnitudes(policy, operation, size), [1.0, 1.0]) for operation in OPERATIONS}
    for operation in (*GEOMETRIC, *BLENDS):
        signed[operation] *= [-1.0, 1.0] if operation in ("right", "down") else [1.0, -1.0]
    return np.array([(operation in BLENDS) + rows for operation, rows in signed.items()], np.float32)


def _binned(ranges: Augment, key: jax.Array, *, policy: str, size: int) -> Operation:
    """A random operation of torchvision's RandAugment (Cubuk et al., arXiv 1909.13719) or TrivialAugmentWide (Müller & Hutter,
    arXiv 2103.10158): each of 14 with the same probability, and a sign."""
    which, strength, sign = jax.random.split(key, 3)
    magnitude = 9 if ranges.magnitude is None else round(ranges.magnitude)
    drawn = jax.random.randint(strength, (), 0, BINS, jnp.int32) if policy == "trivial_augment" else magnitude
    index = jax.random.randint(which, (), 0, len(OPERATIONS), jnp.int32)
    negative = jax.random.bernoulli(sign, jnp.float32(0.5)).astype(jnp.int32)
    return operation_of(OPERATIONS, index, jnp.asarray(amounts(policy, size))[index, drawn, negative], size=size)


def _increasing(ranges: Augment, key: jax.Array, *, size: int) -> Operation:
    """A random operation of timm's rand-m7-mstd0.5-inc1: each of 15 with the same probability, but half of the time none."""
    which, strength, sign, apply = jax.random.split(key, 4)
    mean = 7.0 if ranges.magnitude is None else ranges.magnitude
    level = jnp.clip(mean + MAGNITUDE_STD * jax.random.normal(strength, dtype=jnp.float32), 0, LARGEST_LEVEL) / LARGEST_LEVEL
    index = jnp.where(
        jax.random.bernoulli(apply, jnp.float32(APPLIED)), jax.random.randint(which, (), 0, len(INCREASING), jnp.int32), -1
    )
    return increasing_operation(index, level, jnp.where(jax.random.bernoulli(sign, jnp.float32(0.5)), 1.0, -1.0), size=size)


def increasing_operation(index: jax.Array, level: jax.Array, sign: jax.Array, *, size: int) -> Operation:
    """Operation number `index` of INCREASING (-1: none) at a share `level` of the largest magnitude, with a sign of +-1."""
    strongest = {"shear_x": 0.3, "shear_y": 0.3, "right": 0.45 * size, "down": 0.45 * size, "degrees": 30.0}
    strengths: dict[Kind | str, jax.Array] = {name: sign * level * largest for name, largest in strongest.items()}
    strengths |= {operation: jnp.maximum(1 + 0.9 * sign * level, 0.1) for operation in BLENDS}
    strengths |= {
        Kind.POSTERIZE: 4 - jnp.floor(4 * level),
        Kind.SOLARIZE: 256 - jnp.floor(256 * level),
        Kind.SOLARIZE_ADD: jnp.floor(110 * level),
    }
    amount = jnp.stack([strengths.get(operation, jnp.zeros_like(level)) for operation in INCREASING])[index]
    return operation_of(INCREASING, index, amount, size=size)


class Policy(NamedTuple):
    """draw: f(ranges, key, size=size) -> Operation. interpolation: the published one. black: whether places
    outside of the image are black, rather than the mean of the data set."""

    draw: Callable[..., Operation]
    interpolation: str
    black: bool


RAND_AUGMENT: Policy = Policy(partial(_binned, policy="rand_augment"), "nearest", True)
TRIVIAL_AUGMENT: Policy = Policy(partial(_binned, policy="trivial_augment"), "nearest", True)
RAND_AUGMENT_INCREASING: Policy = Policy(_increasing, "random", False)


def policy_of(config: Config) -> Any:
    """The `Policy` of `data.auto_augment`, None for none; for a registered name a function of (images, keys)."""
    return AUTO_AUGMENTS.implementation(config.data.auto_augment)


def draw_operations(config: Config, key: jax.Array, size: int) -> Operation:
    """The operations of an image of size x size, in order: leaves [count, ...]. The config must have a policy."""
    policy, ranges = policy_of(config), config.augment
    interpolation = ranges.operation_interpolation or policy.interpolation
    count = 1 if config.data.auto_augment == "trivial_augment" else DRAWS
    keys, filters = jax.random.split(key, (2, count))
    drawn = jax.vmap(partial(policy.draw, ranges, size=size))(keys)
    drawn_cubic = jax.vmap(lambda key: jax.random.bernoulli(key, jnp.float32(0.5)))(filters)
    return drawn._replace(
        cubic=drawn_cubic if interpolation == "random" else jnp.full(count, interpolation == "bicubic", jnp.bool_)
    )


def auto_augment(config: Config, images: jax.Array, keys: jax.Array, *, mean: PixelStat) -> jax.Array:
    """The policy `data.auto_augment` on images [B, S, S, 3] uint8. keys: [B]. mean: see `change_pixels`."""
    policy, size = policy_of(config), images.shape[1]
    interpolation = config.augment.operation_interpolation or policy.interpolation
    fill = jnp.broadcast_to(jnp.round(jnp.asarray(0.0 if policy.black else mean, jnp.float32)), (3,))

    def one(image: jax.Array, key: jax.Array) -> jax.Array:
        operations = draw_operations(config, key, size)
        for number in range(len(operations.kind)):
            operation = Operation(*(leaf[number] for leaf in operations))
            image = apply_operation(image, operation, interpolation=interpolation, fill=fill)
        return image

    return jax.vmap(one)(images, keys)


def jitter(image: jax.Array, key: jax.Array, *, strengths: dict[str, float]) -> jax.Array:
    """torchvision's ColorJitter of one image, uint8 [H, W, 3]: its parts in random order. strengths: not empty."""
    order, draw = jax.random.split(key)
    uniform = dict(zip(strengths, jax.random.uniform(draw, (len(strengths),), jnp.float32), strict=True))
    factors = {
        name: (2 * uniform[name] - 1) * strength
        if name == "hue"
        else max(0.0, 1 - strength) + uniform[name] * (1 + strength - max(0.0, 1 - strength))
        for name, strength in strengths.items()
    }
    sequence = jax.random.permutation(order, jnp.arange(len(strengths), dtype=jnp.int32))
    for step in range(len(strengths)):
        image = jitter_once(image, sequence[step], factors)
    return image


def jitter_once(image: jax.Array, which: jax.Array, factors: dict[str, jax.Array]) -> jax.Array:
    """Number `which` of the parts in `factors`: name -> factor (hue: share of a turn). uint8 [H, W, 3]."""
    selected = {name: which == number for number, name in enumerate(factors)}
    degenerate, factor = jnp.zeros(image.shape, jnp.int32), jnp.float32(1)
    for name, is_selected in selected.items():
        factor = factor if name == "hue" else jnp.where(is_selected, factors[name], factor)
    if "saturation" in selected:
        degenerate = jnp.where(selected["saturation"], gray(image)[..., None], degenerate)
    if "contrast" in selected:
        degenerate = jnp.where(selected["contrast"], mean_gray(image), degenerate)
    result = blended(degenerate, image, factor).astype(jnp.uint8)
    if "hue" in selected:
        result = jnp.where(selected["hue"], shift_hue(image, factors["hue"]), result)
    return result


def erased_box(key: jax.Array, size: tuple[int, int]) -> tuple[jax.Array, ...]:
    """(top, left, height, width) of the rectangle to erase, int32; height 0 if no attempt fits into an image of `size`.

    The first of ten draws of area and aspect ratio that is smaller than the image (Zhong et al., arXiv 1708.04896).
    """
    height, width = size
    draw, corner = jax.random.split(key)
    area, ratio = jax.random.uniform(draw, (2, ERASE_ATTEMPTS), jnp.float32)
    area = height * width * (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * area)
    low, high = map(math.log, ERASED_RATIO)
    ratio = jnp.exp(low + (high - low) * ratio)
    tall, wide = (jnp.round(jnp.sqrt(product)).astype(jnp.int32) for product in (area * ratio, area / ratio))
    fits = (tall < height) & (wide < width)
    first = lax.argmax(fits, 0, jnp.int32)
    tall, wide = jnp.where(fits.any(), tall[first], 0), wide[first]
    down, right = jax.random.split(corner)
    top = jax.random.randint(down, (), 0, height - tall + 1, jnp.int32)
    return top, jax.random.randint(right, (), 0, width - wide + 1, jnp.int32), tall, wide


def erase_one(image: jax.Array, key: jax.Array, *, ranges: Augment) -> jax.Array:
    """One normalized image [H, W, 3] with a random rectangle of its mean (0), or unchanged."""
    height, width, _ = image.shape
    happens, box, _ = jax.random.split(key, 3)
    top, left, tall, wide = erased_box(box, (height, width))
    rows, columns = jnp.arange(height, dtype=jnp.int32)[:, None, None], jnp.arange(width, dtype=jnp.int32)[:, None]
    inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    replaced = inside & jax.random.bernoulli(happens, jnp.float32(ranges.erase_probability))
    return jnp.where(replaced, 0.0, image)


def change_pixels(config: Config, images: jax.Array, positions: jax.Array, *, mean: PixelStat, seed: Seed = None) -> jax.Array:
    """`data.auto_augment`, then color jitter: [B, S, S, 3] on the 0-255 scale; of built-in operations uint8.

    positions: [B] uint32. mean: of the data set, on the 0-255 scale, a number or one for each channel.
    """
    policy, strengths = config.data.auto_augment, config.augment.jitter_strengths
    seed = config.seed if seed is None else seed
    if policy in AUTO_AUGMENTS.registered:
        images, policy = policy_of(config)(images, image_keys(seed, positions, POLICY_KEY)), "none"
    if policy == "none" and not strengths:
        return images
    if images.dtype != jnp.uint8:  # a crop on the device interpolates
        images = jnp.round(jnp.clip(images, 0, 255)).astype(jnp.uint8)
    if policy != "none":
        images = auto_augment(config, images, image_keys(seed, positions, POLICY_KEY), mean=mean)
    if strengths:
        images = jax.vmap(partial(jitter, strengths=strengths))(images, image_keys(seed, positions, JITTER_KEY))
    return images


def erase(config: Config, images: jax.Array, positions: jax.Array, *, seed: Seed = None) -> jax.Array:
    """Random erasing of normalized images [B, S, S, 3]. positions: [B] uint32."""
    if config.augment.erase_probability == 0:
        return images
    keys = image_keys(config.seed if seed is None else seed, positions, ERASE_KEY)
    return jax.vmap(partial(erase_one, ranges=config.augment))(images, keys)
