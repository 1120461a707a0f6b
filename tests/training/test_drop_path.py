"""Drop-path: draws follow the seed, the image's position and the block, on any mesh and in segments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.step import PIXELS, assert_close, distributed_gradients, initial_params, make_batch, step_config

from jaxdp import models
from jaxdp.data.augment import MODEL_KEY, augment, image_keys, normalize
from jaxdp.losses import cross_entropy
from jaxdp.models.drop_path import block_rate, branch_factor

RATE = 0.5


def drop_path_config(norm="synchronized"):
    config = step_config(norm)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, drop_path=RATE))


def test_a_branch_is_kept_with_its_probability_and_scaled_by_its_inverse():
    """Of 20,000 images the mean deviates from 1 by 0.01 (a standard deviation is 0.007)."""
    factors = {block: branch_factor(image_keys(0, jnp.arange(20_000), MODEL_KEY), 1 / 3, block) for block in (1, 2)}
    for factor in factors.values():
        assert factor.shape == (20_000, 1, 1, 1)
        np.testing.assert_allclose(np.unique(factor), [0, 1.5], rtol=1e-6)
        assert float(factor.mean()) == pytest.approx(1, abs=0.02)
    dropped = np.stack([np.asarray(factor)[:, 0, 0, 0] == 0 for factor in factors.values()])
    assert (dropped[0] & dropped[1]).mean() == pytest.approx(1 / 9, abs=0.01)  # blocks are independent
    assert [block_rate(0.3, block, 4) for block in range(4)] == pytest.approx([0, 0.1, 0.2, 0.3])


def test_draws_follow_seed_and_position_alone():
    @jax.jit
    def draws(seed, positions):
        return branch_factor(image_keys(seed, positions, MODEL_KEY), RATE, 3)[:, 0, 0, 0]

    positions = jnp.arange(64, dtype=jnp.uint32)
    first = draws(7, positions)
    np.testing.assert_array_equal(draws(7, positions[::-1])[::-1], first)
    np.testing.assert_array_equal(draws(7, positions + 24)[:40], first[24:])
    assert (draws(8, positions) != first).any()


@pytest.mark.parametrize(
    ("mesh_shape", "norm", "accumulation"),
    [((1, 2), "per_worker", 4), pytest.param((2, 4), "synchronized", 1, marks=pytest.mark.slow)],
)
def test_gradient_on_a_mesh_equals_one_device_under_the_same_masks(mesh_shape, norm, accumulation):
    """The reference masks the branch itself, with JAX's gradients; the step has segments, which overlap with the reduction."""
    config = drop_path_config(norm)
    gradient, report = distributed_gradients(config, mesh_shape, accumulation)
    autodiff = dataclasses.replace(config.model, gradients="autodiff", norm="per_worker")
    model, (params, stats) = models.create(autodiff), initial_params(config)

    def loss_of(params, part):
        images = normalize(augment(config, part["images"], part["positions"]), *PIXELS)
        keys = image_keys(config.seed, part["positions"], MODEL_KEY)
        logits, moments = model.apply(params, stats, images, train=True, key=keys)
        return cross_entropy(logits, part["labels"], 0.1).mean(), moments

    gradient_of = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    batch = make_batch()
    size = 32 if norm == "synchronized" else 32 // (2 * accumulation)
    parts = [gradient_of(params, {name: rows[i : i + size] for name, rows in batch.items()}) for i in range(0, 32, size)]
    (_, moments), expected = jax.tree.map(lambda *x: np.mean(np.stack(x).astype(np.float64), axis=0), *parts)
    assert_close(gradient, expected, 1e-4)
    assert_close(report["moments"], moments, 1e-5)


def test_mean_over_draws_is_the_output_without_drop_path_and_evaluation_never_drops():
    """Of the branch of one block, which the logits follow linearly where the ReLU behind it is positive."""
    config = drop_path_config("per_worker")
    model, plain = models.create(config.model), models.create(dataclasses.replace(config.model, drop_path=0.0))
    params, stats = initial_params(config)
    params["layer2_0"]["downsample_bn"]["bias"] += 20.0
    images = jnp.asarray(np.random.default_rng(0).normal(size=(8, 12, 12, 3)), jnp.float32)

    @jax.jit
    def logits(key):
        return model.apply(params, stats, images, train=True, key=key)[0]

    draws = np.stack([logits(jax.random.key(seed)) for seed in range(200)])
    expected = jax.jit(lambda: plain.apply(params, stats, images, train=True)[0])()
    error = draws.std(0) / np.sqrt(len(draws))
    assert np.abs(draws[0] - expected).max() > 10 * error.max()
    assert (np.abs(draws.mean(0) - expected) <= 5 * error).all()
    evaluations = [jax.make_jaxpr(lambda p, m=m: m.apply(p, stats, images, train=False)[0])(params) for m in (model, plain)]
    assert str(evaluations[0]) == str(evaluations[1])
    with pytest.raises(ValueError, match="needs a key"):
        model.apply(params, stats, images, train=True)


def test_network_without_drop_path_draws_nothing():
    for rate, draws in ((0.0, False), (RATE, True)):
        model = models.create(dataclasses.replace(drop_path_config("per_worker").model, drop_path=rate))
        params, stats = initial_params(drop_path_config())
        traced = jax.make_jaxpr(lambda *a, model=model: model.apply(*a, train=True, key=jax.random.key(0)))(
            params, stats, jnp.zeros((2, 12, 12, 3))
        )
        assert ("random_bits" in str(traced)) == draws
