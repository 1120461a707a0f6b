"""The images that a step computes with, and their loss."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.step import PIXELS, linear_config, make_batch, with_parts

from jaxdp import models
from jaxdp.data import augment, policies
from jaxdp.training.objective import batch_metrics, mean_loss, training_examples

CONFIG = with_parts(
    linear_config(seed=3),
    data={"augmentation": "pad_and_crop"},
    augment={"erase_probability": 0.5, "color_jitter": (0.3,)},
)


@pytest.mark.parametrize(
    ("mix", "auto_augment"),
    [("cutmix", "none"), *(pytest.param(mix, "rand_augment_increasing", marks=pytest.mark.slow) for mix in ("none", "cutmix"))],
)
def test_images_are_cropped_changed_normalized_erased_and_mixed_in_this_order(normalized_linear, mix, auto_augment):
    """Places outside of an image have the mean of the data set; random numbers are of the seed that is given."""
    config, batch, seed = with_parts(CONFIG, data={"mix": mix, "auto_augment": auto_augment}), make_batch(), 7
    found = training_examples(config, models.create(config.model), batch, seed=seed, pixel_stats=PIXELS)
    seeded, positions = dataclasses.replace(config, seed=seed), batch["positions"]
    x = augment.augment(seeded, batch["images"], positions)
    x = policies.change_pixels(seeded, x, positions, mean=PIXELS[0])
    x = policies.erase(seeded, (np.asarray(x, np.float32) - PIXELS[0]) * np.float32(1 / PIXELS[1]), positions)
    assert (found.mix is None) == (mix == "none")
    if mix != "none":
        x, partner, share = augment.mix(seeded, x, positions)
        np.testing.assert_array_equal(found.mix[0], batch["labels"][partner])
        np.testing.assert_array_equal(found.mix[1], share)
    np.testing.assert_allclose(found.images, x, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found.labels, batch["labels"])
    expected = augment.worker_key(seed, positions, augment.MODEL_KEY)
    np.testing.assert_array_equal(jax.random.key_data(found.key), jax.random.key_data(expected))


def test_the_loss_is_the_mean_over_the_images(normalized_linear):
    config, batch = linear_config(), make_batch()
    examples = training_examples(config, models.create(config.model), batch, seed=0, pixel_stats=PIXELS)
    logits = np.random.default_rng(0).normal(size=(len(batch["labels"]), 7)).astype(np.float32)
    log_softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True, dtype=np.float64))
    target = 0.9 * np.eye(7)[batch["labels"]] + 0.1 / 7
    assert float(mean_loss(config, logits, examples)) == pytest.approx(-(target * log_softmax).sum(1).mean(), rel=1e-5)
    (found,) = batch_metrics(config, logits, examples).values()
    assert (found.dtype, float(found)) == ("float32", np.float32((logits.argmax(1) == batch["labels"]).mean()))
