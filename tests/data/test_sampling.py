"""Training images that are drawn with replacement: `data.sampling` balanced and weights."""

import dataclasses

import numpy as np
import pytest
from helpers.runs import outcome, train_shown, train_until
from scipy.stats import chi2_contingency, chisquare

from jaxdp.config import Config, Data
from jaxdp.data import prefetch, sources
from jaxdp.data.batch_sources import ArraySource
from jaxdp.data.sampler import drawn_ids, uniforms
from jaxdp.errors import ConfigError
from jaxdp.loggers.console import Screen
from jaxdp.parallel.mesh import make_mesh
from jaxdp.setup.consistency import data_digest
from jaxdp.validation import validate

LEAST_P = 1e-3  # of a fair draw, with fixed seeds
LABELS = np.repeat([0, 1, 2], [80, 15, 5])
PIXELS = np.random.default_rng(0).integers(0, 256, (100, 16, 16), np.uint8)
WEIGHTS = np.random.default_rng(1).uniform(0, 3, 100) * (np.arange(100) % 10 > 0)


def sampled(sampling, *, weights=None, **data):
    """The opened arrays."""
    arrays = (PIXELS, LABELS) if weights is None else (PIXELS, LABELS, None, weights)
    config = Config(data=Data(source="given", image_size=16, sampling=sampling, **data))
    return sources.open_datasets(config, (arrays, None if data.get("holdout") else arrays)).train


def order(source, count, seed=0):
    return prefetch.ids_of(source, seed, np.arange(count))


@pytest.mark.parametrize("seed", [0, 7])
def test_images_are_drawn_in_proportion_to_their_weights(seed):
    counts = np.bincount(order(sampled("weights", weights=WEIGHTS), 40_000, seed), minlength=100)
    assert counts[WEIGHTS == 0].sum() == 0
    expected = 40_000 * WEIGHTS / WEIGHTS.sum()
    assert chisquare(counts[WEIGHTS > 0], expected[WEIGHTS > 0]).pvalue > LEAST_P


def test_balanced_draws_classes_and_the_images_of_a_class_equally_often():
    ids = order(sampled("balanced"), 30_000)
    assert chisquare(np.bincount(LABELS[ids])).pvalue > LEAST_P
    for label in range(3):
        assert chisquare(np.bincount(ids, minlength=100)[label == LABELS]).pvalue > LEAST_P


def test_draws_are_independent_of_the_draws_before_and_of_the_last_epoch():
    labels = LABELS[order(sampled("balanced"), 30_000)]
    for lag in (1, 100):
        table = np.bincount(3 * labels[lag:] + labels[:-lag], minlength=9).reshape(3, 3)
        assert chi2_contingency(table).pvalue > LEAST_P


def test_a_late_draw_is_a_function_of_seed_and_position_alone():
    cumulative = np.cumsum(WEIGHTS) / WEIGHTS.sum()
    uniforms.cache_clear()
    found = drawn_ids(3, np.arange(5_770, 5_820), cumulative)
    assert uniforms.cache_info().misses == 2  # epochs 57 and 58
    numbers = [np.random.Generator(np.random.Philox(key=[3, epoch])).random(100) for epoch in (57, 58)]
    expected = [sum(number >= edge for edge in cumulative) for number in np.concatenate(numbers)[70:120]]
    np.testing.assert_array_equal(found, expected)


def test_the_largest_number_below_one_draws_the_last_image_with_a_weight(monkeypatch):
    monkeypatch.setattr("jaxdp.data.sampler.uniforms", lambda *_: np.array([0.0, np.nextafter(1, 0), 0.5, 0.25]))
    weights = np.array([0.0, 0.1, 0.7, 0.0])
    assert drawn_ids(0, np.arange(4), np.cumsum(weights) / weights.sum()).tolist() == [1, 2, 2, 2]


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2), (1, 8)])
def test_batches_have_the_same_order_on_any_mesh_from_any_start_and_in_parts(mesh):
    """A process loads the rows of its own devices: parts of a batch are as the whole."""
    source = sampled("balanced")
    for first, size in ((0, 24), (96, 24), (104, 40)):
        feed = prefetch.DeviceIterator(source, make_mesh(*mesh), seed=3, first=first, end=first + size, global_batch=size)
        labels = np.asarray(feed.next()["labels"])
        feed.close()
        np.testing.assert_array_equal(labels, LABELS[order(source, 200, 3)[first : first + size]])
        rows = prefetch.BatchRows.of_batch(np.array([5, 1, 17]), first=first, global_batch=size, repeats=1)
        for load in (prefetch.load_images, prefetch.load_indices):
            np.testing.assert_array_equal(load(source, 3, rows)["labels"], labels[[5, 1, 17]])


def test_a_stopped_and_resumed_run_equals_the_run_without_a_stop(tiny, tmp_path):
    data = Data(source="given", image_size=16, sampling="weights")
    config = dataclasses.replace(tiny, data=data, model=dataclasses.replace(tiny.model, classes=3))
    datasets = (PIXELS[50:], LABELS[50:], None, WEIGHTS[50:]), (PIXELS, LABELS)
    train_shown(config, tmp_path / "whole", screen=Screen(quiet=True), datasets=datasets)
    train_until(config, tmp_path / "parts", step=9, datasets=datasets)
    train_shown(config, tmp_path / "parts", screen=Screen(quiet=True), datasets=datasets)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
    other = (*datasets[0][:3], WEIGHTS[50:] + 0.1), datasets[1]
    with pytest.raises(ConfigError, match="is of a run on other data"):
        train_shown(config, tmp_path / "parts", screen=Screen(quiet=True), datasets=other)
    shuffled = dataclasses.replace(config, data=dataclasses.replace(data, sampling="shuffle"))
    with pytest.raises(ConfigError, match=r"data.sampling: 'weights' -> 'shuffle'"):
        train_shown(shuffled, tmp_path / "parts", screen=Screen(quiet=True), datasets=datasets)


def test_weights_of_objects_of_other_sizes_and_of_divided_data_are_those_of_their_images():
    items = type("Weighted", (list,), {"classes": 3, "weights": WEIGHTS})(zip(PIXELS, LABELS, strict=True))
    config = Config(data=Data(source="given", image_size=72, sampling="weights"))
    config = dataclasses.replace(config, batch=(dataclasses.replace(config.batch[0], image_size=80),))
    opened = sources.open_datasets(config, (items, items))
    assert opened.evaluation.cumulative is None
    for source in (opened.train, opened.train_at(80)):
        np.testing.assert_array_equal(order(source, 300), order(sampled("weights", weights=WEIGHTS), 300))
    part = sampled("weights", weights=WEIGHTS, holdout=0.2)
    np.testing.assert_allclose(np.diff(part.cumulative, prepend=0) * WEIGHTS[part.source.rows].sum(), WEIGHTS[part.source.rows])
    assert data_digest(part) != data_digest(sampled("shuffle", weights=WEIGHTS, holdout=0.2))
    assert ArraySource(PIXELS, LABELS).cumulative is None


@pytest.mark.parametrize(
    "weights", [None, WEIGHTS[:99], -WEIGHTS, 0 * WEIGHTS, WEIGHTS + np.inf, WEIGHTS * np.nan, "a", WEIGHTS[:, None]]
)
def test_unusable_weights_are_refused(weights):
    found = r"(no `weights`|`weights` of shape .*, from \S+ to \S+); they must be of shape \((100|80),\), from .* all 0"
    message = f"^data.sampling='weights': the training set has {found}; give arrays"
    for data in ({}, {"holdout": 0.2}):
        with pytest.raises(ConfigError, match=message):
            sampled("weights", weights=weights, **data)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"sampling": "balanced", "repeats": 3}, "data.sampling='balanced': not used with data.repeats=3; omit it"),
        ({"sampling": "often"}, "data.sampling='often': must be 'shuffle', 'balanced' or 'weights'"),
    ],
)
def test_sampling_that_does_not_fit_is_refused(flags, message):
    with pytest.raises(ConfigError) as error:
        validate(Config(data=Data(**flags)))
    assert str(error.value) == message


def test_balanced_needs_one_class_for_each_image_that_is_known_and_images_of_every_class():
    config = Config(task="labels", data=Data(sampling="balanced"))
    with pytest.raises(ConfigError, match=r"^data.sampling='balanced': task='labels' has no classes, .*; use weights$"):
        validate(dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, loss="binary")))
    for source, reason in (
        ("synthetic", "has its labels only with the images"),
        ("given", "no training image has the class 1"),
    ):
        config = Config(data=Data(source=source, image_size=16, sampling="balanced", train_examples=8, eval_examples=8))
        with pytest.raises(ConfigError, match=f"^data.sampling='balanced': .*{reason}; give weights"):
            sources.open_datasets(config, ((PIXELS, 2 * (LABELS > 0)),) * 2 if source == "given" else None)
