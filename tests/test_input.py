"""Real images from folders and prepared data sets: decoding, crops, batches, and what is wrong with them."""

import dataclasses
import io
import itertools
import json
import shutil
import struct
import subprocess
import sys
import time

import cv2
import numpy as np
import pytest
from PIL import Image

import jaxdp
from jaxdp.config import Augment, Config, ConfigError, Data, Model
from jaxdp.data import decode, feed, folder, groups, loader, prepared, sources
from jaxdp.data.decode import ImageError
from jaxdp.data.loader import DataError, Loader
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import input_bytes, make_plan
from jaxdp.recipes import load_config
from jaxdp.training import remarks, seal
from jaxdp.training.console import Quiet


def picture(height=60, width=80, seed=0) -> np.ndarray:
    """A smooth picture, so that what JPEG loses is little."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (6, 8, 3)).astype(np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encoded(pixels, form="JPEG", mode="RGB", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, form, **({"quality": 95} if form == "JPEG" else {}) | options)
    return file.getvalue()


# decoding


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"optimize": True}])
def test_a_jpeg_is_decoded_as_pillow_does(options):
    data = encoded(picture(), **options)
    ours, pillow = decode.decode(data).astype(int), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(ours - pillow).max() <= 2


def test_grey_cmyk_and_png_are_decoded_to_three_channels():
    whole = picture()
    grey = decode.decode(encoded(whole, mode="L"))
    assert grey.shape == (60, 80, 3)
    np.testing.assert_array_equal(grey[..., 0], grey[..., 2])
    cmyk = encoded(whole, mode="CMYK")
    expected = np.asarray(Image.open(io.BytesIO(cmyk)).convert("RGB")).astype(int)
    assert np.abs(decode.decode(cmyk) - expected).max() <= 2
    np.testing.assert_array_equal(decode.decode(encoded(whole, "PNG")), whole)  # ImageNet has one, named .JPEG
    np.testing.assert_array_equal(decode.decode(encoded(whole, "PNG", mode="RGBA")), whole)
    palette = encoded(whole, "GIF", mode="P")
    np.testing.assert_array_equal(decode.decode(palette), np.asarray(Image.open(io.BytesIO(palette)).convert("RGB")))


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_is_scaled_to_8_in_every_format(form):
    deep = np.random.default_rng(0).integers(0, 2**16, (20, 30), np.uint16)
    held = io.BytesIO()
    Image.fromarray(deep).save(held, form)
    np.testing.assert_array_equal(decode.decode(held.getvalue()), np.repeat(deep[..., None] >> 8, 3, axis=2))


@pytest.mark.parametrize(("dtype", "kind"), [(np.int32, "whole numbers of 32 bits"), (np.float32, "floating-point numbers")])
def test_pixels_whose_white_is_not_known_are_refused(dtype, kind):
    held = io.BytesIO()
    Image.fromarray(np.ones((20, 30), dtype)).save(held, "TIFF")
    with pytest.raises(ImageError, match=f"its pixels are {kind}, whose white is not known; convert it to 8 or 16 bits"):
        decode.decode(held.getvalue())


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_what_exif_says_of_turning_is_left_alone(form):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert decode.decode(encoded(picture(), form, exif=exif)).shape == (60, 80, 3)


@pytest.mark.parametrize(
    "data", [b"", b"no image", b"\xff\xd8\xff", encoded(picture())[:-400], encoded(picture(), "PNG")[:-300]]
)
def test_what_is_damaged_is_refused(data):
    with pytest.raises(ImageError):
        decode.decode(data)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("damage", ["zeros within", "second half zeros", "half and end marker", "half"])
def test_a_damaged_jpeg_is_refused_and_not_painted_over(progressive, damage):
    data = encoded(noise(60, 80), progressive=progressive)
    half = len(data) // 2
    damaged = {
        "zeros within": data[:half] + bytes(1000) + data[half + 1000 :],
        "second half zeros": data[:half] + bytes(len(data) - half - 2) + data[-2:],
        "half and end marker": data[:half] + b"\xff\xd9",
        "half": data[:half],
    }[damage]
    with pytest.raises(ImageError):
        decode.decode(damaged)


def test_an_image_that_claims_to_be_huge_is_refused_before_memory_is_taken():
    header = encoded(np.zeros((16, 16, 3), np.uint8))
    at = header.index(b"\xff\xc0") + 5
    with pytest.raises(ImageError, match="it has 60000x60000 pixels, and 67,108,864 in all are the most"):
        decode.decode(header[:at] + struct.pack(">HH", 60000, 60000) + header[at + 4 :])


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (50, 1)])
def test_one_pixel_is_no_picture(shape):
    with pytest.raises(ImageError, match=f"it has {shape[1]}x{shape[0]} pixels, and 2x2 are the least"):
        decode.decode(encoded(np.zeros((*shape, 3), np.uint8), "PNG"))


# crops


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (256, 256), (300, 1000)])
def test_evaluation_is_pillows_resize_to_256_and_centre_of_224(height, width):
    """torchvision's Resize(256) and CenterCrop(224) of a PIL image: at most 1/255 apart in the mean, 4/255 anywhere."""
    image = picture(height, width)
    short, long = min(height, width), max(height, width)
    size = (256, int(256 * long / short)) if width <= height else (int(256 * long / short), 256)
    resized = Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)
    left, top = round((resized.width - 224) / 2), round((resized.height - 224) / 2)
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224))).astype(int)
    out = np.empty((224, 224, 3), np.uint8)
    decode.centre_crop(image, out, 256)
    difference = np.abs(out.astype(int) - expected)
    assert difference.mean() <= 1
    assert difference.max() <= 4


def centred(size):
    return lambda image, out, position: decode.centre_crop(image, out, size)


def noise(height, width):
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3)).astype(np.uint8)


def torchvision_evaluation(image, short, out):
    """torchvision's Resize(short) and CenterCrop(out) of a PIL image."""
    height, width = image.shape[:2]
    size = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    resized = Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)
    left, top = round((resized.width - out) / 2), round((resized.height - out) / 2)
    return np.asarray(resized.crop((left, top, left + out, top + out)))


@pytest.mark.parametrize(("height", "width"), [(375, 500), (700, 525), (309, 103), (1200, 900), (256, 300), (100, 120)])
def test_evaluation_of_fine_detail_is_pillows_too(height, width):
    """Noise tells filters apart: OpenCV's bilinear filter, which does not widen with the reduction, is far from it."""
    image = noise(height, width)
    expected = torchvision_evaluation(image, 256, 224).astype(int)
    out = np.empty((224, 224, 3), np.uint8)
    decode.centre_crop(image, out, 256)
    difference = np.abs(out.astype(int) - expected)
    assert difference.mean() <= 1
    assert difference.max() <= 4
    if min(height, width) >= 512:
        scale = 256 / min(height, width)
        other = cv2.resize(image, (int(width * scale), int(height * scale)), interpolation=cv2.INTER_LINEAR)
        top, left = round((other.shape[0] - 224) / 2), round((other.shape[1] - 224) / 2)
        assert np.abs(other[top : top + 224, left : left + 224].astype(int) - expected).mean() > 4


@pytest.mark.parametrize("out", [32, 224, 320])
def test_squares_of_every_size_become_squares(out):
    for side in range(2, 400):
        row = np.empty((out, out, 3), np.uint8)
        decode.centre_crop(np.full((side, side, 3), 9, np.uint8), row, out)
        assert (row == 9).all()


def test_a_thread_of_an_image_takes_little_memory():
    out = np.empty((224, 224, 3), np.uint8)
    decode.centre_crop(np.full((2, 20_000, 3), 7, np.uint8), out, 256)  # whole: 256 x 2,560,000 pixels
    assert (out == 7).all()


def test_an_image_of_the_right_size_is_not_resampled():
    out = np.empty((32, 32, 3), np.uint8)
    decode.centre_crop(picture(32, 32), out, 32)
    np.testing.assert_array_equal(out, picture(32, 32))


def test_random_boxes_lie_inside_and_have_the_promised_areas_and_ratios():
    boxes = np.array([decode.random_crop_box(300, 400, 0.2, decode.random_for(0, n)) for n in range(2000)])
    top, left, height, width = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 300).all()
    assert (left + width <= 400).all()
    share, ratio = height * width / 120_000, width / height
    assert share.min() > 0.195
    assert share.max() <= 1
    assert 0.73 < ratio.min() < 0.78
    assert 1.28 < ratio.max() < 1.36
    assert decode.random_crop_box(10, 100, 0.9, decode.random_for(0, 0)) == (0, 43, 10, 13)  # no draw fits


def test_a_random_crop_is_opencvs_resize_of_its_box_mirrored_in_half_of_the_cases():
    image, mirrored = picture(90, 120), 0
    for position in range(200):
        out = np.empty((32, 32, 3), np.uint8)
        decode.random_resized_crop(image, out, Augment(), decode.random_for(5, position))
        top, left, height, width = decode.random_crop_box(90, 120, 0.08, decode.random_for(5, position))
        expected = cv2.resize(np.ascontiguousarray(image[top : top + height, left : left + width]), (32, 32))
        if not np.array_equal(out, expected):
            np.testing.assert_array_equal(out[:, ::-1], expected)
            mirrored += 1
    assert 70 < mirrored < 130


# folders


@pytest.fixture
def pictures(tmp_path):
    """A folder of three classes with 7, 8, 9 training and 3, 4, 5 evaluation images of several sizes and forms."""
    for split, first in (("train", 7), ("val", 3)):
        for label, name in enumerate(("cat", "dog", "eel")):
            (tmp_path / "pics" / split / name).mkdir(parents=True)
            for n in range(first + label):
                form = "PNG" if n == 2 else "JPEG"
                data = encoded(picture(50 + 3 * n, 60 - 2 * n, seed=100 * label + n), form, mode="L" if n == 1 else "RGB")
                (tmp_path / "pics" / split / name / f"{n}.JPEG").write_bytes(data)
    return tmp_path / "pics"


def test_a_folder_has_its_classes_in_order_and_its_images_as_bytes(pictures):
    source = folder.ImageFolder(pictures / "train")
    assert source.classes == ["cat", "dog", "eel"]
    assert (len(source), source.labels) == (24, [0] * 7 + [1] * 8 + [2] * 9)
    assert source[8] == ((pictures / "train/dog/1.JPEG").read_bytes(), 1)
    assert source.name(8).endswith("train/dog/1.JPEG")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "val").rename(root / "valley"), "data.eval_split: None is not allowed; .* has none of val"),
        (lambda root: (root / "train").rename(root / "t"), "it has no folder 'train'"),
        (lambda root: [f.unlink() for f in (root / "train/dog").iterdir()], "the class folder .*train/dog' has no image"),
        (lambda root: (root / "val/cat").rename(root / "val/cow"), "has the class 'cow', which training has not"),
        (lambda root: [f.unlink() for f in (root / "val/cat").iterdir()], "the class folder .*val/cat' has no image"),
        (
            lambda root: [[f.unlink() for f in (root / "val/cat").iterdir()], (root / "val/cat").rmdir()],
            "lacks 1 of 3 classes, 'cat'",
        ),
        (lambda root: root.rename(root.with_name("elsewhere")), "there is no such folder"),
        (lambda root: (root / "val/cow").symlink_to(root / "nowhere"), "val/cow' is a link to nothing; mend or remove it"),
    ],
)
def test_a_folder_that_cannot_be_trained_on_is_one_line(pictures, change, message):
    change(pictures)
    with pytest.raises(ConfigError, match=message) as caught:
        sources.open_datasets(config_for(pictures))
    assert "\n" not in str(caught.value)


def config_for(directory, **data) -> Config:
    return Config(
        data=Data(source="folder", directory=str(directory), image_size=32, **{"augmentation": "random_resized_crop"} | data),
        model=Model(classes=3),
    )


def test_fewer_classes_in_the_model_than_in_the_data_is_an_error(pictures):
    with pytest.raises(ConfigError, match=r"model.classes: 2 is not allowed; folder needs at least 3"):
        sources.open_datasets(dataclasses.replace(config_for(pictures), model=Model(classes=2)))


# batches


def test_a_batch_depends_on_seed_and_positions_alone_not_on_threads_or_cuts(pictures):
    one = sources.open_datasets(config_for(pictures, threads=1)).train
    many = sources.open_datasets(config_for(pictures, threads=5)).train
    ids, positions = np.array([3, 20, 3, 11, 0, 9]), np.arange(70, 76)
    images, labels = one.batch(ids, positions)
    again, _ = many.batch(ids[2:], positions[2:])
    np.testing.assert_array_equal(images[2:], again)
    np.testing.assert_array_equal(labels, [0, 2, 0, 1, 0, 1])
    assert not np.array_equal(images[0], images[2])  # the same picture at another position
    assert not np.shares_memory(images, one.batch(ids, positions)[0])


def test_evaluation_is_the_centre_whatever_the_position(pictures):
    source = sources.open_datasets(config_for(pictures)).evaluation
    first, second = source.batch(np.array([4]), np.array([0])), source.batch(np.array([4]), np.array([9]))
    np.testing.assert_array_equal(first[0], second[0])
    out = np.empty((32, 32, 3), np.uint8)
    decode.centre_crop(decode.decode((pictures / "val/dog/1.JPEG").read_bytes()), out, 37)  # 256 / 224 of 32
    np.testing.assert_array_equal(first[0][0], out)


def test_small_images_for_a_transform_on_the_device_are_decoded_once(pictures):
    source = sources.open_datasets(config_for(pictures, augmentation="pad_and_crop")).train
    assert isinstance(source, sources.ArraySource)
    assert source.images.shape == (24, 32, 32, 3)


def test_a_damaged_image_stops_the_run_by_name(pictures):
    victim = pictures / "train/dog/4.JPEG"
    victim.write_bytes(victim.read_bytes()[:-300])
    source = sources.open_datasets(config_for(pictures)).train
    with pytest.raises(
        DataError, match=r"train/dog/4.JPEG cannot be used: .*; mend or remove it, or give --data.on-bad-image skip"
    ):
        source.batch(np.array([0, 11]), np.array([0, 1]))


def test_damaged_images_are_replaced_by_the_next_good_one_counted_and_named(pictures):
    for name in ("3", "4"):
        (pictures / f"train/dog/{name}.JPEG").write_bytes(b"broken")
    source = sources.open_datasets(config_for(pictures, on_bad_image="skip")).train
    images, labels = source.batch(np.array([10, 11, 12]), np.array([5, 5, 5]))
    np.testing.assert_array_equal(images[0], images[2])
    np.testing.assert_array_equal(images[1], images[2])
    assert labels.tolist() == [1, 1, 1]
    assert sorted(name[-10:] for name in source.bad) == ["dog/3.JPEG", "dog/4.JPEG"]


def test_when_no_image_can_be_used_the_run_stops_even_if_it_may_skip():
    source = Loader([(b"broken", 0)] * 3, lambda *_: None, 8, 2, on_bad_image="skip")
    with pytest.raises(DataError, match="no image of the data set can be used"):
        source.batch(np.array([1]), np.array([0]))


def test_a_file_that_vanishes_is_named(pictures):
    source = sources.open_datasets(config_for(pictures)).train
    (pictures / "train/cat/0.JPEG").unlink()
    with pytest.raises(DataError, match=r"train/cat/0.JPEG cannot be used: No such file or directory"):
        source.batch(np.array([0]), np.array([0]))


@pytest.mark.parametrize("label", [-1, 3, 1.5, "1", True, None, [0, 1], np.nan])
def test_a_label_that_is_no_class_is_refused_by_name(label):
    source = Loader(
        [(np.zeros((9, 9, 3), np.uint8), label)], decode.centre_crop, 8, 3, on_bad_image="skip", what="training image"
    )
    with pytest.raises(DataError, match=r"training image 0: the label .* is not allowed; whole numbers from 0 to 2 are"):
        source.batch(np.array([0]), np.array([0]))


class Raises:
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise self.error


@pytest.mark.parametrize("error", [IndexError("beyond"), KeyError("x"), ValueError("odd")])
def test_what_a_source_raises_is_told_with_the_number_of_the_image(error):
    with pytest.raises(
        DataError, match=rf"image 2: the source raised {type(error).__name__}: .*; it must give \(image, label\)"
    ):
        Loader(Raises(error), None, 8, 3).batch(np.array([2]), np.array([0]))


def test_items_may_be_dicts_pillow_images_and_any_bytes():
    pixels = picture(12, 12)
    data = encoded(pixels, "PNG")
    palette = Image.fromarray(pixels).convert("P")
    items = [{"image": pixels, "label": 1}, (Image.fromarray(pixels), np.int64(1)), (bytearray(data), np.array([1]))]
    source = Loader(
        [*items, (memoryview(data), 1), (palette, 1)], lambda image, out, _: decode.centre_crop(image, out, 12), 12, 2
    )
    images, labels = source.batch(np.arange(5), np.arange(5))
    for image in images[:4]:
        np.testing.assert_array_equal(image, pixels)
    np.testing.assert_array_equal(images[4], np.asarray(palette.convert("RGB")))
    assert labels.tolist() == [1] * 5


def test_a_recipe_may_be_loaded_for_datasets_of_other_classes_than_its_own_data():
    config = load_config("finetune", ["--data.source", "given", "--model.classes", "3", "--data.image-size", "32"])
    pair = [[(picture(), label) for label in (0, 1, 2)] for _ in range(2)]
    assert len(sources.open_datasets(config, pair).train) == 3
    with pytest.raises(
        ConfigError, match=r"digits needs at least 10; .* another data.source \('given' for datasets of your own\)"
    ):
        load_config("finetune", ["--model.classes", "3"])


@pytest.mark.parametrize("given", [(), ([],), ([], 5), {}, "ab", [1, 2]])
def test_data_sets_from_python_are_a_pair_of_sources(given):
    with pytest.raises(ConfigError, match=r"datasets: give a pair \(training, evaluation\) of objects with __len__"):
        sources.open_datasets(Config(data=Data(image_size=80)), given)


def test_an_empty_source_is_refused():
    with pytest.raises(ConfigError, match="the evaluation data are empty"):
        sources.open_datasets(Config(data=Data(image_size=80)), ([(picture(), 0)], []))


def test_the_last_image_is_replaced_by_the_first():
    good = picture(9, 9)
    source = Loader(
        [(good, 0), (good, 1), (b"broken", 1)], lambda image, out, _: decode.centre_crop(image, out, 9), 9, 2, None, "skip"
    )
    images, labels = source.batch(np.array([2]), np.array([0]))
    np.testing.assert_array_equal(images[0], good)
    assert labels.tolist() == [0]


def test_the_random_numbers_of_an_image_are_its_own_and_the_seeds():
    rows = np.array([decode.random_for(0, position) for position in range(1000)])
    assert rows.shape == (1000, 3 + 2 * decode.ATTEMPTS)
    assert len(np.unique(rows)) == rows.size  # none comes twice
    assert (rows >= 0).all()
    assert (rows < 1).all()
    assert decode.random_for(1, 5) != decode.random_for(0, 5)
    epoch = np.random.Generator(np.random.Philox(key=[0, 3])).random(3 + 2 * decode.ATTEMPTS)
    assert not np.isin(decode.random_for(0, 3 * decode.BLOCK), epoch).any()  # nor are they those that shuffle


def test_boxes_reach_every_border_down_and_across_on_their_own():
    boxes = np.array([decode.random_crop_box(300, 400, 0.2, decode.random_for(0, n)) for n in range(4000)])
    down, across = 300 - boxes[:, 2], 400 - boxes[:, 3]
    free = (down > 20) & (across > 20)
    places = np.stack([boxes[free, 0] / down[free], boxes[free, 1] / across[free]])
    assert np.abs(places.mean(1) - 0.5).max() < 0.03
    assert abs(np.corrcoef(places)[0, 1]) < 0.06
    assert (boxes[:, 0] == down).any()
    assert (boxes[:, 1] == across).any()


def test_what_is_kept_in_memory_is_small_and_few(pictures, monkeypatch):
    assert isinstance(sources.open_datasets(config_for(pictures, augmentation="pad_and_crop")).train, sources.ArraySource)
    large = dataclasses.replace(config_for(pictures, augmentation="pad_and_crop").data, image_size=65)
    config = dataclasses.replace(config_for(pictures), data=large)
    assert isinstance(sources.open_datasets(config).train, Loader)
    monkeypatch.setattr(sources, "IN_MEMORY_BYTES", 24 * 32 * 32 * 3 - 1)
    assert isinstance(sources.open_datasets(config_for(pictures, augmentation="pad_and_crop")).train, Loader)


def test_real_images_are_normalised_by_imagenets_mean_and_spread(pictures):
    """The published means and deviations of ImageNet's pixels, times 255."""
    opened = sources.open_datasets(config_for(pictures))
    np.testing.assert_allclose(np.array(opened.mean) / 255, [0.485, 0.456, 0.406], atol=1e-6)
    np.testing.assert_allclose(np.array(opened.std) / 255, [0.229, 0.224, 0.225], atol=1e-6)


def test_files_that_do_not_end_as_images_are_told(pictures):
    (pictures / "train/dog/notes.txt").write_text("x")
    (pictures / "train/.cache").mkdir()
    opened = sources.open_datasets(config_for(pictures))
    assert len(opened.train) == 24
    assert opened.remarks == [
        f"1 files in {pictures / 'train'} do not end as images do and are left out, {pictures / 'train/dog/notes.txt'} first"
    ]


@pytest.mark.parametrize("pixels", [np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 2), np.uint8), np.zeros(5, np.uint8)])
def test_pixels_of_another_kind_than_images_are_refused(pixels):
    with pytest.raises(ImageError, match=r"uint8 of \[H, W, 3\] or \[H, W\] is needed"):
        loader._checked(pixels)


# training on them


def small(tiny, **changes):
    return dataclasses.replace(tiny, epochs=1.0, batch=(dataclasses.replace(tiny.batch[1], global_batch=8),), **changes)


def test_a_run_on_a_folder_with_damaged_images_ends_with_their_list(tiny, pictures, tmp_path):
    (pictures / "train/eel/5.JPEG").write_bytes(b"broken")
    (pictures / "val/eel/1.JPEG").write_bytes(b"broken")
    data = Data(
        source="folder", directory=str(pictures), image_size=16, augmentation="random_resized_crop", on_bad_image="skip"
    )
    config = small(tiny, data=data, schedule=dataclasses.replace(tiny.schedule, warmup_epochs=0.5))
    result = jaxdp.train(config, tmp_path / "run")
    assert sorted(name[-10:] for name in result.bad_images) == ["eel/1.JPEG", "eel/5.JPEG"]
    assert len(json.loads((tmp_path / "run/result.json").read_text())["bad_images"]) == 2
    assert result.eval_examples == 11  # the damaged one is left out: another in its place would count twice


class Own:
    """A source of one's own: grey squares, brighter by class."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return self.examples

    def __getitem__(self, index):
        label = index % 3
        return np.full((20, 24), 80 * label, np.uint8), label


def test_any_object_with_a_length_and_items_can_be_trained_on(tiny, tmp_path):
    data = Data(image_size=16, augmentation="pad_and_crop")
    config = small(tiny, data=data, schedule=dataclasses.replace(tiny.schedule, warmup_epochs=0.5))
    result = jaxdp.train(config, tmp_path / "run", datasets=(Own(24), Own(9)))
    assert result.eval_examples == 9
    assert json.loads((tmp_path / "run/config.json").read_text())["data"]["source"] == "given"


# prepared by tensorflow-datasets


def miniature(directory, name, version, features, splits, configs=()):
    """A small data set under the name, version and features of a real one, prepared as array_record.

    splits: name -> list of (image, other features by name).
    """
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():

        class Miniature(tfds.core.GeneratorBasedBuilder):
            pkg_dir_path = directory
            VERSION = tfds.core.Version(version)
            BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config) for config in configs]  # noqa: RUF012

            def _info(self):
                return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

            def _split_generators(self, manager):
                return {split: self._generate_examples(examples) for split, examples in splits.items()}

            def _generate_examples(self, examples):
                for n, (image, others) in enumerate(examples):
                    yield n, {"image": image} | others

    Miniature.name = name
    Miniature(data_dir=directory, file_format="array_record").download_and_prepare()


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    import tensorflow_datasets as tfds

    directory = tmp_path_factory.mktemp("tfds")
    features = {"image": tfds.features.Image(encoding_format="jpeg"), "label": tfds.features.ClassLabel(num_classes=1000)}
    features["file_name"] = tfds.features.Text()

    def examples(count, seed):
        return [
            (io.BytesIO(encoded(picture(40, 50, seed=seed + n))), {"label": (37 * n) % 1000, "file_name": f"{n}.JPEG"})
            for n in range(count)
        ]

    splits = {"train": examples(20, 0), "validation": examples(7, 50)}
    miniature(directory, "imagenet2012", "5.1.0", features, splits)
    return directory


@pytest.mark.parametrize(
    ("name", "version", "shape", "classes", "held_out"),
    [
        ("cifar10", "3.0.2", (32, 32, 3), 10, "test"),
        ("cifar100", "3.0.2", (32, 32, 3), 100, "test"),
        ("mnist", "3.0.1", (28, 28, 1), 10, "test"),
        ("imagenette", "1.0.0", (None, None, 3), 10, "validation"),
    ],
)
def test_data_sets_are_read_by_their_names(tmp_path, name, version, shape, classes, held_out):
    """The features that tensorflow-datasets gives these names, small PNGs and JPEGs, a usual evaluation split of their own."""
    import tensorflow_datasets as tfds

    large = shape[0] is None
    form = "JPEG" if large else "PNG"
    features = {
        "image": tfds.features.Image(shape=shape, encoding_format=form.lower()),
        "label": tfds.features.ClassLabel(num_classes=classes),
    }
    if name == "cifar100":
        features["coarse_label"] = tfds.features.ClassLabel(num_classes=20)
    if name.startswith("cifar"):
        features["id"] = tfds.features.Text()
    pixels = [picture(*(shape[:2] if not large else (50, 60)), seed=n) for n in range(13)]
    mode = "L" if shape[2] == 1 else "RGB"
    others = {"coarse_label": 3, "id": "x"}

    def examples(numbers):
        return [
            (
                io.BytesIO(encoded(pixels[n], form, mode)),
                {"label": n % classes} | {key: value for key, value in others.items() if key in features},
            )
            for n in numbers
        ]

    configs = ("full-size-v2",) if large else ()
    miniature(tmp_path, name, version, features, {"train": examples(range(9)), held_out: examples(range(9, 13))}, configs)
    config = Config(
        data=Data(source=name, directory=str(tmp_path), image_size=32, augmentation="none"), model=Model(classes=classes)
    )
    opened = sources.open_datasets(config)
    assert (len(opened.train), len(opened.evaluation)) == (9, 4)
    assert opened.train.images.shape == (9, 32, 32, 3)
    assert sorted(opened.train.labels) == list(range(9))
    assert sorted(opened.evaluation.labels) == sorted(n % classes for n in range(9, 13))
    first = opened.train.images[list(opened.train.labels).index(4)]
    if shape == (32, 32, 3):
        np.testing.assert_array_equal(first, pixels[4])
    if shape[2] == 1:
        np.testing.assert_array_equal(first[..., 0], first[..., 2])


def test_a_prepared_data_set_is_read_without_tensorflow(imagenet):
    source = prepared.Prepared("imagenet2012", str(imagenet), "train")
    assert (len(source), source.classes) == (20, 1000)
    seen = sorted(source[n] for n in range(20))
    expected = sorted((encoded(picture(40, 50, seed=n)), 37 * n % 1000) for n in range(20))
    assert seen == expected
    half = prepared.Prepared("imagenet2012", str(imagenet), "train[:50%]")
    assert [half[n] for n in range(10)] == [source[n] for n in range(10)]
    assert source.name(3) == "record 3 of imagenet2012, train"


def masked_crc(data: bytes) -> bytes:
    """TFRecord's checksum, bit by bit: CRC-32C (Castagnoli), turned right by 15 bits, plus 0xA282EAD8."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked_crc(length) + data + masked_crc(data)


@pytest.fixture
def imagenet_tfrecord(imagenet, tmp_path):
    """The same records in two TFRecord files, framed as TensorFlow frames them: length, its checksum, data, its checksum."""
    from array_record.python.array_record_module import ArrayRecordReader

    old, new = imagenet / "imagenet2012/5.1.0", tmp_path / "tfds/imagenet2012/5.1.0"
    new.mkdir(parents=True)
    told = json.loads((old / "dataset_info.json").read_text())
    told["fileFormat"] = "tfrecord"
    told["splits"][0]["shardLengths"] = ["13", "7"]
    (new / "dataset_info.json").write_text(json.dumps(told))
    (new / "features.json").write_text((old / "features.json").read_text())
    for split, cuts in (("train", [0, 13, 20]), ("validation", [0, 7])):
        reader = ArrayRecordReader(str(old / f"imagenet2012-{split}.array_record-00000-of-00001"))
        records = reader.read_all()
        for shard, (first, last) in enumerate(itertools.pairwise(cuts)):
            framed = [framed_record(record) for record in records[first:last]]
            (new / f"imagenet2012-{split}.tfrecord-{shard:05}-of-{len(cuts) - 1:05}").write_bytes(b"".join(framed))
    return tmp_path / "tfds"


@pytest.mark.parametrize("split", ["train", "train[:10]", "train[25%:75%]", "train[-8:]", "validation"])
def test_tfrecord_and_array_record_give_the_same_examples(imagenet, imagenet_tfrecord, split):
    one = prepared.Prepared("imagenet2012", str(imagenet), split)
    other = prepared.Prepared("imagenet2012", str(imagenet_tfrecord), split)
    assert type(other.records).__name__ == "_TFRecords"
    assert len(one) == len(other) > 0
    assert [other[n] for n in range(len(other))] == [one[n] for n in range(len(one))]
    with pytest.raises(IndexError):
        other[len(other)]


def test_a_tfrecord_file_that_is_cut_off_is_named(imagenet_tfrecord):
    file = imagenet_tfrecord / "imagenet2012/5.1.0/imagenet2012-train.tfrecord-00001-of-00002"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"train.tfrecord-00001-of-00002 is damaged: its record at byte \d+ is cut off"):
        prepared.Prepared("imagenet2012", str(imagenet_tfrecord), "train")


def test_a_tfrecord_file_that_ends_early_or_is_missing_is_named(imagenet_tfrecord):
    file = imagenet_tfrecord / "imagenet2012/5.1.0/imagenet2012-train.tfrecord-00001-of-00002"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    file.write_bytes(data[: 12 + length + 4])
    with pytest.raises(ConfigError, match=r"00001-of-00002 is damaged: it has 1 records of 7; prepare it again"):
        prepared.Prepared("imagenet2012", str(imagenet_tfrecord), "train")
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ConfigError, match="the length of its record at byte 0 is wrong"):
        prepared.Prepared("imagenet2012", str(imagenet_tfrecord), "train")
    file.unlink()
    with pytest.raises(ConfigError, match=r"00001-of-00002 is missing; prepare imagenet2012 again"):
        prepared.Prepared("imagenet2012", str(imagenet_tfrecord), "train")


def test_a_damaged_record_is_named_and_can_be_skipped(imagenet_tfrecord):
    file = imagenet_tfrecord / "imagenet2012/5.1.0/imagenet2012-train.tfrecord-00001-of-00002"
    data = bytearray(file.read_bytes())
    data[100] ^= 16
    file.write_bytes(bytes(data))
    config = Config(
        data=Data(source="imagenet2012", directory=str(imagenet_tfrecord), image_size=32, augmentation="random_resized_crop"),
    )
    source = sources.open_datasets(config).train
    with pytest.raises(
        DataError, match=r"record 13 of imagenet2012, train cannot be used: the checksum of its data in .* is wrong"
    ):
        source.batch(np.array([13]), np.array([0]))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, on_bad_image="skip"))
    source = sources.open_datasets(config).train
    source.batch(np.arange(20), np.arange(20))
    assert list(source.bad) == ["record 13 of imagenet2012, train"]


def everything_of(directory):
    source = prepared.Prepared("imagenet2012", str(directory), "train")
    return Loader(source, centred(8), 8, 1000).batch(np.arange(20), np.arange(20))


@pytest.mark.parametrize("damage", ["flipped", "empty", "half", "missing"])
def test_a_damaged_array_record_is_named(imagenet, tmp_path, damage):
    shutil.copytree(imagenet, tmp_path / "tfds")
    file = tmp_path / "tfds/imagenet2012/5.1.0/imagenet2012-train.array_record-00000-of-00001"
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        middle = bytes(255 - byte for byte in data[1000:3000])
        file.write_bytes({"flipped": data[:1000] + middle + data[3000:], "empty": b"", "half": data[: len(data) // 2]}[damage])
    with pytest.raises((ConfigError, DataError), match="imagenet2012") as caught:
        everything_of(tmp_path / "tfds")
    assert "\n" not in str(caught.value)


def test_a_damaged_description_is_one_line(imagenet, tmp_path):
    shutil.copytree(imagenet, tmp_path / "tfds")
    (tmp_path / "tfds/imagenet2012/5.1.0/dataset_info.json").write_text("{")
    with pytest.raises(ConfigError, match="tensorflow-datasets cannot open it"):
        prepared.Prepared("imagenet2012", str(tmp_path / "tfds"), "train")


@pytest.mark.parametrize("split", ["train[:0%]", "train[5:5]", "train[90%:10%]"])
def test_a_slice_without_examples_is_refused(imagenet, imagenet_tfrecord, split):
    with pytest.raises(ConfigError, match="is not allowed; it has no example"):
        prepared.Prepared("imagenet2012", str(imagenet), split)
    with pytest.raises(ConfigError, match="is not allowed; it has no example"):
        prepared.Prepared("imagenet2012", str(imagenet_tfrecord), split)


def test_the_checksum_is_castagnolis():
    crc = struct.unpack("<I", prepared._masked_checksum(b"123456789"))[0]
    assert crc == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF  # the published check value
    assert prepared._masked_checksum(b"abc") == masked_crc(b"abc")


MANY_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
from jaxdp.data import prepared
prepared._allow_open_files(1024)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_imagenets_files_can_be_open_at_once_under_the_usual_limit():
    out = subprocess.run([sys.executable, "-c", MANY_FILES], capture_output=True, text=True, check=True).stdout
    assert int(out) >= 1024 + 100


def test_imagenet_is_trained_on_by_its_name(tiny, imagenet, tmp_path):
    data = Data(source="imagenet2012", directory=str(imagenet), image_size=16, augmentation="random_resized_crop")
    config = small(tiny, data=data, model=dataclasses.replace(tiny.model, classes=1000))
    config = dataclasses.replace(config, schedule=dataclasses.replace(tiny.schedule, warmup_epochs=0.5))
    assert sources.training_examples(config) == 20
    assert jaxdp.train(config, tmp_path).eval_examples == 7


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("imagenet2012", "trian", r"data split 'trian' of imagenet2012 is not allowed; there are train, validation"),
        ("imagenette", "train", r"data.source: 'imagenette' .* it is not prepared in .*`jaxdp data prepare imagenette`"),
        (
            "imagnet",
            "train",
            r"'imagnet' is not allowed; did you mean imagenette\? give digits, synthetic, folder, or a data set",
        ),
    ],
)
def test_a_prepared_data_set_that_is_not_there_is_one_line(imagenet, name, split, message):
    with pytest.raises(ConfigError, match=message) as caught:
        prepared.Prepared(name, str(imagenet), split)
    assert "\n" not in str(caught.value)


def test_preparing_what_is_prepared_leaves_it_alone(imagenet):
    assert prepared.prepare("imagenet2012", str(imagenet)) == str(imagenet / "imagenet2012/5.1.0")


def test_preparing_without_tensorflow_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"cifar10 cannot be prepared; TensorFlow is missing.*pip install -e '.\[prepare\]'"):
        prepared.prepare("cifar10", str(tmp_path))


def test_preparing_imagenet_names_the_archives_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    (tmp_path / "ILSVRC2012_img_val.tar").touch()
    with pytest.raises(ConfigError, match=r"needs .*image-net.org.*; ILSVRC2012_img_train.tar not in .*--manual-directory"):
        prepared.prepare("imagenet2012", str(tmp_path), str(tmp_path))


# on their way to the devices


@pytest.mark.parametrize("mesh_shape", [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_a_batch_in_groups_is_the_batch_in_one(mesh_shape, group):
    random = np.random.default_rng(0)
    source = sources.ArraySource(random.integers(0, 256, (50, 4, 4, 3)), np.arange(50))
    mesh, size = make_mesh(*mesh_shape), 6 * mesh_shape[0] * mesh_shape[1]
    whole = feed.Feeder(source, 3, mesh, 0, 3 * size, size)
    parts = feed.Feeder(source, 3, mesh, 0, 3 * size, size, group)
    for step in range(3):
        one, other, expected = whole.next(), parts.next(), feed.train_batch(source, 3, step * size, size)
        for name in expected:
            np.testing.assert_array_equal(one[name], expected[name])
            np.testing.assert_array_equal(other[name], expected[name])
            assert other[name].sharding == one[name].sharding
    assert whole.next() is None
    assert parts.next() is None


def test_groups_fit_the_bound_and_divide_what_a_device_gets():
    """Three groups of images on the host; 55,296 of 320x320 on 8 devices are 17 GB at once."""
    assert groups.rows_a_group(6912, 8, 3 * 320**2, 2**31) == 288
    assert (groups.AHEAD + 1) * 288 * 8 * 3 * 320**2 <= 2**31
    assert groups.rows_a_group(64, 4, 3072, 2**31) == 64
    assert groups.rows_a_group(64, 4, 3072, 1) == 1


def test_a_run_in_groups_gives_the_same_parameters(tiny, tmp_path):
    one = jaxdp.train(tiny, tmp_path / "whole")
    image = 3 * 16 * 16
    data = dataclasses.replace(tiny.data, ahead_bytes=3 * 4 * image)  # one image a device at a time
    other = jaxdp.train(dataclasses.replace(tiny, data=data), tmp_path / "groups")
    assert one.accuracy == other.accuracy
    arrays = [seal.newest_good(tmp_path / name / "checkpoints").arrays for name in ("whole", "groups")]
    assert arrays[0] == arrays[1]


def test_the_plan_tells_what_input_takes():
    plan = make_plan(load_config("imagenet_sony_exp2"), 1_281_167, 8)
    held = input_bytes(plan)
    assert held["host"] <= 2**31
    assert held["device"] == 2 * 6912 * 3 * 320**2


class Threads:
    threads = 4


@pytest.mark.parametrize(
    ("waited", "source", "told"),
    [
        (0.9, Threads, None),
        (
            5.0,
            Threads,
            "50 % of the time was spent waiting for images; 100 images/s come, 200 are needed: 4 more cores beside the 4",
        ),
        (
            2.0,
            Threads,
            "20 % of the time was spent waiting for images; 100 images/s come, 125 are needed: 1 more core beside the 4",
        ),
        (5.0, object, "100 images/s come, 200 are needed"),
    ],
)
def test_a_run_that_waits_for_its_images_says_what_is_missing(waited, source, told):
    remark = remarks.input_remark(1000, 10.0, waited, source())
    assert remark is None if told is None else told in remark


class Slow(Own):
    def __getitem__(self, index):
        time.sleep(0.05)
        return super().__getitem__(index)


def test_an_input_bound_run_says_so_once_and_counts_the_seconds(tiny, tmp_path):
    told = []

    class Listener(Quiet):
        def say(self, text):
            told.append(text)

    config = dataclasses.replace(tiny, epochs=3.0, data=Data(image_size=80, augmentation="none"))
    result = jaxdp.train(config, tmp_path, screen=Listener(), datasets=(Slow(48), Own(9)))
    assert len([text for text in told if text.startswith("input-bound")]) == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("input_seconds", 0) for line in lines) == pytest.approx(result.input_seconds, rel=1e-6)
    assert result.input_seconds > 0.5


@pytest.mark.parametrize("per_worker", [None, 2])
def test_with_its_images_on_the_devices_a_run_is_bitwise_the_same(tiny, tmp_path, per_worker):
    config = small(tiny, data=Data(image_size=16, augmentation="pad_and_crop"))
    config = dataclasses.replace(config, epochs=2.0, schedule=dataclasses.replace(tiny.schedule, warmup_epochs=0.5))
    config = dataclasses.replace(config, batch=(dataclasses.replace(config.batch[0], per_worker_batch=per_worker),))
    logs = []
    for resident in ("off", "on"):
        data = dataclasses.replace(config.data, resident=resident)
        jaxdp.train(dataclasses.replace(config, data=data), tmp_path / resident, datasets=(Own(26), Own(9)))
        lines = [json.loads(line) for line in (tmp_path / resident / "metrics.jsonl").read_text().splitlines()]
        logs.append([[line.get(name) for name in ("step", "loss", "gradient_norm", "eval_loss")] for line in lines])
    assert logs[0] == logs[1]


def test_only_images_in_memory_can_be_kept_on_the_devices(pictures):
    arrays = sources.ArraySource(np.zeros((2, 4, 4, 3)), np.zeros(2))
    assert sources.keeps_images(Data(), arrays, "gpu")
    assert not sources.keeps_images(Data(), arrays, "cpu")
    assert not sources.keeps_images(Data(resident="off"), arrays, "gpu")
    folder_of = config_for(pictures, resident="on")
    with pytest.raises(ConfigError, match=r"data.resident: 'on' is not allowed with folder; its images are made as they are"):
        sources.keeps_images(folder_of.data, sources.open_datasets(folder_of).train, "gpu")
