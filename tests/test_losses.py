import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp.choices import LOSSES
from jaxdp.config import Optimizer
from jaxdp.losses import LOSS_FUNCTIONS, binary_cross_entropy, cross_entropy, rank_of_label


def test_cross_entropy_of_uniform_logits_is_the_logarithm_of_the_classes():
    loss = cross_entropy(jnp.zeros((1, 1000)), jnp.array([3]), 0.1)
    assert float(loss[0]) == pytest.approx(6.907755278982137, rel=1e-6)


def test_cross_entropy_at_the_smoothed_target_is_its_entropy():
    logits = np.log(np.full((1, 1000), 0.0001))
    logits[0, 5] = np.log(0.9001)
    loss = cross_entropy(jnp.asarray(logits, jnp.float32), jnp.array([5]), 0.1)
    assert float(loss[0]) == pytest.approx(1.0148479977486802, rel=2e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_cross_entropy_equals_numpy_in_float64_and_optax(smoothing):
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(32, 11)) * 5, random.integers(0, 11, 32)
    target = (1 - smoothing) * np.eye(11)[labels] + smoothing / 11
    expected = -(target * (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))).sum(-1)
    ours = cross_entropy(jnp.asarray(logits, jnp.float32), jnp.asarray(labels), smoothing)
    # float32 rounds logits near 16 to 1e-6, whatever is left of them in the loss
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)
    peer = optax.softmax_cross_entropy(jnp.asarray(logits, jnp.float32), optax.smooth_labels(jnp.eye(11)[labels], smoothing))
    np.testing.assert_allclose(ours, peer, rtol=1e-5)


def test_cross_entropy_of_bfloat16_logits_is_float32():
    assert cross_entropy(jnp.zeros((2, 3), jnp.bfloat16), jnp.array([0, 1])).dtype == jnp.float32


@pytest.mark.parametrize("threshold", [None, 0.0, 0.2, 0.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
def test_loss_of_mixed_and_smoothed_labels_equals_numpy_in_float64(mixed, smoothing, threshold):
    random = np.random.default_rng(0)
    logits, labels, others = random.normal(size=(32, 11)) * 5, *random.integers(0, 11, (2, 32))
    share = random.uniform(size=32)
    target = np.eye(11)[labels]
    if mixed:
        target = share[:, None] * target + (1 - share[:, None]) * np.eye(11)[others]
    target = (1 - smoothing) * target + smoothing / 11
    mix = (jnp.asarray(others), jnp.asarray(share, jnp.float32)) if mixed else None

    def found(name):
        optimizer = Optimizer(loss=name, label_smoothing=smoothing, target_threshold=threshold)
        return LOSS_FUNCTIONS[name](optimizer, jnp.asarray(logits, jnp.float32), jnp.asarray(labels), mix=mix)

    if threshold is None:
        log_softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        np.testing.assert_allclose(found("softmax"), -(target * log_softmax).sum(1), rtol=1e-5, atol=1e-6)
    else:
        target = (target > threshold).astype(float)
    probability = 1 / (1 + np.exp(-logits))
    expected = -(target * np.log(probability) + (1 - target) * np.log1p(-probability)).mean(1)
    np.testing.assert_allclose(found("binary"), expected, rtol=1e-5)
    np.testing.assert_allclose(found("binary_sum"), 11 * expected, rtol=1e-5)


@pytest.mark.parametrize("name", list(LOSSES))
def test_chance_level_is_the_loss_of_equal_scores(name):
    found = LOSS_FUNCTIONS[name](Optimizer(loss=name), jnp.zeros((2, 1000), jnp.bfloat16), jnp.array([0, 999]))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, LOSSES[name].chance(1000), rtol=1e-6)
    assert LOSSES["binary"].chance(1000) == math.log(2)


def test_binary_cross_entropy_of_large_logits_is_finite_with_its_gradient():
    logits, targets = jnp.array([[1e4, -1e4, 1e4, -1e4]]), jnp.array([[1.0, 0.0, 0.0, 1.0]])
    np.testing.assert_allclose(binary_cross_entropy(logits, targets), [5e3])
    gradient = jax.grad(lambda logits: binary_cross_entropy(logits, targets).sum())(logits)
    np.testing.assert_allclose(gradient, [[0.0, 0.0, 0.25, -0.25]])


def test_rank_of_label_counts_ties_and_nan_against_the_model():
    logits = jnp.array([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0], [0.0, 5.0, 5.0], [jnp.nan, jnp.nan, jnp.nan]])
    assert rank_of_label(logits, jnp.array([0, 1, 2, 0])).tolist() == [0, 2, 1, 2]


def test_rank_of_label_equals_sklearns_top_k():
    from sklearn.metrics import top_k_accuracy_score

    random = np.random.default_rng(1)
    logits, labels = random.normal(size=(200, 12)).astype(np.float32), random.integers(0, 12, 200)
    rank = np.asarray(rank_of_label(jnp.asarray(logits), jnp.asarray(labels)))
    for k in (1, 5):
        assert (rank < k).mean() == top_k_accuracy_score(labels, logits, k=k, labels=range(12))
