"""Images prepared for evaluation, compared with the transforms of torchvision and timm that published accuracies assume."""

import io

import numpy as np
import pytest
from helpers.images import encode, folder_config, mean_over_areas, noise, published_evaluation
from helpers.runs import train_until
from helpers.served import save_random_run
from helpers.step import with_parts
from PIL import Image

import jaxdp
from jaxdp.config import Augment, Config, Data, Model
from jaxdp.data import decode, host_crops
from jaxdp.errors import ConfigError
from jaxdp.validation import validate

SIZES = [(375, 501), (501, 333), (225, 224), (224, 225), (99, 101), (224, 224), (17, 340)]


def prepared(data, **fields):
    """The image of an encoded file as an evaluation with these fields of the config sees it."""
    config = Config(data=Data(source="folder", directory="anywhere", **fields))
    transform, size = host_crops.evaluation_transform(validate(config))
    out = np.full((size, size, 3), 7, np.uint8)
    transform(decode.decode(data), out, 0)
    return out


@pytest.mark.parametrize(
    ("resize", "short", "crop", "interpolation"),
    [
        (0.875, 256, 224, "bilinear"),
        (0.95, 235, 224, "bicubic"),  # as in timm: rounded down
        (232, 232, 224, "bicubic"),
        (40, 40, 64, "bicubic"),
        (63, 63, 64, "bicubic"),
        (65, 65, 64, "bilinear"),
    ],
)
def test_pixels_of_a_ratio_are_those_of_timm_and_of_a_short_side_those_of_torchvision(resize, short, crop, interpolation):
    for shape in [*SIZES, (60, 75), (41, 64), (64, 40), (63, 63)]:
        expected = published_evaluation(Image.fromarray(noise(*shape)), resize=short, crop=crop, interpolation=interpolation)
        fields = {"image_size": 160, "eval_size": crop, "eval_resize": resize, "eval_interpolation": interpolation}
        np.testing.assert_array_equal(prepared(encode(noise(*shape), "PNG"), **fields), expected)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pixels_equal_torchvisions_own(interpolation):
    """With the package itself, which the extra `peers` installs."""
    transforms = pytest.importorskip("torchvision.transforms")
    for resize, crop in ((256, 224), (235, 224), (224, 224), (40, 64), (63, 64)):
        theirs = transforms.Compose(
            [
                transforms.Resize(resize, transforms.InterpolationMode(interpolation)),
                transforms.CenterCrop(crop),
            ]
        )
        for shape in SIZES:
            data = encode(noise(*shape))
            expected = np.asarray(theirs(Image.open(io.BytesIO(data)).convert("RGB"))).astype(int)
            ours = prepared(data, image_size=crop, eval_resize=resize, eval_interpolation=interpolation)
            assert np.abs(ours - expected).max() <= 1, (resize, crop, shape)


@pytest.mark.parametrize(
    ("fields", "share"), [({"eval_resize": 0.875}, 0.875), ({"eval_resize": 232}, 224 / 232), ({"eval_resize": 1}, 1.0)]
)
def test_area_resizes_the_central_square_as_ffcv(fields, share):
    """Row, column and side rounded down, as CenterCropRGBImageDecoder does; the means over areas in float64."""
    for shape in [(375, 501), (501, 333), (261, 300), (450, 449)]:
        image = noise(*shape)
        side = int(share * min(shape))
        top, left = ((length - side) // 2 for length in shape)
        expected = mean_over_areas(image[top : top + side, left : left + side], 224)
        ours = prepared(encode(image, "PNG"), image_size=160, eval_size=224, eval_interpolation="area", **fields)
        assert np.abs(ours - expected).max() <= 0.51, shape


@pytest.mark.parametrize(
    ("fields", "side"),
    [
        ({"image_size": 224, "eval_resize": 232}, 232),
        ({"image_size": 224, "augmentation": "random_resized_crop"}, 256),
        ({"image_size": 224, "stored_size": 320, "eval_interpolation": "bicubic", "augmentation": "paper"}, 256),
    ],
)
def test_short_side_follows_the_given_field_or_the_training(fields, side):
    assert Data(source="folder", directory="anywhere", **fields).evaluation_side == side


@pytest.mark.parametrize("stored", [None, 20])
def test_images_that_the_device_augments_are_center_crops_of_the_stored_size_for_training_and_evaluation(stored):
    image, size = noise(30, 47), stored or 16
    data = Data(source="folder", directory="anywhere", image_size=16, stored_size=stored, augmentation="paper")
    expected = published_evaluation(Image.fromarray(image), resize=size, crop=size)
    for make in (host_crops.training_transform, host_crops.evaluation_transform):
        transform, side = make(Config(data=data))
        out = np.empty((side, side, 3), np.uint8)
        transform(image, out, 5)
        assert np.abs(out.astype(int) - np.asarray(expected)).max() <= 2


def test_random_crops_of_the_host_are_those_of_the_seed_and_the_position():
    image, ranges = noise(30, 47), Augment(min_area=0.5)
    transform, size = host_crops.training_transform(
        Config(seed=4, data=Data(image_size=16, augmentation="random_resized_crop", source="folder"), augment=ranges)
    )
    out, expected = np.empty((2, size, size, 3), np.uint8)
    transform(image, out, 9)
    host_crops.random_resized_crop(image, expected, ranges=ranges, random=host_crops.random_numbers(4, 9))
    np.testing.assert_array_equal(out, expected)


def test_the_central_square_of_a_tiny_image_has_a_pixel():
    image, out = noise(2, 3), np.empty((4, 4, 3), np.uint8)
    host_crops.crop_and_resize(image, out, share=0.3)
    np.testing.assert_array_equal(out, np.broadcast_to(image[0, 1], out.shape))


def test_image_that_the_resize_would_make_huge_is_unusable():
    with pytest.raises(decode.ImageError, match=r"20000x2 pixels, more than 67,108,864 after the resize for evaluation"):
        host_crops.resize_and_crop(
            np.zeros((2, 20_000, 3), np.uint8), np.empty((224, 224, 3), np.uint8), short_side=256, interpolation="bilinear"
        )


@pytest.fixture
def fixres(pictures, tiny_resnet) -> Config:
    """A run that trains at 16x16 and evaluates at 24x24."""
    config = with_parts(tiny_resnet, data=folder_config(pictures).data, model={"classes": 3})
    return with_parts(config, data={"image_size": 16, "eval_size": 24, "eval_resize": 0.875, "eval_interpolation": "bicubic"})


@pytest.mark.slow
def test_run_evaluates_at_another_size_than_it_trains_at(fixres, pictures, tmp_path):
    """Evaluations of the run and its checkpoint and a prediction see the same pixels; a resume continues the run."""
    result = jaxdp.train(fixres, tmp_path / "whole")
    again = jaxdp.evaluate(None, tmp_path / "whole")
    assert (again["eval_accuracy"], again["eval_examples"]) == (result.accuracy, 12)
    assert again["eval_loss"] == pytest.approx(result.loss, rel=1e-5)
    assert (
        abs(jaxdp.evaluate(with_parts(fixres, data={"eval_size": None}), tmp_path / "whole")["eval_loss"] / result.loss - 1)
        > 3e-5
    )
    files = sorted((pictures / "val").glob("*/*"))
    predicted = jaxdp.predict(tmp_path / "whole", files, top=1).classes[:, 0]
    assert np.mean(predicted == [["cat", "dog", "eel"].index(file.parent.name) for file in files]) == result.accuracy

    train_until(fixres, tmp_path / "parts", step=3)
    with pytest.raises(ConfigError, match=r"data.eval_size: 24 -> 32"):
        jaxdp.train(with_parts(fixres, data={"eval_size": 32}), tmp_path / "parts")
    assert jaxdp.train(fixres, tmp_path / "parts").loss == pytest.approx(result.loss, rel=1e-6)


def test_network_of_one_size_refuses_another_for_evaluation(fixres, tmp_path):
    """At the start, not at the first evaluation; and in an evaluation of a run's checkpoint."""
    config = with_parts(fixres, model=Model(name="normalized_linear", classes=3))
    message = r"^data.eval_size=24: normalized_linear cannot take images of another size than data.image_size \(16\): "
    with pytest.raises(ConfigError, match=message):
        jaxdp.train(config, tmp_path / "run")
    save_random_run(with_parts(config, data={"eval_size": 16}), tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        jaxdp.evaluate(config, tmp_path / "run")
