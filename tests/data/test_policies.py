"""The random draws of the policies, of color jitter and of erasing against their published distributions."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.config import Augment, Config, Data
from jaxdp.data import pixel_operations, policies
from jaxdp.data.augment import augment, keys_for
from jaxdp.data.pixel_operations import FIXED, Kind

MEAN, SIZE = (123.675, 116.28, 103.53), 16


def config_of(policy="none", seed=0, data=None, **ranges) -> Config:
    fields = {"source": "given", "image_size": SIZE, "auto_augment": policy} | (data or {})
    return Config(seed=seed, data=Data(**fields), augment=Augment(**ranges))


def drawn(config, count):
    """Operations of `count` positions: leaves [count, operations, ...]."""
    keys = keys_for(config.seed, jnp.arange(count, dtype=jnp.uint32))
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda key: policies.draw_operations(config, key, SIZE)))(keys))


def identities(operations) -> list[bytes]:
    """Kind, value and moved coordinates of every operation as bytes."""
    moved = np.asarray(operations.matrix) != [[FIXED, 0, FIXED // 2], [0, FIXED, FIXED // 2]]
    columns = np.ravel(operations.kind), np.ravel(operations.value) + 0.0, moved.reshape(-1, 6)  # -0.0 is 0.0
    return [b"".join(part.tobytes() for part in row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize(("policy", "magnitude"), [("rand_augment", None), ("rand_augment", 20.0), ("trivial_augment", None)])
def test_operations_magnitudes_and_signs_have_the_published_frequencies(policy, magnitude):
    """Chi-square of every distinct operation: 14, the magnitudes and the signs have the same probability each."""
    amounts = policies.amounts(policy, SIZE)
    if policy == "rand_augment":  # one magnitude
        amounts = amounts[:, [round(9 if magnitude is None else magnitude)]]
    index = np.repeat(np.arange(len(amounts)), amounts[0].size)
    make = jax.vmap(functools.partial(policies.operation_of, policies.OPERATIONS, size=SIZE))
    possible = identities(make(index, amounts.ravel()))
    expected = {row: count / len(possible) for row, count in collections.Counter(possible).items()}
    found = identities(drawn(config_of(policy, magnitude=magnitude), 30_000))
    counts = collections.Counter(found)
    assert counts.keys() <= expected.keys()
    freedom = len(expected) - 1
    statistic = sum((counts[row] - len(found) * share) ** 2 / (len(found) * share) for row, share in expected.items())
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)
    assert len(found) == (30_000 if policy == "trivial_augment" else 60_000)


def test_table_has_the_published_operations_and_strongest_magnitudes():
    assert len(policies.OPERATIONS) == 14
    assert len(set(policies.INCREASING)) == 15
    for policy, shear, shift, degrees, factor, bits in (
        ("rand_augment", 0.3, 101, 30.0, 0.9, 4),  # 150 / 331 of 224 pixels
        ("trivial_augment", 0.99, 32, 135.0, 0.99, 2),
    ):
        last = {operation: policies.magnitudes(policy, operation, 224)[-1] for operation in policies.OPERATIONS}
        expected = {"shear_x": shear, "shear_y": shear, "right": shift, "down": shift, "degrees": degrees}
        expected |= {Kind.COLOR: factor, Kind.POSTERIZE: bits, Kind.SOLARIZE: 0.0}
        assert {name: last[name] for name in expected} == pytest.approx(expected)


def test_increasing_operations_are_applied_half_of_the_time_at_normal_magnitudes():
    """timm's rand-m7-mstd0.5-inc1: 15 operations, each with probability 1 / 30, and bilinear or bicubic."""
    operations = drawn(config_of("rand_augment_increasing"), 20_000)
    moved = (operations.matrix[..., :2] != FIXED * np.eye(2)).any((-2, -1))
    shifted = ~moved & (operations.matrix[..., 2] != FIXED // 2).any(-1)
    kinds, total = operations.kind, operations.kind.size
    shares = {kind: (kinds == kind).sum() / total for kind in Kind}
    for kind, share in shares.items():
        if kind is not Kind.NONE:
            assert share == pytest.approx(1 / 30, abs=4 * np.sqrt(1 / 30 / total)), kind
    assert moved.mean() == pytest.approx(3 / 30, abs=0.006)
    assert shifted.mean() == pytest.approx(2 / 30, abs=0.005)
    change = operations.value[kinds == Kind.COLOR] - 1
    assert (change > 0).mean() == pytest.approx(0.5, abs=0.06)
    assert np.abs(change).mean() == pytest.approx(0.9 * 0.7, abs=0.01)
    assert np.abs(change).std() == pytest.approx(0.9 * 0.05, rel=0.1)
    assert operations.cubic.mean() == pytest.approx(0.5, abs=0.02)


def test_increasing_magnitudes_are_clipped_to_their_range():
    values = drawn(config_of("rand_augment_increasing", magnitude=10.0), 3000)
    factors = values.value[values.kind == Kind.BRIGHTNESS]
    assert factors.min() == pytest.approx(0.1)
    assert factors.max() == pytest.approx(1.9)
    assert (np.abs(factors - 1) > 0.899).mean() == pytest.approx(0.5, abs=0.1)  # half of the normal numbers are above 10
    values = drawn(config_of("rand_augment_increasing", magnitude=0.0), 3000)
    assert (values.value[values.kind == Kind.BRIGHTNESS] == 1).mean() == pytest.approx(0.5, abs=0.1)


def test_magnitudes_are_31_even_steps_from_none_to_the_strongest():
    even = np.linspace(0, 1, 31)
    for policy, space in policies.SPACES.items():
        expected = {"shear_x": space.shear * even, "degrees": space.degrees * even}
        expected |= {Kind.SHARPNESS: space.blend * even, Kind.SOLARIZE: 255 * (1 - even), Kind.EQUALIZE: 0 * even}
        expected |= {Kind.POSTERIZE: 8 - np.round(space.bits * np.arange(31) / 30)}
        for operation, values in expected.items():
            np.testing.assert_allclose(policies.magnitudes(policy, operation, 224), values, rtol=1e-6, atol=1e-5)


def test_steps_of_magnitudes_are_pytorchs_to_the_bit():
    torch = pytest.importorskip("torch", reason="needs the extra peers")
    for start, end in ((0.0, 0.3), (0.0, 0.9), (0.0, 0.99), (0.0, 135.0), (255.0, 0.0), *((0.0, n / 7) for n in range(1, 200))):
        np.testing.assert_array_equal(policies.linspace(start, end), torch.linspace(start, end, 31).double().numpy())


@pytest.mark.parametrize(("interpolation", "cubic"), [("nearest", False), ("bilinear", False), ("bicubic", True)])
def test_a_config_chooses_the_filter_of_operations(interpolation, cubic):
    operations = drawn(config_of("trivial_augment", operation_interpolation=interpolation), 500)
    np.testing.assert_array_equal(operations.cubic, np.full((500, 1), cubic))


@functools.partial(jax.jit, static_argnums=0)
def changed(config, seed, images, positions):
    """All random changes of the pixels, before normalization and after it."""
    config = dataclasses.replace(config, seed=seed)
    pixels = policies.change_pixels(config, augment(config, images, positions), positions, mean=MEAN)
    return pixels, policies.erase(config, pixels.astype(jnp.float32), positions)


@pytest.mark.parametrize(
    "config",
    [
        config_of("rand_augment", color_jitter=(0.0, 0.0, 0.4), erase_probability=0.7),
        config_of(data={"source": "synthetic", "augmentation": "random_resized_crop"}, color_jitter=(0.0, 0.9)),
    ],
    ids=["crops of the decoding threads", "crops on the device"],
)
def test_results_depend_on_seed_and_position_only(config):
    images = np.random.default_rng(0).integers(0, 256, (6, SIZE, SIZE, 3)).astype(np.uint8)
    positions, order = np.arange(40, 46, dtype=np.uint32), np.array([3, 0, 5, 2, 1, 4])
    whole, moved = changed(config, 3, images, positions), changed(config, 3, images[order], positions[order])
    assert whole[0].dtype == jnp.uint8
    for one, other in zip(whole, moved, strict=True):
        np.testing.assert_array_equal(one[order], other)
    for others in (changed(config, 3, images, positions + 1), changed(config, 4, images, positions)):
        assert not np.array_equal(whole[0], others[0])


def test_all_options_off_change_nothing():
    images = jnp.ones((2, SIZE, SIZE, 3))
    assert policies.change_pixels(config_of(), images, jnp.arange(2, dtype=jnp.uint32), mean=MEAN) is images
    assert policies.erase(config_of(), images, jnp.arange(2, dtype=jnp.uint32)) is images


def test_pixels_of_a_crop_on_the_device_are_rounded_and_clipped():
    """Before color jitter, here with a factor of 1."""
    values = np.array([-3.0, 0.4, 0.6, 99.5, 100.5, 254.7, 300.0], np.float32)
    images = np.broadcast_to(values[:, None, None, None], (7, 2, 2, 3))
    change = jax.jit(functools.partial(policies.change_pixels, config_of(color_jitter=(1e-12,)), mean=MEAN))
    pixels = change(images, jnp.arange(7, dtype=jnp.uint32))
    np.testing.assert_array_equal(pixels[:, 0, 0, 0], [0, 0, 1, 100, 100, 255, 255])


def test_places_outside_have_the_published_color(monkeypatch):
    """A shift of a white image: black as in torchvision, the mean as in timm. Operations on values are left out.

    Only those of TrivialAugment may leave nothing of so small an image, whatever the size of the batch.
    """
    white, positions = np.full((200, SIZE, SIZE, 3), 255, np.uint8), np.arange(200, dtype=np.uint32)
    monkeypatch.setattr(policies, "DRAWS", 1)
    monkeypatch.setattr(pixel_operations, "change_values", lambda image, kind, value: image)
    for config, color in (
        (config_of("trivial_augment"), (0, 0, 0)),
        (config_of("rand_augment"), (0, 0, 0)),
        (config_of("rand_augment_increasing", operation_interpolation="nearest"), (124, 116, 104)),
    ):
        pixels = np.asarray(jax.jit(functools.partial(policies.change_pixels, config, mean=MEAN))(white, positions))
        colored = (pixels == color).all(-1).any((1, 2))
        assert 0.1 < colored.mean() < 0.6
        assert config.data.auto_augment == "trivial_augment" or (pixels == 255).all(-1).any((1, 2)).all()


def test_a_registered_policy_gets_each_image_with_the_key_of_its_seed_and_position():
    jaxdp.register_augmentation("noise", lambda image, key: image + jax.random.uniform(key, image.shape))
    config, images, positions = config_of("noise", seed=4), jnp.zeros((3, 2, 2, 3)), jnp.arange(3, dtype=jnp.uint32)
    for seed, own in ((None, 4), (9, 9)):
        keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(own), n), policies.POLICY_KEY) for n in range(3)]
        changed = policies.change_pixels(config, images, positions, mean=MEAN, seed=seed)
        np.testing.assert_allclose(changed / 255, [jax.random.uniform(key, (2, 2, 3)) for key in keys], rtol=1e-5)


def test_jitter_factors_are_uniform_in_their_range():
    gray, positions = np.full((2000, 2, 2, 3), 100, np.uint8), np.arange(2000, dtype=np.uint32)
    config = config_of(color_jitter=(0.4,))
    change = jax.jit(functools.partial(policies.change_pixels, config, mean=MEAN))
    factors = np.asarray(change(gray, positions))[:, 0, 0, 0] / 100
    np.testing.assert_allclose(np.quantile(factors, [0, 0.25, 0.5, 0.75, 1]), [0.6, 0.8, 1.0, 1.2, 1.4], atol=0.03)


def test_jitter_turns_the_hue_by_a_uniform_share_of_at_most_its_strength():
    red, positions = np.zeros((1000, 1, 1, 3), np.uint8), np.arange(1000, dtype=np.uint32)
    red[..., 0] = 240
    change = jax.jit(functools.partial(policies.change_pixels, config_of(color_jitter=(0.0, 0.0, 0.0, 0.1)), mean=MEAN))
    turned = np.asarray(change(red, positions))[:, 0, 0].astype(int)
    share = (turned[:, 1] - turned[:, 2]) / 240 / 6  # from red to yellow, or to magenta
    np.testing.assert_allclose(np.quantile(share, [0, 0.25, 0.5, 0.75, 1]), [-0.1, -0.05, 0, 0.05, 0.1], atol=0.012)


def test_jitter_has_its_parts_in_every_order():
    """Brightness and contrast of a two-colored image do not commute: both orders are drawn, each half of the time."""
    image = jnp.zeros((4, 4, 3), jnp.uint8).at[:2].set(200)
    keys = keys_for(0, jnp.arange(400, dtype=jnp.uint32))
    strengths = {"brightness": 0.9, "contrast": 0.9}
    ours = np.asarray(jax.jit(jax.vmap(lambda key: policies.jitter(image, key, strengths=strengths)))(keys))

    @jax.jit
    @jax.vmap
    def brightness_first(key):
        _, draw = jax.random.split(key)
        factors = {name: 0.1 + 1.8 * u for name, u in zip(strengths, jax.random.uniform(draw, (2,)), strict=True)}
        return policies.jitter_once(policies.jitter_once(image, jnp.int32(0), factors), jnp.int32(1), factors)

    same = (ours == np.asarray(brightness_first(keys))).all((1, 2, 3))
    assert 0.4 < same.mean() < 0.75  # some other orders give equal pixels


@pytest.mark.parametrize("size", [(32, 32), (224, 224), (300, 150)])
def test_erased_rectangles_have_the_published_areas_ratios_and_places(size):
    boxes = jax.jit(jax.vmap(lambda key: jnp.stack(policies.erased_box(key, size))))
    top, left, tall, wide = np.asarray(boxes(keys_for(0, jnp.arange(4000, dtype=jnp.uint32)))).T
    area, ratio = tall * wide / (size[0] * size[1]), tall / wide
    rounded = 0.2 if size[0] == 32 else 0.02  # sides are whole pixels
    assert area.min() > 0.02 * (1 - 2 * rounded)
    assert area.max() < 0.33 * (1 + rounded)
    assert ratio.min() > 0.3 * (1 - 2 * rounded)
    assert ratio.max() < 3.3 * (1 + 2 * rounded)
    assert (tall.max() < size[0]) & (wide.max() < size[1])
    # Sides below the image's exclude some large and long rectangles, so the quantiles are those of the accepted draws.
    rng = np.random.default_rng(0)
    areas, ratios = rng.uniform(0.02, 0.33, 200_000), np.exp(rng.uniform(np.log(0.3), np.log(3.3), 200_000))
    shape = size[0] / size[1]
    fits = (np.sqrt(areas * ratios / shape) < 1) & (np.sqrt(areas / ratios * shape) < 1)
    for ours, expected in ((area, areas[fits]), (np.log(ratio), np.log(ratios[fits]))):
        np.testing.assert_allclose(*(np.quantile(x, [0.1, 0.5, 0.9]) for x in (ours, expected)), atol=0.06 * np.ptp(expected))
    for start, side, whole in ((top, tall, size[0]), (left, wide, size[1])):
        assert start.min() == 0
        assert (start + side).max() == whole
        assert np.mean(start / (whole - side)) == pytest.approx(0.5, abs=0.02)


def test_erasing_replaces_by_the_mean_with_the_probability():
    ones, positions = jnp.ones((600, 32, 32, 3)), np.arange(600, dtype=np.uint32)
    changed = np.asarray(jax.jit(policies.erase, static_argnums=0)(config_of(erase_probability=0.25), ones, positions))
    erased = (changed == 0).all(-1)
    assert np.isin(changed, [0, 1]).all()
    assert erased.any((1, 2)).mean() == pytest.approx(0.25, abs=0.07)


@pytest.mark.parametrize("size", [(24, 10), (9, 30), (1, 40)])
def test_erasing_replaces_the_drawn_rectangle_alone(size):
    """None in an image of one row, which no rectangle is lower than."""
    ranges, keys = Augment(erase_probability=1.0), keys_for(2, jnp.arange(60, dtype=jnp.uint32))

    @jax.jit
    @jax.vmap
    def both(key):
        box = policies.erased_box(jax.random.split(key, 3)[1], size)
        return policies.erase_one(jnp.ones((*size, 3)), key, ranges=ranges), jnp.stack(box)

    changed, boxes = map(np.asarray, both(keys))
    expected = np.ones(changed.shape)
    for image, (top, left, tall, wide) in zip(expected, boxes, strict=True):
        image[top : top + tall, left : left + wide] = 0
    np.testing.assert_array_equal(changed, expected)
    assert (boxes[:, 2].max() == 0) == (expected.min() == 1) == (size[0] == 1)
