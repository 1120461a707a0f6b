import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from jaxdp.config import Config, Data, Model
from jaxdp.data import augment, feed
from jaxdp.data.order import permutation, sample_ids
from jaxdp.data.sources import ArraySource, SyntheticSource, open_datasets


def test_every_epoch_has_every_sample_once_in_another_order():
    ids = sample_ids(5, np.arange(3 * 101), 101).reshape(3, 101)
    for epoch in ids:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(101))
    assert not np.array_equal(ids[0], ids[1])
    assert not np.array_equal(ids[0], sample_ids(6, np.arange(101), 101))


def test_order_depends_on_position_alone_not_on_how_it_is_cut_into_batches():
    whole = sample_ids(1, np.arange(1000), 77)
    cuts = [0, 13, 77, 80, 250, 777, 1000]
    parts = [sample_ids(1, np.arange(a, b), 77) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_the_order_of_an_epoch_is_the_documented_numpy_stream():
    expected = np.random.Generator(np.random.Philox(key=[9, 4])).permutation(1000)
    np.testing.assert_array_equal(permutation(9, 4, 1000), expected)


def test_any_sample_of_imagenet_is_found_without_those_before_it():
    examples, position = 1_281_167, 57 * 1_281_167 + 400_000
    expected = np.random.Generator(np.random.Philox(key=[3, 57])).permutation(examples)[400_000:400_005]
    permutation.cache_clear()
    np.testing.assert_array_equal(sample_ids(3, np.arange(position, position + 5), examples), expected)
    assert permutation.cache_info().misses == 1  # one epoch was shuffled, none of the 57 before


def digits(**options):
    return open_datasets(Config(model=Model(classes=10), data=Data(**options)))


def test_digits_are_split_into_1437_and_360_with_every_class_in_its_share():
    data = digits()
    assert data.classes == tuple("0123456789")
    assert (len(data.train), len(data.evaluation)) == (1437, 360)
    assert data.train.images.shape[1:] == (32, 32, 3)
    assert data.train.images.dtype == np.uint8
    shares = np.bincount(data.evaluation.labels) / np.bincount(np.r_[data.train.labels, data.evaluation.labels])
    np.testing.assert_allclose(shares, 360 / 1797, atol=0.003)


def test_digits_are_all_used_and_held_out_ones_are_in_no_training_split():
    from sklearn.datasets import load_digits

    test, train = digits().evaluation, digits().train
    fit, validation = digits(train_split="fit"), digits(train_split="fit", eval_split="validation").evaluation
    assert len(fit.train) + len(validation) == len(train)

    def rows(source):
        return {image.tobytes() for image in source.images}

    assert rows(fit.train) | rows(validation) == rows(train)
    assert len(rows(train) | rows(test)) == len(np.unique(load_digits().data, axis=0))
    assert not rows(test) & rows(train)
    assert not rows(validation) & rows(fit.train)


def test_enlarged_digits_shrink_back_to_the_originals():
    """Each 4x4 block of an enlarged digit averages to the pixel it came from, within a grey level of the 16."""
    from sklearn.datasets import load_digits

    data = digits()
    small = data.train.images[:50, :, :, 0].reshape(50, 8, 4, 8, 4).mean((2, 4)) / 255 * 16
    originals = load_digits()
    distance = np.abs(small[:, None] - originals.images[None]).mean((2, 3))
    assert distance.min(1).max() < 1.0
    np.testing.assert_array_equal(originals.target[distance.argmin(1)], data.train.labels[:50])


def test_synthetic_images_depend_on_seed_split_and_index_alone():
    source, again = (SyntheticSource(100, 8, 5, seed=3, split=0) for _ in range(2))
    images, labels = source.batch(np.array([7, 3, 99]))
    for row, index in enumerate((7, 3, 99)):
        image, label = again[index]
        np.testing.assert_array_equal(image, images[row])
        assert label == labels[row]
    other_split, other_seed = SyntheticSource(100, 8, 5, seed=3, split=1), SyntheticSource(100, 8, 5, seed=4, split=0)
    assert not np.array_equal(other_split[7][0], source[7][0])
    assert not np.array_equal(other_seed[7][0], source[7][0])
    with pytest.raises(IndexError):
        source[100]


def test_synthetic_images_are_made_one_by_one_whatever_the_size_of_the_source():
    source = SyntheticSource(10**9, 224, 1000, seed=0, split=0)
    assert len(source) == 10**9
    assert source[10**9 - 1][0].shape == (224, 224, 3)


def test_evaluation_batches_hold_every_example_once():
    source = ArraySource(np.arange(23)[:, None, None, None].repeat(3, -1), np.arange(23))
    for batch, rows in ((4, 4), (5, 8), (23, 24), (40, 40), (1, 8)):
        seen = []
        for first in range(0, 23, batch):
            part = feed.evaluation_batch(source, batch, np.arange(rows), first)
            assert len(part["labels"]) == rows
            seen += part["labels"][part["weights"] == 1].tolist()
        assert seen == list(range(23))


def test_batches_are_fresh_memory_each_time():
    source = ArraySource(np.zeros((10, 4, 4, 3)), np.arange(10))
    first, second = feed.train_batch(source, 0, 0, 4), feed.train_batch(source, 0, 0, 4)
    assert not np.shares_memory(first["images"], second["images"])
    assert not np.shares_memory(first["images"], source.images)


def some_images():
    return np.random.default_rng(0).integers(0, 256, (6, 16, 20, 3)).astype(np.uint8)


def test_the_affine_equals_scipy():
    affine = np.array([[0.9, 0.2, 0.05], [-0.1, 1.1, -0.08]])
    image = some_images()[0].astype(np.float64)
    # scipy maps output pixel to input pixel; ours is relative to the centre and the size of the image
    size, centre = np.array([16.0, 20.0]), np.array([7.5, 9.5])
    matrix = np.diag(size) @ affine[:, :2] @ np.diag(1 / size)
    offset = centre + size * affine[:, 2] - matrix @ centre
    expected = np.stack(
        [ndimage.affine_transform(image[..., c], matrix, offset, order=1, mode="nearest") for c in range(3)], axis=-1
    )
    ours = augment._resample_affine(jnp.asarray(image, jnp.float32), jnp.asarray(affine, jnp.float32))
    np.testing.assert_allclose(ours, expected, atol=0.05)


def with_data(seed=1, **data) -> Config:
    return Config(seed=seed, data=Data(image_size=16, **data))


@pytest.mark.parametrize("name", ["digits", "paper", "random_resized_crop", "pad_and_crop"])
def test_augmentation_depends_on_seed_and_position_alone(name):
    images, positions = some_images()[:, :, :16], np.arange(40, 46, dtype=np.uint32)
    apply = jax.jit(augment.augment, static_argnums=0)
    whole = apply(with_data(augmentation=name), images, positions)
    part = apply(with_data(augmentation=name), images[4:5], positions[4:5])
    np.testing.assert_allclose(whole[4:5], part, atol=1e-2)
    assert not np.allclose(whole, apply(with_data(seed=2, augmentation=name), images, positions), atol=1)
    assert not np.allclose(whole, apply(with_data(augmentation=name), images, positions + 1), atol=1)


def test_without_augmentation_images_stay_as_they_are():
    np.testing.assert_array_equal(augment.augment(with_data(), some_images(), np.arange(6)), some_images())


def test_augmentation_is_small_and_about_the_identity():
    keys = augment.keys_for(0, jnp.arange(4000, dtype=jnp.uint32))
    affines = np.asarray(jax.vmap(augment._random_affine)(keys), np.float64)
    np.testing.assert_allclose(affines.mean(0), [[1, 0, 0], [0, 1, 0]], atol=0.02)
    assert np.abs(affines[:, :, 2]).max() <= augment.SHIFT
    determinants = np.linalg.det(affines[:, :, :2])
    np.testing.assert_allclose([determinants.min(), determinants.max()], np.exp([-0.2, 0.2]), rtol=0.01)


def test_normalised_digits_have_about_zero_mean_and_unit_spread():
    data = digits()
    pixels = np.asarray(augment.normalise(data.train.images, data.mean, data.std))
    assert abs(pixels.mean()) < 0.05
    assert abs(pixels.std() - 1) < 0.05
