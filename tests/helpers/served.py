"""Saved runs of small ResNets to export, and what evaluation computes of their images."""

import dataclasses

import jax
import numpy as np
from helpers.saved_run import save_run

from jaxdp import models
from jaxdp.config import Data
from jaxdp.data.datasets import pixel_stats
from jaxdp.training.evaluation import evaluation_logits

BATCHES = (1, 3, 8)
TOLERANCE = 1e-5  # of the largest logit


def random_images(count, side):
    return np.random.default_rng(count).integers(0, 256, (count, side, side, 3), np.uint8)


def random_state(config):
    """(params, batch_stats) without the values 0 and 1, so that every tensor matters."""
    size, rng = config.data.image_size, np.random.default_rng(1)
    params, batch_stats = jax.jit(lambda: models.create(config.model).init(jax.random.key(0), (size, size, 3)))()
    params = jax.tree.map(lambda x: x if x.ndim > 1 else x + rng.uniform(0.1, 0.6, x.shape).astype(np.float32), params)
    return params, jax.tree.map(lambda x: rng.uniform(0.2, 1.5, x.shape).astype(np.float32), batch_stats)


def save_random_run(config, run_dir):
    """Save a run with random weights. Returns a function: images -> logits of jaxdp's evaluation in float32."""
    params, batch_stats = random_state(config)
    save_run(config, run_dir, params, batch_stats)
    model = models.create(dataclasses.replace(config.model, dtype="float32"))

    @jax.jit
    def logits(images):
        return evaluation_logits(config, model, params, batch_stats=batch_stats, images=images, pixel_stats=pixel_stats(config))

    return logits


def assert_close(actual, expected):
    """Equal within TOLERANCE of the largest logit, which is not tiny."""
    expected = np.asarray(expected)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def softmax(logits):
    exponents = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


# Preparations of images for evaluation, with the side of the images that a client gives.
PREPARATIONS = {
    "plain": (Data(source="synthetic", image_size=16), 16),
    "resized on the device": (Data(source="synthetic", image_size=16, stored_size=24, augmentation="paper"), 24),
    "another size": (Data(source="given", image_size=16, eval_size=32, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)), 32),
}
