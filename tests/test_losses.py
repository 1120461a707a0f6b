import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.choices import LOSSES
from jaxdp.config import Optimizer
from jaxdp.data.batch_sources import ArraySource
from jaxdp.data.classes import with_class_weights
from jaxdp.data.datasets import with_classes
from jaxdp.errors import ConfigError
from jaxdp.losses import binary_cross_entropy, cross_entropy, label_weights, rank_of_label
from jaxdp.validation import validate


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
        return LOSSES.implementation(name)(optimizer, jnp.asarray(logits, jnp.float32), jnp.asarray(labels), mix=mix)

    if threshold is None:
        log_softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        np.testing.assert_allclose(found("softmax"), -(target * log_softmax).sum(1), rtol=1e-5, atol=1e-6)
    else:
        target = (target > threshold).astype(float)
    probability = 1 / (1 + np.exp(-logits))
    expected = -(target * np.log(probability) + (1 - target) * np.log1p(-probability)).mean(1)
    np.testing.assert_allclose(found("binary"), expected, rtol=1e-5)
    np.testing.assert_allclose(found("binary_sum"), 11 * expected, rtol=1e-5)


WEIGHTS = tuple(0.1 + float(label) ** 2 for label in range(11))
# torch.nn.functional.cross_entropy(weight=...) of PyTorch 2.14: of classes, and of probabilities, by label smoothing
TORCH = {("classes", 0.0): 8.59059276695064, ("classes", 0.1): 8.557783463821806}
TORCH |= {("probabilities", 0.0): 348.72949974109594, ("probabilities", 0.1): 343.42597069598776}


@pytest.mark.parametrize(("labels_are", "smoothing"), TORCH)
def test_class_weights_are_those_of_pytorch(labels_are, smoothing):
    """Of classes, the sum of their weights divides; of probabilities, the number of images."""
    random = np.random.default_rng(0)
    logits, labels, others = random.normal(size=(32, 11)) * 5, *random.integers(0, 11, (2, 32))
    share, target, divisor, mix = random.uniform(size=32), np.eye(11)[labels], np.take(WEIGHTS, labels).sum(), None
    if labels_are == "probabilities":
        target, divisor = share[:, None] * target + (1 - share[:, None]) * np.eye(11)[others], 32
        mix = (jnp.asarray(others), jnp.asarray(share, jnp.float32))
    target = (1 - smoothing) * target + smoothing / 11
    log_softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = -(WEIGHTS * target * log_softmax).sum() / divisor
    assert expected == pytest.approx(TORCH[labels_are, smoothing], rel=1e-12)
    optimizer = Optimizer(class_weights=WEIGHTS, label_smoothing=smoothing)
    losses = LOSSES.implementation("softmax")(optimizer, jnp.asarray(logits, jnp.float32), jnp.asarray(labels), mix=mix)
    divided_by = label_weights(optimizer, jnp.asarray(labels)).mean() if mix is None else 1
    assert float(losses.mean() / divided_by) == pytest.approx(expected, rel=1e-5)


def focal(logits, targets, *, gamma):
    """Lin et al., arXiv 1708.02002, equation 4, for soft targets."""
    log_probabilities = jax.nn.log_softmax(logits)
    return -(targets * (1 - jnp.exp(log_probabilities)) ** gamma * log_probabilities).sum(-1)


@pytest.mark.parametrize("threshold", [None, 0.2])
def test_registered_loss_gets_mixed_and_smoothed_targets(threshold):
    random = np.random.default_rng(0)
    logits, labels, others = random.normal(size=(32, 11)), *random.integers(0, 11, (2, 32))
    share = random.uniform(size=32)
    target = 0.9 * (share[:, None] * np.eye(11)[labels] + (1 - share[:, None]) * np.eye(11)[others]) + 0.1 / 11
    if threshold is not None:
        target = (target > threshold).astype(float)
    log_softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = -(target * (1 - np.exp(log_softmax)) ** 2 * log_softmax).sum(1)
    jaxdp.register_loss("focal", partial(focal, gamma=2.0))
    optimizer = Optimizer(loss="focal", label_smoothing=0.1, target_threshold=threshold)
    mix = (jnp.asarray(others), jnp.asarray(share, jnp.float32))
    found = LOSSES.implementation("focal")(optimizer, jnp.asarray(logits, jnp.float32), jnp.asarray(labels), mix=mix)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda logits, targets: focal(logits, targets, gamma=2.0).mean(), "returned float32 of shape () for 3 images"),
        (lambda logits, targets: logits @ targets, "failed: TypeError: "),
    ],
)
def test_registered_loss_that_cannot_be_trained_is_refused_before_the_run(tiny, tmp_path, loss, reason):
    jaxdp.register_loss("mine", loss)
    config = dataclasses.replace(tiny, optimizer=Optimizer(loss="mine"))
    with pytest.raises(ConfigError, match=re.escape(f"optimizer.loss='mine': the registered function {reason}")):
        jaxdp.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_class_weights_with_another_loss_or_number_of_classes_are_refused(tiny):
    with pytest.raises(ConfigError, match=r"class_weights=\(1.0, 2.0\): 2 weights for 6 classes; give one for each class"):
        validate(dataclasses.replace(tiny, optimizer=Optimizer(class_weights=(1.0, 2.0))))
    with pytest.raises(ConfigError, match=r"class_weights='balanced': not used with optimizer.loss='binary'"):
        validate(dataclasses.replace(tiny, optimizer=Optimizer(class_weights="balanced", loss="binary")))
    with pytest.raises(ConfigError, match=r"class_weights=\(0.0, .*\): must be greater than 0"):
        validate(dataclasses.replace(tiny, optimizer=Optimizer(class_weights=(0.0,) * 6)))


class Labelled(list):
    """A data set of the user's: 32 images with an array of their labels."""

    def __init__(self, labels):
        super().__init__(range(32))
        self.labels = labels


def test_balanced_class_weights_are_those_of_sklearn(tiny):
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.repeat(np.arange(6), [1, 2, 3, 5, 8, 13])
    config = dataclasses.replace(tiny, optimizer=Optimizer(class_weights="balanced"))
    found = with_class_weights(config, ArraySource(np.zeros((32, 2, 2, 3)), labels)).optimizer.class_weights
    np.testing.assert_allclose(found, compute_class_weight("balanced", classes=np.arange(6), y=labels), rtol=1e-15)
    two = with_class_weights(with_classes(config, 2), Labelled(labels > 4)).optimizer.class_weights
    np.testing.assert_allclose(two, compute_class_weight("balanced", classes=np.arange(2), y=labels > 4), rtol=1e-15)
    with pytest.raises(ConfigError, match="no training image has the class 5"):
        with_class_weights(config, ArraySource(np.zeros((32, 2, 2, 3)), labels % 5))
    with pytest.raises(ConfigError, match=r"has its labels only with the images; give weights in place of balanced, or"):
        with_class_weights(config, object())
    for wrong in (labels[:-1], labels[:, None], labels.astype(np.float32), labels - 1, labels + 1):
        with pytest.raises(ConfigError, match=r"the labels of the training set are \w+ of shape .* for 32 images"):
            with_class_weights(config, Labelled(wrong))
    with pytest.raises(ConfigError, match=r"class_weights='balanced': needs training labels; give numbers"):
        LOSSES.implementation("softmax")(config.optimizer, jnp.zeros((2, 6)), jnp.zeros(2, jnp.int32))


@pytest.mark.parametrize("name", list(LOSSES))
def test_chance_level_is_the_loss_of_equal_scores(name):
    found = LOSSES.implementation(name)(Optimizer(loss=name), jnp.zeros((2, 1000), jnp.bfloat16), jnp.array([0, 999]))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, LOSSES[name].chance(1000), rtol=1e-6)
    assert LOSSES["binary"].chance(1000) == math.log(2)


def test_binary_cross_entropy_of_large_logits_is_finite_with_its_gradient():
    logits, targets = jnp.array([[1e4, -1e4, 1e4, -1e4]]), jnp.array([[1.0, 0.0, 0.0, 1.0]])
    np.testing.assert_allclose(binary_cross_entropy(logits, targets), [5e3])
    gradient = jax.grad(lambda logits: binary_cross_entropy(logits, targets).sum())(logits)
    np.testing.assert_allclose(gradient, [[0.0, 0.0, 0.25, -0.25]])


def test_losses_of_16_bit_logits_are_those_of_the_same_values_in_32():
    random = np.random.default_rng(0)
    logits, labels = jnp.asarray(random.normal(size=(8, 5)) * 5, jnp.bfloat16), jnp.asarray(random.integers(0, 5, 8))
    targets, wide = jax.nn.one_hot(labels, 5), logits.astype(jnp.float32)
    weighted = partial(LOSSES.implementation("softmax"), Optimizer(class_weights=(1.0, 2.0, 3.0, 4.0, 5.0)))
    for loss, of in ((binary_cross_entropy, targets), (cross_entropy, labels), (weighted, labels)):
        found, expected = loss(logits, of), loss(wide, of)
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("class_weights", [None, WEIGHTS])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", list(LOSSES.builtin))
def test_a_class_whose_logit_is_minus_infinity_is_as_if_it_were_not_there(name, mixed, class_weights):
    """Value and gradient; both partners of a mix may have it with a share of 0."""
    if class_weights and name != "softmax":
        return
    random = np.random.default_rng(0)
    logits, labels, others = random.normal(size=(32, 11)) * 5, *random.integers(0, 10, (2, 32))
    share = np.where(np.arange(32) % 2, 1.0, random.uniform(size=32))
    target = np.eye(11)[labels]
    if mixed:
        others[1::2] = 10  # the masked class
        target = share[:, None] * target + (1 - share[:, None]) * np.eye(11)[others]
    mix = (jnp.asarray(others), jnp.asarray(share, jnp.float32)) if mixed else None
    masked = logits.copy()
    masked[:, 10] = -np.inf
    factor = np.ones(11) if class_weights is None else np.asarray(class_weights)
    kept, target, factor = logits[:, :10], target[:, :10], factor[:10]
    if name == "softmax":
        probability = np.exp(kept) / np.exp(kept).sum(1, keepdims=True)
        expected = -(factor * target * np.log(probability)).sum(1)
        gradient = probability * (factor * target).sum(1, keepdims=True) - factor * target
    else:
        divisor, probability = {"binary": 11, "binary_sum": 1}[name], 1 / (1 + np.exp(-kept))
        expected = -(target * np.log(probability) + (1 - target) * np.log1p(-probability)).sum(1) / divisor
        gradient = (probability - target) / divisor
    optimizer = Optimizer(loss=name, class_weights=class_weights)

    def losses(logits):
        return LOSSES.implementation(name)(optimizer, logits, jnp.asarray(labels), mix=mix)

    masked = jnp.asarray(masked, jnp.float32)
    np.testing.assert_allclose(losses(masked), expected, rtol=1e-5, atol=1e-6)
    found = jax.grad(lambda logits: losses(logits).sum())(masked)
    np.testing.assert_allclose(found, np.pad(gradient, ((0, 0), (0, 1))), rtol=1e-4, atol=1e-5)


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
