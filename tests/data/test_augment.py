"""Random transforms against slow NumPy versions of their formulas, and against what they promise."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.images import assert_like_random_crops, smooth_image
from helpers.step import PIXELS, compiled_step, hyperparameters, initial_params, linear_config, make_batch, with_parts
from scipy import ndimage

from jaxdp import models
from jaxdp.choices import AUGMENTATIONS
from jaxdp.config import Augment, Config, Data
from jaxdp.data import augment, policies
from jaxdp.data.prefetch import to_global
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.objective import mean_loss, training_examples
from jaxdp.training.state import create_state

MIXED = with_parts(linear_config(), data={"mix": "cutmix", "augmentation": "none"})


def bilinear(image, row, column):
    """One sample at a fractional place, the edge repeating outside, in float64."""
    height, width, _ = image.shape
    row, column = np.clip(row, 0, height - 1), np.clip(column, 0, width - 1)
    r, c = min(int(row), height - 2), min(int(column), width - 2)
    a, b = row - r, column - c
    return (
        (1 - a) * (1 - b) * image[r, c]
        + (1 - a) * b * image[r, c + 1]
        + a * (1 - b) * image[r + 1, c]
        + a * b * image[r + 1, c + 1]
    )


def slow_paper_transform(image, out, ranges, u):
    """nnabla's function, pixel by pixel: the input place as an affine map of the (distorted) output place.

    One column of the output moves the input by (cos / sx, sin / sx), one row by (-sin / sy, cos / sy); a mirrored image has
    the horizontal parts negated. The values are from nnabla's ImageNet example.
    """
    height, width, _ = image.shape
    result = np.zeros((out, out, 3))
    scale = 0.77 * np.exp(u["scale"] * np.log(1.54 / 0.77))
    sx = scale * np.exp((u["aspect"] - 0.5) * np.log(1.3))
    sy = scale**2 / sx
    angle = -0.5 + 2 * u["angle"] * 0.5
    mirror = -1 if ranges.flip and u["flip"] < 0.5 else 1
    by_column = np.array([np.sin(angle), mirror * np.cos(angle)]) / sx  # (row, column) in the input
    by_row = np.array([np.cos(angle), -mirror * np.sin(angle)]) / sy
    middle = (out - 1) / 2
    center = np.array(
        [
            (u["row"] * (height * sy - out) + middle) / sy,
            (u["column"] * (width * sx - out) + middle) / sx,
        ]
    )
    d = np.exp((2 * u["distortion"] - 1) * 0.2) - 1
    half = out / 2
    for i in range(out):
        for j in range(out):
            y, x = (i - half) / half, (j - half) / half
            r2 = y**2 + x**2
            y, x = (half * p * (1 + d * r2) / (1 + d) + half for p in (y, x))
            place = center + (x - middle) * by_column + (y - middle) * by_row
            result[i, j] = (bilinear(image, *place) / 255 - 0.5) * 1.1 ** (2 * u["contrast"] - 1) + 0.5
    return 255 * result


@pytest.mark.parametrize("ranges", [Augment(), Augment(flip=False)])
def test_paper_transform_matches_its_formulas_in_numpy(ranges):
    image = smooth_image(20, 28).astype(np.float64)
    transform = jax.jit(functools.partial(augment.paper_transform, size=14, ranges=ranges))
    for seed in range(4):
        draws = augment.paper_draws(jax.random.key(seed))
        ours = transform(jnp.asarray(image, jnp.float32), draws)
        u = {name: np.asarray(value, np.float64) for name, value in draws.items()}
        expected = slow_paper_transform(image, 14, ranges, u)
        np.testing.assert_allclose(ours, expected, atol=0.03)


def test_paper_draws_are_uniform_and_independent():
    draws = jax.jit(lambda: jax.vmap(augment.paper_draws)(augment.keys_for(0, jnp.arange(4000, dtype=jnp.uint32))))()
    table = np.stack([np.asarray(v) for name, v in draws.items() if name != "contrast"])
    np.testing.assert_allclose(table.mean(1), 0.5, atol=0.025)
    np.testing.assert_allclose(table.var(1), 1 / 12, atol=0.005)
    assert np.abs(np.corrcoef(table) - np.eye(len(table))).max() < 0.06


def ramp(height, width):
    """An image whose pixels say where they are: row, column, 0."""
    rows, columns = np.mgrid[:height, :width]
    return jnp.asarray(np.stack([rows, columns, 0 * rows], axis=-1), jnp.float32)


@pytest.mark.parametrize(("height", "width"), [(40, 40), (30, 60)])
def test_random_resized_crop_stays_inside_with_bounded_area_and_ratio(height, width):
    out, ranges, keys = 20, Augment(min_area=0.3), augment.keys_for(0, jnp.arange(2000, dtype=jnp.uint32))
    crop = jax.vmap(lambda key: augment.random_resized_crop(ramp(height, width), key, size=out, ranges=ranges))
    crops = np.asarray(jax.jit(crop)(keys))
    step_down = (crops[:, 12, 10, 0] - crops[:, 7, 10, 0]) / 5  # in the middle, away from repeated edges
    step_right = (crops[:, 10, 12, 1] - crops[:, 10, 7, 1]) / 5
    tall, wide = step_down * out, np.abs(step_right) * out
    assert crops.min() >= 0
    assert tall.max() <= height + 1e-3
    assert wide.max() <= width + 1e-3
    share, ratio = tall * wide / (height * width), wide / tall
    assert share.min() >= 0.3 - 1e-3
    assert ratio.min() >= 3 / 4 - 1e-3
    assert ratio.max() <= 4 / 3 + 1e-3
    assert_like_random_crops(np.stack([tall, wide], axis=1), height, width, min_area=0.3)
    assert 0.4 < (step_right < 0).mean() < 0.6  # mirrored in half of the images


def test_augment_passes_the_configs_ranges_on(monkeypatch):
    """With the whole image as the only crop, random_resized_crop gives the image; with no padding, so does pad_and_crop."""
    monkeypatch.setattr(augment, "PADDING", 0)
    ranges = Augment(min_area=1.0, flip=False)
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 12, 12, 3)), jnp.uint8)
    for name in ("random_resized_crop", "pad_and_crop"):
        config = Config(data=Data(source="synthetic", image_size=12, augmentation=name), augment=ranges)
        out = jax.jit(augment.augment, static_argnums=0)(config, images, jnp.arange(3, dtype=jnp.uint32))
        np.testing.assert_allclose(out, images, atol=1e-3)


@pytest.mark.parametrize("axis", [0, 1])
def test_random_resized_crop_without_fitting_draw_takes_center_square(axis):
    """In an image of 10x100 no crop of at least 90 % of the area has the ratio."""
    ranges = Augment(min_area=0.9, flip=False)
    transform = jax.jit(functools.partial(augment.random_resized_crop, size=10, ranges=ranges))
    crop = np.asarray(transform(ramp(*((100, 10) if axis == 0 else (10, 100))), jax.random.key(0)))
    across, along = np.moveaxis(crop, axis, 0)[:, 0, axis], np.moveaxis(crop, axis, 1)[:, 0, 1 - axis]
    np.testing.assert_allclose(across, np.arange(45, 55), atol=1e-3)
    np.testing.assert_allclose(along, np.arange(10), atol=1e-3)


def test_pad_and_crop_returns_a_crop_of_the_padded_image(monkeypatch):
    assert augment.PADDING == 4  # He et al.; here fewer, so all crops come soon
    monkeypatch.setattr(augment, "PADDING", 2)
    image = np.random.default_rng(0).integers(0, 256, (6, 6, 3)).astype(np.uint8)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    possible = {
        crop.tobytes()
        for i, j in itertools.product(range(5), repeat=2)
        for crop in (padded[i : i + 6, j : j + 6], padded[i : i + 6, j : j + 6][:, ::-1])
    }
    keys = augment.keys_for(0, jnp.arange(400, dtype=jnp.uint32))
    crop = jax.jit(jax.vmap(lambda key: augment.pad_and_crop(jnp.asarray(image), key, size=6, ranges=Augment())))
    crops = np.asarray(crop(keys))
    seen = {crop.tobytes() for crop in crops}
    assert seen <= possible
    assert len(seen) > 0.9 * len(possible)


def test_resize_for_evaluation_takes_the_center_of_a_larger_image():
    """320 to 224 is the center 280 pixels at 4/5 of their size."""
    config = Config(data=Data(source="synthetic", image_size=224, stored_size=320))
    seen = np.asarray(jax.jit(functools.partial(augment.resize_for_evaluation, config))(ramp(320, 320)[None]))[0]
    assert seen.shape == (224, 224, 3)
    np.testing.assert_allclose(seen[:, 0, 0], 20 + (np.arange(224) + 0.5) * 1.25 - 0.5, atol=1e-3)
    np.testing.assert_allclose(seen[0, :, 1], seen[:, 0, 0], atol=1e-4)


@pytest.mark.parametrize("data", [{}, {"eval_size": 40}], ids=["no stored size", "prepared on the host"])
def test_images_that_the_host_prepares_for_evaluation_are_unchanged(data):
    config = Config(data=Data(source="synthetic", image_size=16, **data))
    images = ramp(40 if data else 16, 40 if data else 16)[None]
    assert augment.resize_for_evaluation(config, images) is images


@functools.partial(jax.jit, static_argnums=0)
def mix_batches(kind, alpha):
    config = Config(data=Data(mix=kind, mix_alpha=alpha))
    images = jnp.arange(4, dtype=jnp.float32)[:, None, None, None] * jnp.ones((4, 24, 24, 3))
    positions = jnp.arange(1200, dtype=jnp.uint32).reshape(300, 4)
    return jax.vmap(lambda batch: augment.mix(config, images, batch))(positions)


def mixed(kind, alpha):
    """(images, partner, share) of each of 300 batches of four images. Tests share the programs of a few kinds and alphas."""
    return list(zip(*map(np.asarray, mix_batches(kind, alpha)), strict=True))


def test_mixup_blends_images_by_the_returned_share():
    images, partner, share = next(batch for batch in mixed("mixup", 0.2) if 0.2 < batch[2][0] < 0.8)
    np.testing.assert_array_equal(partner, [3, 2, 1, 0])
    for row in range(4):
        np.testing.assert_allclose(images[row], share[row] * row + (1 - share[row]) * partner[row], rtol=1e-5)


def test_cutmix_pastes_a_rectangle_of_the_remaining_share():
    for images, partner, share in mixed("cutmix", 1.0)[:5]:
        for row in range(4):
            own = images[row] == row
            assert np.all(own | (images[row] == partner[row]))
            assert own.mean() == pytest.approx(share[row], abs=1e-6)
        pasted = np.argwhere(images[0, :, :, 0] == 3)
        if len(pasted):
            (top, left), (bottom, right) = pasted.min(0), pasted.max(0)
            assert len(pasted) == (bottom - top + 1) * (right - left + 1)


def test_cutmix_rectangle_that_touches_no_border_has_the_root_of_its_share_of_both_sides():
    """Yun et al., equation 2: a quarter of the area is half of the height and half of the width."""
    sizes = []
    black, white = jnp.zeros((1, 64, 32, 1)), jnp.ones((1, 64, 32, 1))
    cut = jax.jit(lambda seed: augment.cutmix(black, white, share=jnp.float32(0.75), key=jax.random.key(seed)))
    for seed in range(30):
        images, _ = cut(seed)
        rows, columns, _ = np.nonzero(np.asarray(images)[0])
        if rows.min() > 0 and rows.max() < 63 and columns.min() > 0 and columns.max() < 31:
            sizes.append((np.ptp(rows) + 1, np.ptp(columns) + 1))
    assert len(sizes) > 2
    np.testing.assert_allclose(sizes, len(sizes) * [(32, 16)], atol=1)


@pytest.mark.slow
def test_mixup_or_cutmix_is_one_of_the_two_with_its_own_alpha():
    found, cuts, blends = mixed("mixup_or_cutmix", 0.2), mixed("cutmix", 1.0), mixed("mixup", 0.2)

    def equal(one, other):
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    kinds = [(equal(one, cut), equal(one, blend)) for one, cut, blend in zip(found, cuts, blends, strict=True)]
    assert set(kinds) == {(True, False), (False, True)}
    assert np.mean(kinds, axis=0)[0] == pytest.approx(0.5, abs=0.12)  # 3.4 standard deviations


def test_mix_share_follows_the_beta_distribution():
    shares = [share[0] for _, _, share in mixed("mixup", 0.2)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.07)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * 0.2 + 1)), rel=0.2)


@pytest.mark.slow
def test_mixed_step_has_no_permutation_and_equals_other_meshes(normalized_linear):
    losses = []
    for shape in ((1, 1), (2, 2)):
        mesh, model = make_mesh(*shape), models.create(MIXED.model)
        state = create_state(MIXED, model, mesh)._replace(params=initial_params(MIXED)[0])
        arguments = state, to_global(make_batch(), mesh), hyperparameters(0.1)
        lowered = compiled_step(MIXED, shape).lower(*arguments)
        assert "collective_permute" not in lowered.as_text()
        _, metrics = lowered.compile()(*arguments)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_random_numbers_of_different_uses_are_different():
    """The crops split the key of a position into numbers 0 to 2."""
    uses = [0, augment.MIX_KEY, augment.MODEL_KEY, policies.POLICY_KEY, policies.JITTER_KEY, policies.ERASE_KEY]
    assert len(set(uses)) == len(uses)
    for use in uses[1:3]:
        expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 40), use)
        found = augment.worker_key(7, jnp.array([40, 41, 45], jnp.uint32), use)
        np.testing.assert_array_equal(*map(jax.random.key_data, (found, expected)))


def test_mixed_loss_weighs_both_smoothed_targets(normalized_linear):
    """The loss of one worker's batch against NumPy: share x own target + (1 - share) x the partner's, smoothing in both."""
    model, (params, stats) = models.create(MIXED.model), initial_params(MIXED)
    batch = {name: rows[:8] for name, rows in make_batch().items()}

    def one(params, batch):
        examples = training_examples(MIXED, model, batch, seed=MIXED.seed, pixel_stats=PIXELS)
        return mean_loss(MIXED, model.apply(params, stats, examples.images, train=True)[0], examples)

    @jax.jit
    def mixed_logits(images, positions):
        images, partner, share = augment.mix(MIXED, augment.normalize(images, *PIXELS), positions)
        return model.apply(params, stats, images, train=True)[0], partner, share

    logits, partner, share = mixed_logits(batch["images"], batch["positions"])
    logits = np.asarray(logits, np.float64)
    log_softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    onehot = np.eye(7)[batch["labels"]]
    mixed_target = np.asarray(share)[:, None] * onehot + (1 - np.asarray(share)[:, None]) * onehot[np.asarray(partner)]
    target = 0.9 * mixed_target + 0.1 / 7
    assert len(set(batch["labels"][np.asarray(partner)] - batch["labels"])) > 1
    assert float(jax.jit(one)(params, batch)) == pytest.approx(-(target * log_softmax).sum(1).mean(), rel=1e-5)


def random_images():
    return np.random.default_rng(0).integers(0, 256, (6, 16, 20, 3)).astype(np.uint8)


def test_resample_affine_matches_scipy():
    affine = np.array([[0.9, 0.2, 0.05], [-0.1, 1.1, -0.08]])
    image = random_images()[0].astype(np.float64)
    # scipy maps output pixel to input pixel; ours is relative to the center and the size of the image
    size, center = np.array([16.0, 20.0]), np.array([7.5, 9.5])
    matrix = np.diag(size) @ affine[:, :2] @ np.diag(1 / size)
    offset = center + size * affine[:, 2] - matrix @ center
    expected = np.stack(
        [ndimage.affine_transform(image[..., c], matrix, offset, order=1, mode="nearest") for c in range(3)], axis=-1
    )
    ours = jax.jit(augment.resample_affine)(jnp.asarray(image, jnp.float32), jnp.asarray(affine, jnp.float32))
    np.testing.assert_allclose(ours, expected, atol=0.05)


def with_data(seed=1, **data) -> Config:
    return Config(seed=seed, data=Data(image_size=16, **data))


@pytest.mark.parametrize("name", sorted(set(AUGMENTATIONS) - {"none"}))
def test_augment_depends_on_seed_and_position_only(name):
    images, positions, order = random_images()[:, :, :16], np.arange(40, 46, dtype=np.uint32), np.array([3, 0, 5, 2, 1, 4])
    apply = jax.jit(augment.augment, static_argnums=0)
    whole = apply(with_data(augmentation=name), images, positions)
    moved = apply(with_data(augmentation=name), images[order], positions[order])
    np.testing.assert_allclose(whole[order], moved, atol=1e-2)
    assert not np.allclose(whole, apply(with_data(seed=2, augmentation=name), images, positions), atol=1)
    assert not np.allclose(whole, apply(with_data(augmentation=name), images, positions + 1), atol=1)


def test_normalize_subtracts_the_mean_and_divides_by_the_deviation_of_each_channel():
    images, mean, std = random_images(), (123.0, 116.5, 103.0), (58.0, 57.0, 61.5)
    expected = (images.astype(np.float64) - mean) / std
    np.testing.assert_allclose(augment.normalize(jnp.asarray(images), mean, std), expected, rtol=1e-5, atol=1e-6)


def test_affine_maps_have_the_ranges_of_rotation_scale_shear_and_shift():
    """Of A = R(angle) [[1, shear], [0, 1]] scale, by its factors."""
    affines = np.asarray(jax.jit(jax.vmap(augment.affine_matrix))(augment.keys_for(0, jnp.arange(4000, dtype=jnp.uint32))))
    first, second = affines[:, :, 0], affines[:, :, 1]
    scale, angle = np.linalg.norm(first, axis=1), np.arctan2(first[:, 1], first[:, 0])
    shear = (first * second).sum(1) / scale**2
    for values, limit in ((angle, 0.2), (np.log(scale), 0.1), (shear, 0.15), *((affines[:, row, 2], 0.08) for row in (0, 1))):
        quantiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]) / limit
        np.testing.assert_allclose(quantiles, [-1, -0.5, 0, 0.5, 1], atol=0.07)
