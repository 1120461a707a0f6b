"""Every operation of the policies, at every magnitude, against Pillow's: at most 1 of 255 apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import pillow_operations
from helpers.pillow_operations import assert_moved, assert_turned, difference, turned
from PIL import Image

from jaxdp.data import pixel_operations, policies
from jaxdp.data.pixel_operations import FIXED, Kind, Operation

SIZE, FILL = 33, (255, 3, 77)
LEVELS = np.arange(21) / 20  # of the policy with increasing operations


def picture(seed=0, size=SIZE):
    """Smooth waves with noise, without the darkest and lightest values."""
    rng, (rows, columns) = np.random.default_rng(seed), np.mgrid[:size, :size]
    waves = np.stack([np.sin(rows / 7 + c) + 0.5 * np.cos(columns / (5 + c)) for c in range(3)], axis=-1)
    return np.clip(127 + 70 * waves + rng.normal(0, 12, (size, size, 3)), 20, 236).astype(np.uint8)


def lines():
    """Saturated lines of one pixel on black."""
    image = np.zeros((SIZE, SIZE, 3), np.uint8)
    image[::5], image[:, ::7] = 255, (0, 255, 0)
    return image


def edge_cases():
    """Images that are not square, flat, of two values, or of all values in a ramp."""
    two, ramp = np.full((32, 32, 3), 10), np.arange(32 * 32 * 3).reshape(32, 32, 3) % 256
    two[:3] = 200
    flats = [np.full((8, 9, 3), value) for value in (0, 90, 255)]
    images = [picture(), picture()[:20], picture()[:, :9], picture()[:2, :1], lines(), two, ramp, *flats]
    return [np.ascontiguousarray(image, np.uint8) for image in images]


def increasing_amount(operation, level, sign):
    """timm's amounts at a share `level` of the largest magnitude."""
    geometric = {"shear_x": 0.3, "shear_y": 0.3, "right": 0.45 * SIZE, "down": 0.45 * SIZE, "degrees": 30.0}
    if operation in geometric:
        return sign * level * geometric[operation]
    if operation in policies.BLENDS:
        return max(0.1, 1 + sign * 0.9 * level)
    # Steps of float32 and float64 may differ where the product is whole.
    whole = {Kind.POSTERIZE: 4 - int(4 * level + 1e-6), Kind.SOLARIZE: 256 - int(256 * level + 1e-6)}
    return whole.get(operation, int(110 * level + 1e-6))


@functools.cache
def every_operation() -> tuple[list, Operation]:
    """(name, amount) of every operation of the three policies at every magnitude with both signs, and their Operation."""
    rows = [(name, level, sign) for name in policies.INCREASING for level in LEVELS for sign in (1.0, -1.0)]
    columns = [policies.INCREASING.index(name) for name, _, _ in rows], *list(zip(*rows, strict=True))[1:]
    make = jax.vmap(functools.partial(policies.increasing_operation, size=SIZE))
    parts = [jax.jit(make)(*(jnp.array(column) for column in columns))]
    names = [(name, increasing_amount(name, level, sign)) for name, level, sign in rows]
    make = jax.jit(jax.vmap(functools.partial(policies.operation_of, policies.OPERATIONS, size=SIZE)))
    for policy in policies.SPACES:
        table = policies.amounts(policy, SIZE)
        names += [(name, float(n)) for name, row in zip(policies.OPERATIONS, table, strict=True) for n in row.ravel()]
        parts.append(make(np.repeat(np.arange(len(table)), table[0].size), table.ravel()))
    return names, jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_moves_are_pillows_at_every_magnitude(interpolation):
    names, operations = every_operation()
    chosen = [number for number, (name, _) in enumerate(names) if name in policies.GEOMETRIC]
    matrices, cubic = operations.matrix[chosen], jnp.bool_(interpolation == "bicubic")
    filters = [interpolation] if interpolation == "nearest" else [interpolation, "random"]
    for image, asked in [(picture(), name) for name in filters] + [(lines(), interpolation)]:
        resample = functools.partial(pixel_operations.transform, jnp.asarray(image), interpolation=asked, fill=jnp.array(FILL))
        ours = jax.jit(jax.vmap(resample, in_axes=(0, None)))(matrices, cubic)
        for result, matrix, (name, amount) in zip(np.asarray(ours), matrices, [names[n] for n in chosen], strict=True):
            filtered = Image.Resampling[interpolation.upper()]
            expected = pillow_operations.apply(Image.fromarray(image), name, amount, resample=filtered, fill=FILL)
            assert_moved(result, expected, matrix, tolerance=0 if interpolation == "nearest" else 1)


@pytest.mark.parametrize("image", edge_cases(), ids=lambda image: str(image.shape))
def test_changes_of_values_are_pillows_at_every_magnitude(image):
    names, operations = every_operation()
    names = [*names, (Kind.SOLARIZE, 100.0), (Kind.POSTERIZE, 3.0)]
    chosen = [number for number, (name, _) in enumerate(names) if isinstance(name, Kind)]
    kinds, values = np.append(operations.kind, [Kind.SOLARIZE, Kind.POSTERIZE]), np.append(operations.value, [100.0, 3.0])
    run = jax.jit(jax.vmap(functools.partial(pixel_operations.change_values, jnp.asarray(image))))
    ours = run(kinds[chosen].astype(np.int32), values[chosen].astype(np.float32))
    for result, (name, amount) in zip(np.asarray(ours), [names[n] for n in chosen], strict=True):
        assert difference(result, pillow_operations.apply(Image.fromarray(image), name, amount)) <= 1, (name, amount)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_transforms_of_images_that_are_not_square_equal_pillows(interpolation):
    image, rows = np.ascontiguousarray(picture()[:20]), [[[1, 0.25, -3.5], [0.125, 1, 2.5]], [[1, 0, 7], [0, 1, -4]]]
    resample = Image.Resampling[interpolation.upper()]
    for matrix in np.array(rows, np.float32):
        centered = matrix.copy()
        centered[:, 2] += matrix[:, :2].sum(1) / 2
        run = jax.jit(functools.partial(pixel_operations.transform, interpolation=interpolation, fill=jnp.array(FILL)))
        ours = run(image, (FIXED * centered).astype(np.int32), jnp.bool_(interpolation == "bicubic"))
        theirs = Image.fromarray(image).transform((33, 20), Image.Transform.AFFINE, matrix.ravel(), resample, fillcolor=FILL)
        assert difference(ours, theirs) <= 1


def test_colors_of_every_hue_turn_as_in_pillow():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (300, 300, 3)).astype(np.uint8)
    pixels[:150] = rng.choice([0, 1, 64, 85, 127, 128, 170, 254, 255], (150, 300, 3))  # grays, edges of the sectors, ties
    turn = jax.jit(pixel_operations.shift_hue)
    for share in (-0.5, -0.1, 0.0, 0.03, 0.5):
        for image in (pixels, lines(), np.ascontiguousarray(pixels[:, :3] // 128 * 255)):
            assert_turned(turn(image, jnp.float32(share)), turned(image, share), image)


@pytest.mark.parametrize(("name", "kind"), [("brightness", 1), ("saturation", 2), ("contrast", 3)])
def test_jitter_is_pillows_enhancement(name, kind):
    factors = {"brightness": 0.6, "contrast": 1.4, "saturation": 0.25, "hue": 0.1}
    run = jax.jit(lambda image, which: policies.jitter_once(image, which, {n: jnp.float32(f) for n, f in factors.items()}))
    ours = run(picture(), jnp.int32(list(factors).index(name)))
    assert difference(ours, pillow_operations.apply(Image.fromarray(picture()), Kind(kind), factors[name])) <= 1


def test_jitter_of_the_hue_turns_it_alone():
    factors = {"hue": jnp.float32(0.1), "brightness": jnp.float32(0.5)}
    ours = jax.jit(lambda image: policies.jitter_once(image, jnp.int32(0), factors))(picture())
    assert_turned(ours, turned(picture(), 0.1), picture())


def test_mean_gray_of_a_large_white_image_is_exact():
    assert int(jax.jit(pixel_operations.mean_gray)(np.full((4096, 4096, 3), 255, np.uint8))) == 255
