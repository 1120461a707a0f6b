"""The task `labels`: its loss beside NumPy in float64 on several meshes, its metrics beside scikit-learn, and whole runs."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.runs import Recorder, train_shown, train_until
from helpers.step import BATCH, PIXELS, distributed_gradients, initial_params, make_batch, step_config, with_parts
from hypothesis import given
from hypothesis import strategies as st
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import average_precision_score, f1_score

import jaxdp
from jaxdp import label_metrics, models
from jaxdp.choices import LOSSES
from jaxdp.config import Data, Optimizer
from jaxdp.data.augment import augment, normalize
from jaxdp.data.sources import inspect, open_datasets
from jaxdp.errors import ConfigError
from jaxdp.run_records import read_log
from jaxdp.validation import validate

LABELS = 7


def label_batch():
    """The batch of the step's tests, with several labels for each image; some have none."""
    several = np.random.default_rng(1).random((BATCH, LABELS)) < 0.3
    return make_batch() | {"labels": several.astype(np.float32)}


@pytest.mark.parametrize("weights", [(), tuple(0.5 + label for label in range(LABELS))])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_smoothed_mixed_and_weighted_labels_equals_numpy_in_float64(smoothing, weights):
    random = np.random.default_rng(0)
    logits, labels, others = 5 * random.normal(size=(9, LABELS)), *(random.random((2, 9, LABELS)) < 0.4)
    share = random.uniform(size=9)
    target = share[:, None] * labels + (1 - share[:, None]) * others
    target = (1 - smoothing) * target + smoothing / 2
    probability, positive = 1 / (1 + np.exp(-logits)), np.asarray(weights or [1.0] * LABELS)
    expected = -(positive * target * np.log(probability) + (1 - target) * np.log1p(-probability)).mean(1)
    optimizer = Optimizer(loss="binary", label_smoothing=smoothing, class_weights=weights)
    mix = (jnp.asarray(others, jnp.float32), jnp.asarray(share, jnp.float32))
    arguments = optimizer, jnp.asarray(logits, jnp.float32), jnp.asarray(labels, jnp.float32)
    np.testing.assert_allclose(LOSSES.implementation("binary")(*arguments, mix=mix), expected, rtol=1e-5)
    np.testing.assert_allclose(LOSSES.implementation("binary_sum")(*arguments, mix=mix), LABELS * expected, rtol=1e-5)


@pytest.mark.parametrize("mesh_shape", [(1, 1), (2, 4), pytest.param((4, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("reduce", [{}, {"overlap": False}])
def test_gradient_of_labels_equals_that_of_one_device(mesh_shape, reduce):
    config = with_parts(step_config(task="labels", norm="synchronized"), optimizer={"loss": "binary"}, reduce=reduce)
    batch, model = label_batch(), models.create(step_config(task="labels").model)  # statistics of the whole batch
    params, stats = initial_params(config)

    def loss_of(params):
        images = normalize(augment(config, batch["images"], batch["positions"]), *PIXELS)
        logits, _ = model.apply(params, stats, images, train=True)
        targets = 0.9 * batch["labels"] + 0.05
        return -(targets * jax.nn.log_sigmoid(logits) + (1 - targets) * jax.nn.log_sigmoid(-logits)).mean()

    loss, expected = jax.jit(jax.value_and_grad(loss_of))(params)
    gradient, report = distributed_gradients(config, mesh_shape, batch=batch)
    assert float(report["loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert "accuracy" not in report
    jax.tree.map(lambda ours, other: np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-6), gradient, expected)


@given(
    st.integers(1, 12).flatmap(
        lambda count: st.tuples(
            st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=count, max_size=count),
            st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=count, max_size=count),
        )
    )
)
def test_metrics_equal_those_of_scikit_learn_with_ties_and_without_positives(case):
    logits, labels = np.asarray(case[0], np.float32), np.asarray(case[1], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndefinedMetricWarning)
        warnings.filterwarnings("ignore", "No positive class found")
        expected = average_precision_score(labels, logits, average="macro")
        micro, macro = (f1_score(labels, logits >= 0, average=kind, zero_division=0) for kind in ("micro", "macro"))
    assert label_metrics.mean_average_precision(logits, labels) == pytest.approx(expected, rel=1e-12)
    assert label_metrics.f1_micro(logits, labels) == pytest.approx(micro, rel=1e-12)
    assert label_metrics.f1_macro(logits, labels) == pytest.approx(macro, rel=1e-12)


def labeled_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images with a bright square for each label, and their labels [count, 3]."""
    random = np.random.default_rng(seed)
    labels = random.random((count, 3)) < 0.4
    images = random.integers(0, 100, (count, 16, 16, 3))
    for label in range(3):
        images[labels[:, label], 4:12, 5 * label : 5 * label + 5] += 120
    return images.astype(np.uint8), labels


@pytest.fixture
def several(tiny):
    """A run on three labels an image, with its data."""
    config = with_parts(tiny, data={"source": "given", "train_examples": None, "eval_examples": None}, model={"classes": None})
    config = with_parts(dataclasses.replace(config, task="labels"), optimizer={"loss": "binary"})
    return config, (labeled_images(50, 0), labeled_images(23, 1))


def test_run_on_several_labels_is_evaluated_exactly_and_resumes_bitwise(several, tmp_path, own_programs):
    config, datasets = several
    result = train_shown(config, tmp_path / "whole", screen=Recorder(), datasets=datasets)
    train_until(config, tmp_path / "stopped", step=10, datasets=datasets)
    again = train_shown(config, tmp_path / "stopped", screen=Recorder(), datasets=datasets)
    assert [*result.metrics] == ["mean_average_precision", "f1_micro", "f1_macro"]
    assert (again.metrics, again.loss, again.eval_examples) == (result.metrics, result.loss, 23)
    found = jaxdp.evaluate(None, tmp_path / "whole", datasets=datasets)
    assert found["eval_mean_average_precision"] == result.mean_average_precision
    records = [record for record in read_log(tmp_path / "whole/metrics.jsonl") if "loss" in record]
    assert not any("accuracy" in record for record in records)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"optimizer": {"loss": "softmax"}},
            r"optimizer\.loss='softmax': not possible with task='labels'; use binary",
        ),
        ({"data": {"source": "digits"}, "model": {"classes": None}}, r"data\.source='digits': its images have one class each"),
        (
            {"stop": {"metric": "eval_accuracy"}},
            r"stop\.metric='eval_accuracy': not a metric of the task 'labels'",
        ),
    ],
)
def test_what_several_labels_cannot_have_is_refused(tiny, changes, reason):
    several = with_parts(dataclasses.replace(tiny, task="labels"), data=Data(source="file"), optimizer={"loss": "binary"})
    with pytest.raises(ConfigError, match=reason):
        inspect(validate(with_parts(several, **changes)))


def test_names_in_one_column_without_a_separator_are_refused_with_it(tmp_path):
    (tmp_path / "table.csv").write_text("image,tags,split\na.png,cat;dog,train\nb.png,cat,train\nc.png,cat,val\n")
    for name in "abc":
        (tmp_path / f"{name}.png").touch()
    data = Data(source="file", directory=str(tmp_path / "table.csv"), label_column=("tags",))
    with pytest.raises(ConfigError, match=r"task='labels': the training set has one label .*--data\.label-separator"):
        open_datasets(dataclasses.replace(jaxdp.Config(), task="labels", data=data))


def test_wrong_labels_are_named_with_row_and_value(several, tmp_path):
    config, (training, evaluation) = several
    wrong = training[1].astype(float)
    for value in (np.nan, 0.5, 2):
        wrong[7, 1] = value
        with pytest.raises(ConfigError, match=rf"datasets: row 7 of training has the label {value}.* for class 1"):
            jaxdp.train(config, tmp_path, datasets=((training[0], wrong), evaluation))
    one_class = dataclasses.replace(config, task="classes")
    with pytest.raises(
        ConfigError, match=r"^task='classes': the training set has several labels for each image.*--task labels"
    ):
        jaxdp.train(one_class, tmp_path, datasets=(training, evaluation))
