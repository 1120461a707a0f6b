"""Crops on the host, compared with Pillow, OpenCV and torchvision's definitions."""

import cv2
import numpy as np
import pytest
from helpers.images import assert_like_random_crops, mean_over_areas, noise, published_evaluation, smooth_image
from PIL import Image

from jaxdp.config import Augment
from jaxdp.data.host_crops import BLOCK, CROP_ATTEMPTS, center_crop, random_crop_box, random_numbers, random_resized_crop


@pytest.mark.parametrize(("height", "width"), [(375, 500), (700, 525), (309, 103), (1200, 900), (256, 300), (100, 120)])
def test_center_crop_of_noise_matches_pillow_filter(height, width):
    image = noise(height, width)
    expected = np.asarray(published_evaluation(Image.fromarray(image), resize=256, crop=224)).astype(int)
    out = np.empty((224, 224, 3), np.uint8)
    center_crop(image, out, 256)
    difference = np.abs(out.astype(int) - expected)
    assert difference.mean() <= 1
    assert difference.max() <= 4


def test_center_crop_of_extreme_aspect_ratio_takes_little_memory():
    out = np.empty((224, 224, 3), np.uint8)
    center_crop(np.full((2, 20_000, 3), 7, np.uint8), out, 256)  # whole: 256 x 2,560,000 pixels
    assert (out == 7).all()


def test_random_crop_boxes_lie_inside_with_uniform_places_and_the_published_sizes():
    boxes = np.array([random_crop_box(300, 400, min_area=0.2, random=random_numbers(0, n)) for n in range(4000)])
    top, left, height, width = boxes.T
    assert min(top.min(), left.min()) >= 0
    assert_like_random_crops(boxes[:, 2:], 300, 400, min_area=0.2)
    down, across = 300 - height, 400 - width
    assert ((top <= down) & (left <= across)).all()
    free = (down > 20) & (across > 20)
    places = np.stack([top[free] / down[free], left[free] / across[free]])
    assert np.abs(places.mean(1) - 0.5).max() < 0.03
    assert abs(np.corrcoef(places)[0, 1]) < 0.06
    assert random_crop_box(10, 100, min_area=0.9, random=random_numbers(0, 0)) == (
        0,
        43,
        10,
        13,
    )  # no draw fits
    assert random_crop_box(100, 10, min_area=0.9, random=random_numbers(0, 0)) == (43, 0, 13, 10)


def test_random_crops_of_a_small_image_have_pixels_reach_its_sides_and_take_every_place_equally_often():
    def boxes(height, width, min_area):
        random = (random_numbers(2, n) for n in range(6000))
        return np.array([random_crop_box(height, width, min_area=min_area, random=numbers) for numbers in random])

    assert boxes(2, 3, 0.01)[:, 2:].min() == 1
    drawn = boxes(6, 8, 0.3)
    assert drawn[:, 2:].max(0).tolist() == [6, 8]
    places = drawn[(drawn[:, 2:] == (4, 5)).all(1), :2]
    counts = np.unique(places, axis=0, return_counts=True)[1]
    assert len(counts) == 3 * 4
    assert ((counts - len(places) / 12) ** 2).sum() < (11 + 4 * np.sqrt(2 * 11)) * len(places) / 12  # chi-square


def test_random_resized_crop_resizes_box_and_flips_half():
    image, mirrored = smooth_image(90, 120), 0
    for position in range(200):
        out = np.empty((32, 32, 3), np.uint8)
        random_resized_crop(image, out, ranges=Augment(), random=random_numbers(5, position))
        top, left, height, width = random_crop_box(90, 120, min_area=0.08, random=random_numbers(5, position))
        expected = cv2.resize(np.ascontiguousarray(image[top : top + height, left : left + width]), (32, 32))
        if not np.array_equal(out, expected):
            np.testing.assert_array_equal(out[:, ::-1], expected)
            mirrored += 1
        random_resized_crop(image, out, ranges=Augment(flip=False), random=random_numbers(5, position))
        np.testing.assert_array_equal(out, expected)
    assert 70 < mirrored < 130


def test_interpolation_of_random_crops_is_pillows():
    """At most 1 of 255 apart; `random` is one of the two, each in half of the images, independent of the flip."""
    image, drawn = smooth_image(90, 120), []
    for position in range(200):
        random = random_numbers(5, position)
        top, left, height, width = random_crop_box(90, 120, min_area=0.08, random=random)
        crop = Image.fromarray(np.ascontiguousarray(image[top : top + height, left : left + width]))
        flip, outs, expected = random[0] < 0.5, {}, {}
        for name in ("bilinear", "bicubic", "random"):
            outs[name] = np.empty((32, 32, 3), np.uint8)
            random_resized_crop(image, outs[name], ranges=Augment(crop_interpolation=name), random=random)
        for name, resample in (("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)):
            expected[name] = np.asarray(crop.resize((32, 32), resample)).astype(int)[:, :: -1 if flip else 1]
            assert np.abs(outs[name] - expected[name]).max() <= 1
        is_cubic = np.array_equal(outs["random"], outs["bicubic"])
        assert is_cubic or np.array_equal(outs["random"], outs["bilinear"])
        drawn.append((flip, is_cubic))
    counts = [drawn.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))]
    assert min(counts) > 30


@pytest.mark.parametrize("pixels", [noise, smooth_image])
def test_area_interpolation_of_random_crops_is_the_mean_over_areas(pixels):
    image, ranges, size = pixels(160, 200), Augment(crop_interpolation="area", min_area=0.25), 48
    for position in range(20):
        random = random_numbers(5, position)
        top, left, height, width = random_crop_box(160, 200, min_area=0.25, random=random)
        out = np.empty((size, size, 3), np.uint8)
        random_resized_crop(image, out, ranges=ranges, random=random)
        expected = mean_over_areas(image[top : top + height, left : left + width], size)[:, :: -1 if random[0] < 0.5 else 1]
        assert np.abs(out - expected).max() <= 0.51, position


def test_random_numbers_are_unique_to_seed_and_position():
    rows = np.array([random_numbers(0, position) for position in range(1000)])
    assert rows.shape == (1000, 3 + 2 * CROP_ATTEMPTS)
    assert len(np.unique(rows)) == rows.size  # none comes twice
    assert (rows >= 0).all()
    assert (rows < 1).all()
    key = np.array([3, 2**63 + 5], np.uint64)  # a block of 256 positions, so that resumed runs see what they would have seen
    block = np.random.Generator(np.random.Philox(key=key)).random((256, 3 + 2 * 10))
    assert random_numbers(3, 5 * 256 + 7) == block[7].tolist()
    assert random_numbers(1, 5) != random_numbers(0, 5)
    epoch = np.random.Generator(np.random.Philox(key=[0, 3])).random(3 + 2 * CROP_ATTEMPTS)
    assert not np.isin(random_numbers(0, 3 * BLOCK), epoch).any()  # nor are they those that shuffle
