"""Random transforms against slow NumPy versions of their formulas, and against what they promise."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.config import Augment, Config, ConfigError, Data, Mesh, Model, Phase, Schedule
from jaxdp.data import augment
from jaxdp.data.feed import put
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import make_plan
from jaxdp.validation import from_json, to_json


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


def slow_paper_transform(image, out, ranges, u, padding=0, normal=0.0):
    """nnabla's function, pixel by pixel: the input place as an affine map of the (distorted) output place.

    One column of the output moves the input by (cos / sx, sin / sx), one row by (-sin / sy, cos / sy); a mirrored image has
    the horizontal parts negated. `normal`: the standard normal numbers of the noise.
    """
    height, width, _ = image.shape
    result = np.zeros((out, out, 3))
    scale = ranges.min_scale * np.exp(u["scale"] * np.log(ranges.max_scale / ranges.min_scale))
    sx = scale * np.exp((u["aspect"] - 0.5) * np.log(ranges.aspect))
    sy = scale**2 / sx
    angle = -ranges.angle + 2 * u["angle"] * ranges.angle
    mirror = -1 if ranges.flip and u["flip"] < 0.5 else 1
    by_column = np.array([np.sin(angle), mirror * np.cos(angle)]) / sx  # (row, column) in the input
    by_row = np.array([np.cos(angle), -mirror * np.sin(angle)]) / sy
    middle = (out - 1) / 2
    centre = np.array(
        [
            (u["row"] * ((height + 2 * padding) * sy - out) + middle) / sy - padding,
            (u["column"] * ((width + 2 * padding) * sx - out) + middle) / sx - padding,
        ]
    )
    d = np.exp((2 * u["distortion"] - 1) * ranges.distortion) - 1
    half = out / 2
    for i in range(out):
        for j in range(out):
            y, x = (i - half) / half, (j - half) / half
            r2 = y**2 + x**2
            y, x = (half * p * (1 + d * r2) / (1 + d) + half for p in (y, x))
            place = centre + (x - middle) * by_column + (y - middle) * by_row
            pixel = bilinear(image, *place) / 255 + (2 * u["brightness"] - 1) * ranges.brightness
            contrast = ranges.contrast ** (2 * u["contrast"] - 1)
            result[i, j] = (pixel - ranges.contrast_centre) * contrast + ranges.contrast_centre
    return 255 * (result + normal * u["noise"] * ranges.noise)


def smooth_image(height, width):
    rows, columns = np.mgrid[:height, :width]
    waves = [np.sin(rows / (2 + c) + columns / 3) + np.cos(columns / (4 - c)) for c in range(3)]
    return 127 + 60 * np.stack(waves, axis=-1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "ranges",
    [
        Augment(),
        Augment(flip=False, brightness=0.3, contrast=2.0, angle=3.0, distortion=0.7),
        Augment(aspect=2.0, angle=1.0, padding=3, noise=0.3, contrast=3.0),
    ],
)
def test_the_papers_transform_equals_its_formulas_in_numpy(seed, ranges):
    image = smooth_image(20, 28)
    draws = augment.paper_draws(jax.random.key(seed))
    ours = augment.paper_transform(jnp.asarray(image, jnp.float32), 14, ranges, draws)
    u = {name: np.asarray(value, np.float64) for name, value in draws.items() if name != "key"}
    normal = np.asarray(jax.random.normal(draws["key"], (14, 14, 3)), np.float64)
    expected = slow_paper_transform(image, 14, ranges, u, ranges.padding or 0, normal)
    np.testing.assert_allclose(ours, expected, atol=0.03)


def test_the_papers_noise_has_the_drawn_deviation():
    ranges = Augment(noise=0.2, contrast=1.0)
    draws = augment.paper_draws(jax.random.key(0)) | {"noise": jnp.float32(0.5)}
    grey = jnp.full((64, 64, 3), 100.0)
    ours = np.asarray(augment.paper_transform(grey, 64, ranges, draws))
    assert ours.std() == pytest.approx(255 * 0.1, rel=0.03)
    assert ours.mean() == pytest.approx(100, abs=1.0)


def test_the_papers_draws_are_uniform_and_independent_between_images():
    draws = jax.vmap(augment.paper_draws)(augment.keys_for(0, jnp.arange(4000, dtype=jnp.uint32)))
    table = np.stack([np.asarray(v) for name, v in draws.items() if name not in ("key", "contrast")])
    np.testing.assert_allclose(table.mean(1), 0.5, atol=0.025)
    np.testing.assert_allclose(table.var(1), 1 / 12, atol=0.005)
    assert np.abs(np.corrcoef(table) - np.eye(len(table))).max() < 0.06


def ramp(height, width):
    """An image whose pixels say where they are: row, column, 0."""
    rows, columns = np.mgrid[:height, :width]
    return jnp.asarray(np.stack([rows, columns, 0 * rows], axis=-1), jnp.float32)


@pytest.mark.parametrize(("height", "width"), [(40, 40), (30, 60)])
def test_random_resized_crop_takes_boxes_inside_the_image_of_the_promised_area_and_ratio(height, width):
    out, ranges, keys = 20, Augment(min_area=0.3), augment.keys_for(0, jnp.arange(300, dtype=jnp.uint32))
    crops = np.asarray(jax.vmap(lambda key: augment.random_resized_crop(ramp(height, width), out, ranges, key))(keys))
    step_down = (crops[:, 12, 10, 0] - crops[:, 7, 10, 0]) / 5  # in the middle, away from repeated edges
    step_right = (crops[:, 10, 12, 1] - crops[:, 10, 7, 1]) / 5
    tall, wide = step_down * out, np.abs(step_right) * out
    assert crops.min() >= 0
    assert tall.max() <= height + 1e-3
    assert wide.max() <= width + 1e-3
    share, ratio = tall * wide / (height * width), wide / tall
    assert share.min() >= 0.3 - 1e-3
    assert share.max() <= 1 + 1e-3
    assert ratio.min() >= 3 / 4 - 1e-3
    assert ratio.max() <= 4 / 3 + 1e-3
    assert 0.4 < (step_right < 0).mean() < 0.6  # mirrored in half of the images


def test_the_ranges_of_the_config_reach_every_transform():
    """With the whole image as the only crop, random_resized_crop gives the image; with no padding, so does pad_and_crop."""
    ranges = Augment(min_area=1.0, flip=False, padding=0)
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 12, 12, 3)), jnp.uint8)
    for name in ("random_resized_crop", "pad_and_crop"):
        config = Config(data=Data(source="synthetic", image_size=12, augmentation=name), augment=ranges)
        out = augment.augment(config, images, jnp.arange(3, dtype=jnp.uint32))
        np.testing.assert_allclose(out, images, atol=1e-3)


def test_random_resized_crop_falls_back_to_the_centre_square():
    """In an image of 10x100 no crop of at least 90 % of the area has the ratio."""
    crop = np.asarray(augment.random_resized_crop(ramp(10, 100), 10, Augment(min_area=0.9, flip=False), jax.random.key(0)))
    np.testing.assert_allclose(crop[:, 0, 0], np.arange(10), atol=1e-3)
    np.testing.assert_allclose(crop[0, :, 1], np.arange(45, 55), atol=1e-3)


def test_pad_and_crop_gives_one_of_the_crops_of_the_padded_image():
    image = np.random.default_rng(0).integers(0, 256, (6, 6, 3)).astype(np.uint8)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    possible = {
        crop.tobytes()
        for i, j in itertools.product(range(5), repeat=2)
        for crop in (padded[i : i + 6, j : j + 6], padded[i : i + 6, j : j + 6][:, ::-1])
    }
    keys = augment.keys_for(0, jnp.arange(400, dtype=jnp.uint32))
    crops = np.asarray(jax.vmap(lambda key: augment.pad_and_crop(jnp.asarray(image), Augment(padding=2), key))(keys))
    seen = {crop.tobytes() for crop in crops}
    assert seen <= possible
    assert len(seen) > 0.9 * len(possible)


def test_evaluation_of_a_larger_stored_image_sees_its_centre():
    """320 to 224 is the centre 280 pixels at 4/5 of their size."""
    config = Config(data=Data(source="synthetic", image_size=224, stored_size=320))
    seen = np.asarray(augment.for_evaluation(config, ramp(320, 320)[None]))[0]
    assert seen.shape == (224, 224, 3)
    np.testing.assert_allclose(seen[:, 0, 0], 20 + (np.arange(224) + 0.5) * 1.25 - 0.5, atol=1e-3)
    np.testing.assert_allclose(seen[0, :, 1], seen[:, 0, 0], atol=1e-4)


def mixed(kind, alpha=1.0, seed=0):
    config = Config(seed=seed, data=Data(mix=kind, mix_alpha=alpha))
    images = jnp.arange(4, dtype=jnp.float32)[:, None, None, None] * jnp.ones((4, 32, 32, 3))
    return [np.asarray(x) for x in augment.mix(config, images, jnp.arange(8, 12, dtype=jnp.uint32))]


def test_mixup_blends_by_the_share_that_the_targets_get():
    images, partner, share = mixed("mixup")
    np.testing.assert_array_equal(partner, [3, 2, 1, 0])
    assert 0 < share[0] < 1
    for row in range(4):
        np.testing.assert_allclose(images[row], share[row] * row + (1 - share[row]) * partner[row], rtol=1e-5)


def test_cutmix_pastes_a_rectangle_whose_area_the_targets_lose():
    for seed in range(5):
        images, partner, share = mixed("cutmix", seed=seed)
        for row in range(4):
            own = images[row] == row
            assert np.all(own | (images[row] == partner[row]))
            assert own.mean() == pytest.approx(share[row], abs=1e-6)
        pasted = np.argwhere(images[0, :, :, 0] == 3)
        if len(pasted):
            (top, left), (bottom, right) = pasted.min(0), pasted.max(0)
            assert len(pasted) == (bottom - top + 1) * (right - left + 1)


def test_the_share_follows_the_beta_distribution():
    shares = [mixed("mixup", alpha=0.4, seed=seed)[2][0] for seed in range(300)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.07)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.2)


@pytest.mark.parametrize(
    ("kind", "mesh_shape"),
    [("cutmix", (2, 2)), *(pytest.param(*one, marks=pytest.mark.slow) for one in [("cutmix", (1, 1)), ("mixup", (1, 2))])],
)
def test_mixing_stays_within_a_worker_and_is_the_same_on_any_mesh(kind, mesh_shape):
    from test_step import BATCH, PER_WORKER, PIXELS, a_batch, config_for, parameters

    from jaxdp import models
    from jaxdp.training.step import make_train_step

    config = dataclasses.replace(config_for(), data=dataclasses.replace(config_for().data, mix=kind))
    from jaxdp.training.state import create_state

    losses = []
    for shape in ((1, 1), mesh_shape):
        mesh, model = make_mesh(*shape), models.create(config.model)
        step = make_train_step(config, model, PIXELS, mesh, BATCH // PER_WORKER // (shape[0] * shape[1]))
        state = create_state(config, model, mesh)._replace(params=parameters(config)[0])
        hyperparameters = {"learning_rate": np.float32(0.1), "momentum": np.float32(0.9), "seed": np.uint32(config.seed)}
        _, metrics = step(state, put(a_batch(), mesh), hyperparameters)
        text = step.lower(state, put(a_batch(), mesh), hyperparameters).as_text() if shape == (2, 2) else ""
        assert "collective_permute" not in text
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_a_mixed_step_weighs_both_targets_smoothed_by_their_share(kind):
    """The loss of one worker's batch against NumPy: share x own target + (1 - share) x the partner's, smoothing in both."""
    from test_step import PIXELS, a_batch, config_for, parameters

    from jaxdp import models
    from jaxdp.training.step import local_gradient

    config = dataclasses.replace(config_for(), data=dataclasses.replace(config_for().data, mix=kind, augmentation="none"))
    model = models.create(config.model)
    params, stats = parameters(config)
    batch = {name: rows[:8] for name, rows in a_batch().items()}

    def one(params, batch):
        return local_gradient(config, model, PIXELS, params, stats, 1.0, batch)[1]["loss"]

    images, partner, share = augment.mix(config, augment.normalise(jnp.asarray(batch["images"]), *PIXELS), batch["positions"])
    logits = np.asarray(model.apply(params, stats, images, train=True)[0], np.float64)
    log_softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    onehot = np.eye(7)[batch["labels"]]
    mixed_target = np.asarray(share)[:, None] * onehot + (1 - np.asarray(share)[:, None]) * onehot[np.asarray(partner)]
    target = 0.9 * mixed_target + 0.1 / 7
    assert len(set(batch["labels"][np.asarray(partner)] - batch["labels"])) > 1
    assert float(jax.jit(one)(params, batch)) == pytest.approx(-(target * log_softmax).sum(1).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"augment": Augment(min_scale=2.0), "data": Data(augmentation="paper")},
            r"augment.min_scale: 2 is not allowed; it must not exceed augment.max_scale",
        ),
        (
            {"data": Data(source="synthetic", stored_size=64, augmentation="pad_and_crop")},
            "data.stored_size: 64 is not allowed with data.augmentation 'pad_and_crop'",
        ),
    ],
)
def test_ranges_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        from_json(to_json(Config(**change)))


def test_cutmix_on_one_example_a_worker_is_refused():
    config = Config(
        data=Data(mix="cutmix"), batch=(Phase(8),), mesh=Mesh(), model=Model(classes=10), schedule=Schedule(warmup_epochs=1.0)
    )
    with pytest.raises(ConfigError, match=r"data.mix: 'cutmix' is not allowed with batch.0; a worker has one image"):
        make_plan(config, 100, 8)
