"""Training images of phases with different image sizes."""

import dataclasses

import numpy as np
import pytest
from helpers.images import folder_config

from jaxdp.config import Augment, Data, Phase, at_image_size, phase_image_size
from jaxdp.data import sources
from jaxdp.data.decode import Scratch, decode
from jaxdp.data.host_crops import random_numbers, random_resized_crop
from jaxdp.validation import validate


@pytest.fixture
def growing(tiny):
    """Images of 8x8 for one epoch and a half, then of 16x16."""
    return dataclasses.replace(tiny, batch=(Phase(8, 1.5, image_size=8), Phase(8)))


def test_random_crops_while_decoding_have_the_size_of_the_phase(pictures):
    config = folder_config(pictures, augmentation="random_resized_crop")
    config = dataclasses.replace(config, batch=(Phase(8, 1.0, image_size=24), Phase(8)), augment=Augment(min_area=0.3))
    config = validate(config)
    datasets = sources.open_datasets(config)
    for index, size in enumerate((24, 32)):
        images, _ = datasets.train_at(phase_image_size(config, index)).batch(np.array([5]), np.array([7]))
        expected = np.empty((size, size, 3), np.uint8)
        pixels = decode(sources.open_split(config, "train")[5][0], Scratch())
        random_resized_crop(pixels, expected, ranges=config.augment, random=random_numbers(config.seed, 7))
        np.testing.assert_array_equal(images[0], expected)
    assert datasets.evaluation.batch(np.array([0]), np.array([0]))[0].shape == (1, 32, 32, 3)


def test_images_of_a_stored_size_are_cropped_to_the_size_of_the_phase(growing):
    """One set of stored images serves all phases, from which the device crops."""
    data = dataclasses.replace(growing.data, augmentation="paper", stored_size=20)
    config = dataclasses.replace(growing, data=data)
    opened = sources.open_datasets(validate(config))
    assert opened.train_at(8) is opened.train_at(16) is opened.train
    assert opened.train.batch(np.array([0]))[0].shape == (1, 20, 20, 3)


def test_small_images_in_memory_are_decoded_in_every_size(growing):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), np.uint8)
    labels = np.arange(12) % 6
    config = validate(dataclasses.replace(growing, data=Data(source="given", image_size=16), epochs=2.0))
    opened = sources.open_datasets(config, [(pixels, labels)] * 2)
    np.testing.assert_array_equal(opened.train_at(16).images, pixels)
    alone = sources.open_datasets(validate(at_image_size(config, 8)), [(pixels, labels)] * 2)
    np.testing.assert_array_equal(opened.train_at(8).images, alone.train.images)


def test_images_of_several_sizes_are_not_resident(growing):
    pair = [(np.zeros((12, 16, 16, 3), np.uint8), np.arange(12) % 6)] * 2
    config = validate(dataclasses.replace(growing, data=Data(source="given", image_size=16), epochs=2.0))
    for some, resident in ((config, False), (validate(at_image_size(config, 8)), True)):
        assert sources.is_resident(sources.open_datasets(some, pair), "gpu") == resident
