"""Every operation of the policies, at every magnitude, against Pillow's: at most 1 of 255 apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import pillow_operations
from PIL import Image

from jaxdp.data import pixel_operations, policies
from jaxdp.data.pixel_operations import Kind

SIZE, FILL = 33, (255, 3, 77)
SIGNED = (*policies.GEOMETRIC, *policies.BLENDS)
LEVELS = np.arange(21) / 20  # of the policy with increasing operations


def picture(seed=0, size=SIZE):
    """Smooth waves with noise, without the darkest and lightest values."""
    rng, (rows, columns) = np.random.default_rng(seed), np.mgrid[:size, :size]
    waves = np.stack([np.sin(rows / 7 + c) + 0.5 * np.cos(columns / (5 + c)) for c in range(3)], axis=-1)
    return np.clip(127 + 70 * waves + rng.normal(0, 12, (size, size, 3)), 20, 236).astype(np.uint8)


def difference(ours, pillows) -> int:
    """The largest distance of two images, of 255."""
    return int(np.abs(np.asarray(ours, int) - np.asarray(pillows, int)).max())


def binned_amounts(policy, operation):
    """[BINS, 2] amounts as `pillow_operations.apply` takes them, with both signs."""
    signs = np.array([1.0, -1.0]) if operation in SIGNED else np.array([1.0, 1.0])
    amounts = policies.magnitudes(policy, operation, SIZE)[:, None] * signs
    return 1 + amounts if operation in policies.BLENDS else -amounts if operation in ("right", "down") else amounts


def increasing_amount(operation, level, sign):
    """timm's amounts at a share `level` of the largest magnitude."""
    geometric = {"shear_x": 0.3, "shear_y": 0.3, "right": 0.45 * SIZE, "down": 0.45 * SIZE, "degrees": 30.0}
    if operation in geometric:  # in float32: 0.12 in float64 may put a pixel on the other side of the image's edge
        return float(np.float32(sign * level) * np.float32(geometric[operation]))
    if operation in policies.BLENDS:
        return max(0.1, 1 + sign * 0.9 * level)
    # Steps of float32 and float64 may differ where the product is whole.
    whole = {Kind.POSTERIZE: 4 - int(4 * level + 1e-6), Kind.SOLARIZE: 256 - int(256 * level + 1e-6)}
    return whole.get(operation, int(110 * level + 1e-6))


def increasing_rows(operations):
    """(rows, Operation of [rows] for the filters): every level with both signs."""
    rows = [(name, level, sign) for name in operations for level in LEVELS for sign in (1.0, -1.0)]
    index = jnp.array([policies.INCREASING.index(name) for name, _, _ in rows])
    level, sign = (jnp.array(column, jnp.float32) for column in zip(*((level, sign) for _, level, sign in rows), strict=True))
    make = functools.partial(policies.increasing_operation, size=SIZE, nearest=False)
    return rows, jax.jit(jax.vmap(make))(index, level, sign)


def test_nearest_operations_equal_pillows_at_every_magnitude():
    image, fill = picture(), jnp.array(FILL)
    run = jax.jit(
        jax.vmap(lambda one: pixel_operations.apply_operation(jnp.asarray(image), one, interpolation="nearest", fill=fill))
    )
    for policy in policies.SPACES:
        flat = [leaf.reshape(-1, *leaf.shape[3:]) for leaf in policies.table(policy, SIZE, True)[:3]]
        ours = np.asarray(run(pixel_operations.Operation(*flat))).reshape(-1, policies.BINS, 2, SIZE, SIZE, 3)
        for operation, results in zip(policies.OPERATIONS, ours, strict=True):
            for result, amount in zip(
                results.reshape(-1, SIZE, SIZE, 3), binned_amounts(policy, operation).ravel(), strict=True
            ):
                expected = pillow_operations.apply(Image.fromarray(image), operation, amount, fill=FILL)
                allowed = 0 if operation in policies.GEOMETRIC else 1
                assert difference(result, expected) <= allowed, (policy, operation, amount)


def test_filtered_operations_equal_pillows_at_every_magnitude():
    image, fill = picture(), jnp.array(FILL)
    tables = {policy: policies.table(policy, SIZE, False) for policy in policies.SPACES}
    rows = [
        (name, amount) for policy in tables for name in policies.GEOMETRIC for amount in binned_amounts(policy, name).ravel()
    ]
    increasing, operations = increasing_rows(policies.GEOMETRIC)
    rows += [(name, increasing_amount(name, level, sign)) for name, level, sign in increasing]
    first = policies.OPERATIONS.index("shear_x")
    matrices = [table.matrix[first : first + 5].reshape(-1, 2, 2, 3) for table in tables.values()]
    matrices = jnp.concatenate([*matrices, operations.matrix])
    resample = functools.partial(pixel_operations.transform, jnp.asarray(image), interpolation="random", fill=fill)
    run = jax.jit(jax.vmap(resample, in_axes=(0, None)))
    for cubic, filtered in ((False, Image.Resampling.BILINEAR), (True, Image.Resampling.BICUBIC)):
        for result, (name, amount) in zip(np.asarray(run(matrices, cubic)), rows, strict=True):
            expected = pillow_operations.apply(Image.fromarray(image), name, amount, resample=filtered, fill=FILL)
            assert difference(result, expected) <= 1, (name, amount, filtered)


def test_increasing_operations_on_values_equal_pillows_at_every_level():
    image = picture()
    rows, operations = increasing_rows([name for name in policies.INCREASING if isinstance(name, Kind)])
    run = jax.jit(jax.vmap(functools.partial(pixel_operations.change_values, jnp.asarray(image))))
    for result, (name, level, sign) in zip(np.asarray(run(operations.kind, operations.value)), rows, strict=True):
        expected = pillow_operations.apply(Image.fromarray(image), name, increasing_amount(name, level, sign))
        assert difference(result, expected) <= 1, (name, level, sign)


@pytest.mark.parametrize("size", [(20, 33), (33, 9)])
def test_operations_on_values_of_images_that_are_not_square_equal_pillows(size):
    image = np.ascontiguousarray(picture()[: size[0], : size[1]])
    amounts = dict.fromkeys(policies.BLENDS, 0.3) | {Kind.POSTERIZE: 3, Kind.SOLARIZE: 100, Kind.SOLARIZE_ADD: 60}
    kinds = [kind for kind in Kind if kind is not Kind.NONE]
    values = [amounts.get(kind, 0) for kind in kinds]
    run = jax.jit(jax.vmap(functools.partial(pixel_operations.change_values, jnp.asarray(image))))
    ours = run(jnp.array(kinds, jnp.int32), jnp.array(values, jnp.float32))
    for result, kind, value in zip(np.asarray(ours), kinds, values, strict=True):
        assert difference(result, pillow_operations.apply(Image.fromarray(image), kind, value)) <= 1, kind


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_transforms_of_images_that_are_not_square_equal_pillows(interpolation):
    image, rows = np.ascontiguousarray(picture()[:20]), [[[1, 0.25, -3.5], [0.125, 1, 2.5]], [[1, 0, 7], [0, 1, -4]]]
    resample = Image.Resampling[interpolation.upper()]
    for matrix in np.array(rows, np.float64):
        centered = matrix.copy()
        centered[:, 2] += matrix[:, :2].sum(1) / 2
        fixed = pixel_operations.fixed_point(centered, nearest=interpolation == "nearest")
        run = jax.jit(functools.partial(pixel_operations.transform, interpolation=interpolation, fill=jnp.array(FILL)))
        ours = run(jnp.asarray(image), fixed, jnp.bool_(interpolation == "bicubic"))
        theirs = Image.fromarray(image).transform((33, 20), Image.Transform.AFFINE, matrix.ravel(), resample, fillcolor=FILL)
        assert difference(ours, theirs) <= 1


def test_equalize_and_autocontrast_of_few_values_equal_pillows():
    flat, two, ramp = np.full((32, 32, 3), 90), np.full((32, 32, 3), 10), np.arange(32 * 32 * 3).reshape(32, 32, 3) % 256
    two[:3] = 200
    run = jax.jit(pixel_operations.change_values)
    for image in (flat, two, ramp):
        pixels = image.astype(np.uint8)
        for kind in (Kind.EQUALIZE, Kind.AUTO_CONTRAST):
            ours = run(pixels, jnp.int32(kind), jnp.float32(0))
            assert difference(ours, pillow_operations.apply(Image.fromarray(pixels), kind, 0)) <= 1


def test_colors_of_every_hue_turn_as_in_pillow():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (300, 300, 3)).astype(np.uint8)
    pixels[:150] = rng.choice([0, 1, 64, 85, 127, 128, 170, 254, 255], (150, 300, 3))  # grays, edges of the sectors, ties
    hue, saturation, value = (np.asarray(channel) for channel in Image.fromarray(pixels).convert("HSV").split())
    turn = jax.jit(pixel_operations.shift_hue)
    for share in (-0.5, -0.1, 0.0, 0.03, 0.5):
        turned = ((hue.astype(int) + int(share * 255)) % 256).astype(np.uint8)
        expected = Image.fromarray(np.stack([turned, saturation, value], axis=-1), "HSV").convert("RGB")
        assert difference(turn(pixels, jnp.float32(share)), expected) <= 1, share


@pytest.mark.parametrize(("name", "kind"), [("brightness", 1), ("saturation", 2), ("contrast", 3)])
def test_jitter_is_pillows_enhancement(name, kind):
    factors = {"brightness": 0.6, "contrast": 1.4, "saturation": 0.25, "hue": 0.1}
    run = jax.jit(lambda image, which: policies.jitter_once(image, which, {n: jnp.float32(f) for n, f in factors.items()}))
    ours = run(picture(), jnp.int32(list(factors).index(name)))
    assert difference(ours, pillow_operations.apply(Image.fromarray(picture()), Kind(kind), factors[name])) <= 1


def test_jitter_of_the_hue_turns_it_alone():
    factors = {"hue": jnp.float32(0.1), "brightness": jnp.float32(0.5)}
    ours = jax.jit(lambda image: policies.jitter_once(image, jnp.int32(0), factors))(picture())
    hue, *others = (np.asarray(channel) for channel in Image.fromarray(picture()).convert("HSV").split())
    turned = ((hue.astype(int) + int(0.1 * 255)) % 256).astype(np.uint8)
    assert difference(ours, Image.fromarray(np.stack([turned, *others], axis=-1), "HSV").convert("RGB")) <= 1


def test_mean_gray_of_a_large_white_image_is_exact():
    assert jax.eval_shape(pixel_operations.mean_gray, jax.ShapeDtypeStruct((4096, 4096, 3), jnp.uint8)).dtype == jnp.int32
    assert int(jax.jit(pixel_operations.mean_gray)(np.full((1500, 1500, 3), 255, np.uint8))) == 255
