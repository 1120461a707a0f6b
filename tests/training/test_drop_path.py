"""Drop-path: draws follow the seed, the image's position and the block, on any mesh and in segments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.step import PIXELS, assert_close, distributed_gradients, initial_params, make_batch, step_config, with_parts

from jaxdp import models
from jaxdp.config import Model
from jaxdp.data.augment import MODEL_KEY, augment, image_keys, normalize
from jaxdp.losses import cross_entropy
from jaxdp.models import resnet
from jaxdp.models.resnet import branch_factor

RATE = 0.5


def drop_path_config(norm="synchronized"):
    return with_parts(step_config(norm), model={"drop_path": RATE})


@pytest.mark.parametrize("of_each_image", [pytest.param(False, marks=pytest.mark.slow), True])
def test_branches_of_a_network_are_kept_with_their_probabilities_and_scaled_by_the_inverse(monkeypatch, of_each_image):
    """Eight blocks; each adds 1 to a channel of its own: the logits are the factors of their branches."""
    monkeypatch.setitem(resnet.BLOCKS, 18, (8,))
    model = models.create(Model(depth=18, width=8, stem="small", classes=8, drop_path=0.7))
    params, stats = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: model.init(jax.random.key(0), (2, 2, 3))))
    for block in range(8):
        params[f"layer1_{block}"]["bn2"]["bias"] = jnp.eye(8)[block]
    key = image_keys(0, jnp.arange(4000), MODEL_KEY) if of_each_image else jax.random.key(0)
    apply = jax.jit(
        lambda: model.apply(params | {"fc_kernel": jnp.eye(8)}, stats, jnp.zeros((4000, 2, 2, 3)), train=True, key=key)[0]
    )
    factors = np.asarray(apply(), np.float64)
    for block, factor in enumerate(factors.T):
        rate = 0.1 * block
        np.testing.assert_allclose(np.unique(factor), [0, 1 / (1 - rate)] if block else [1], rtol=1e-6)
        assert (factor == 0).mean() == pytest.approx(rate, abs=4 * np.sqrt(0.25 / 4000))
    correlations = np.corrcoef(factors[:, 1:].T) - np.eye(7)
    assert np.abs(correlations).max() < 5 / np.sqrt(4000)  # blocks are independent


def test_draws_follow_seed_and_position_alone():
    @jax.jit
    def draws(seed, positions):
        return branch_factor(image_keys(seed, positions, MODEL_KEY), RATE, 3)[:, 0, 0, 0]

    positions = jnp.arange(64, dtype=jnp.uint32)
    first = draws(7, positions)
    np.testing.assert_array_equal(draws(7, positions[::-1])[::-1], first)
    np.testing.assert_array_equal(draws(7, positions + 24)[:40], first[24:])
    assert (draws(8, positions) != first).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_shape", "norm", "accumulation"),
    [((1, 2), "per_worker", 4), ((2, 4), "synchronized", 1)],
)
def test_gradient_on_a_mesh_equals_one_device_under_the_same_masks(mesh_shape, norm, accumulation):
    """The reference masks the branch itself, with JAX's gradients; the step has segments, which overlap with the reduction."""
    config = drop_path_config(norm)
    gradient, report = distributed_gradients(config, mesh_shape, accumulation)
    alone = dataclasses.replace(config.model, norm="per_worker")
    model, (params, stats) = models.create(alone, custom_vjp=False), initial_params(config)

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


def test_evaluation_never_drops_and_training_needs_a_key():
    config = drop_path_config("per_worker")
    model, plain = models.create(config.model), models.create(dataclasses.replace(config.model, drop_path=0.0))
    params, stats = initial_params(config)
    images = jnp.zeros((2, 12, 12, 3))
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
