"""Digits and synthetic images."""

import numpy as np
import pytest
from helpers.step import with_parts

from jaxdp.config import Config, Data, Model, Phase
from jaxdp.data import augment
from jaxdp.data.digits import FILE
from jaxdp.data.sources import open_datasets, source_of
from jaxdp.data.synthetic import SyntheticSource
from jaxdp.errors import ConfigError


def open_digits(**options):
    return open_datasets(Config(model=Model(classes=10), data=Data(**options)))


def test_digits_and_their_splits_are_those_of_sklearn():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    originals = load_digits()
    with np.load(FILE) as file:
        np.testing.assert_array_equal(file["images"], originals.images)
        np.testing.assert_array_equal(file["labels"], originals.target)
        split = file["split"]
    kept = np.arange(len(split))
    for number, held_out in ((2, 360), (1, 288)):
        kept, held = train_test_split(kept, test_size=held_out, stratify=originals.target[kept], random_state=0)
        np.testing.assert_array_equal(np.flatnonzero(split == number), np.sort(held))
        kept = np.sort(kept)
    sources = {name: open_digits(train_split="fit", eval_split=name).evaluation for name in ("validation", "test")}
    sources |= {name: open_digits(train_split=name).train for name in ("train", "fit")}
    numbers = {"train": (0, 1), "fit": (0,), "validation": (1,), "test": (2,)}
    for name, source in sources.items():
        np.testing.assert_array_equal(source.labels, originals.target[np.isin(split, numbers[name])])
    assert open_digits().classes == tuple("0123456789")


def test_digits_of_their_own_size_have_the_values_of_sklearn_from_0_to_255():
    from sklearn.datasets import load_digits

    with np.load(FILE) as file:
        test = file["split"] == 2
    images = open_digits(image_size=8).evaluation.images
    assert images.shape == (360, 8, 8, 3)
    for channel in range(3):
        np.testing.assert_array_equal(images[..., channel], np.rint(load_digits().images[test] * 255 / 16))


def test_synthetic_images_depend_on_seed_split_and_index_only():
    source, again = (SyntheticSource(100, 8, 5, seed=3, split=0) for _ in range(2))
    images, labels = source.batch(np.array([7, 3, 99]))
    for row, index in enumerate((7, 3, 99)):
        image, label = again[index]
        np.testing.assert_array_equal(image, images[row])
        assert label == labels[row]
    other_split, other_seed = SyntheticSource(100, 8, 5, seed=3, split=1), SyntheticSource(100, 8, 5, seed=4, split=0)
    assert not np.array_equal(other_split[7][0], source[7][0])
    assert not np.array_equal(other_seed[7][0], source[7][0])
    assert not np.array_equal(other_seed[7][0], other_split[7][0])
    with pytest.raises(IndexError):
        source[100]


def test_synthetic_images_are_the_same_in_every_release():
    """Because runs continue from checkpoints that saw them."""
    source = SyntheticSource(100, 8, 5, seed=3, split=1)
    colors = np.random.Generator(np.random.Philox(key=[7, 5])).integers(0, 128, (5, 3), np.uint8)
    for index in (0, 42):
        random = np.random.Generator(np.random.Philox(key=[3 * 256 + 1, index]))
        label = random.integers(5, dtype=np.int32)
        image = random.integers(0, 128, (8, 8, 3), np.uint8) + colors[label]
        for found in (source[index], [rows[0] for rows in source.batch(np.array([index]))]):
            assert (found[0].dtype, found[1].dtype) == (np.uint8, np.int32)
            np.testing.assert_array_equal(found[0], image)
            assert found[1] == label
    with pytest.raises(IndexError):
        source[-1]


@pytest.mark.parametrize("source", ["digits", "synthetic"])
def test_phases_of_another_size_have_the_training_images_at_that_size_and_labels_the_order_of_the_run(source):
    data = Data(source=source, image_size=8, train_examples=30, eval_examples=20)
    config = Config(model=Model(classes=10), data=data, batch=(Phase(8), Phase(8, image_size=12)))
    opened = open_datasets(config)
    assert list(opened.resized) == [12]
    assert source_of(config).size(config) == (len(opened.train), 10)
    indices = np.arange(30)
    images, labels = opened.resized[12].batch(indices, indices)
    np.testing.assert_array_equal(labels, opened.train.batch(indices, indices)[1])
    assert images.shape == (30, 12, 12, 3)
    names = tuple("0123456789")
    again = open_datasets(config, trained=names if source == "digits" else ())
    np.testing.assert_array_equal(again.train.batch(indices, indices)[1], labels)
    if source == "digits":
        turned = open_datasets(config, trained=names[::-1])
        np.testing.assert_array_equal(turned.train.batch(indices, indices)[1], 9 - labels)
        assert (turned.classes, turned.class_count, turned.train.labels.dtype) == (names[::-1], 10, np.int32)
        fit = with_parts(config, data={"train_split": "fit"})
        assert source_of(fit).size(fit) == (len(open_datasets(fit).train), 10)
    else:
        with pytest.raises(ConfigError, match=r"the training set is of other classes: its numbers are in a different order"):
            open_datasets(config, trained=names[::-1])
        assert source_of(config).size(with_parts(config, model={"classes": None})) == (30, 1000)


def test_synthetic_images_are_the_color_of_their_class_in_every_split_under_noise_of_128_levels():
    config = Config(
        seed=5, model=Model(classes=3), data=Data(source="synthetic", image_size=16, train_examples=60, eval_examples=40)
    )
    opened = open_datasets(config)
    assert (len(opened.train), len(opened.evaluation), opened.class_count) == (60, 40, 3)
    sets = [opened.train, opened.evaluation, SyntheticSource(60, 16, 3, seed=6, split=0)]
    darkest = np.empty((len(sets), 3, 3), int)  # [set, class, channel]
    for number, source in enumerate(sets):
        images, labels = source.batch(np.arange(len(source)))
        for label in range(3):
            pixels = images[labels == label].reshape(-1, 3).astype(int)
            darkest[number, label] = pixels.min(0)
            np.testing.assert_array_equal(pixels.max(0) - pixels.min(0), 127)
    np.testing.assert_array_equal(darkest, np.broadcast_to(darkest[0], darkest.shape))
    assert len(np.unique(darkest[0], axis=0)) == 3


def test_normalized_digits_have_zero_mean_and_unit_variance():
    data = open_digits()
    pixels = np.asarray(augment.normalize(data.train.images, data.mean, data.std))
    assert abs(pixels.mean()) < 0.05
    assert abs(pixels.std() - 1) < 0.05
