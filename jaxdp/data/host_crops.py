"""How the host crops and resizes images to one size: at random for training, in the center for evaluation."""

import math
from functools import lru_cache, partial

import cv2
import numpy as np
from PIL import Image

from jaxdp.config import Augment, Config, Interpolation
from jaxdp.data.batch_sources import Transform
from jaxdp.data.decode import MAX_PIXELS, ImageError

CROP_ATTEMPTS = 10  # as in torchvision's RandomResizedCrop
DRAWS = 3 + 2 * CROP_ATTEMPTS  # random numbers of an image: flip, row, column, then area and aspect ratio of every attempt
BLOCK = 256  # images whose random numbers are drawn together
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
OPENCV_FILTERS = {"unfiltered": cv2.INTER_LINEAR, "area": cv2.INTER_AREA}
AUGMENTATION_STREAM = 2**63  # separates these Philox keys from those that shuffle the epochs


@lru_cache(maxsize=64)
def _random_block(seed: int, block: int) -> list[list[float]]:
    key = np.array([seed, AUGMENTATION_STREAM + block], np.uint64)  # a list of ints this large would become floats
    return np.random.Generator(np.random.Philox(key=key)).random((BLOCK, DRAWS)).tolist()


def random_numbers(seed: int, position: int) -> list[float]:
    """The DRAWS random numbers in [0, 1) of the image at a position of the run; they depend on nothing else."""
    return _random_block(seed, position // BLOCK)[position % BLOCK]


def random_crop_box(height: int, width: int, *, min_area: float, random: list[float]) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a crop with a share of `min_area` to 1 of the image and an aspect ratio of 3/4 to 4/3.

    The first of ten draws that fits; else the largest center crop with a permitted ratio (torchvision's RandomResizedCrop).
    random: from `random_numbers`.
    """
    row, column = random[1:3]
    for area, ratio in zip(random[3::2], random[4::2], strict=True):
        area = height * width * (min_area + (1 - min_area) * area)
        ratio = (3 / 4) * (16 / 9) ** ratio
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return int(row * (height - h + 1)), int(column * (width - w + 1)), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def random_resized_crop(image: np.ndarray, out: np.ndarray, *, ranges: Augment, random: list[float]) -> None:
    """Fill `out` (uint8 [S, S, 3]) with a random crop of `image`, resized and flipped with probability 1/2.

    `ranges.crop_interpolation` is the resize: OpenCV's bilinear one, which does not filter, its mean over areas, or a filter of
    Pillow's. `random` draws one by the second bit of the number whose first bit flips. random: from
    `random_numbers`.
    """
    top, left, height, width = random_crop_box(*image.shape[:2], min_area=ranges.min_area, random=random)
    crop = image[top : top + height, left : left + width]
    interpolation = ranges.crop_interpolation
    if interpolation == "random":
        interpolation = "bilinear" if 2 * random[0] % 1 < 0.5 else "bicubic"
    if interpolation in OPENCV_FILTERS:
        cv2.resize(crop, out.shape[1::-1], dst=out, interpolation=OPENCV_FILTERS[interpolation])
    else:
        out[:] = np.asarray(Image.fromarray(crop).resize(out.shape[1::-1], FILTERS[interpolation]))
    if ranges.flip and random[0] < 0.5:
        cv2.flip(out, 1, dst=out)


def _first(size: int, window: int) -> int:
    """The first pixel of a centered window, negative if the window is larger, rounded as in torchvision's CenterCrop."""
    return round((size - window) / 2) if size >= window else -((window - size) // 2)


def resize_and_crop(image: np.ndarray, out: np.ndarray, *, short_side: int, interpolation: Interpolation) -> None:
    """Fill `out` (uint8 [S, S, 3]) as torchvision's Resize(short_side) and CenterCrop(S) do, to the bit.

    A window larger than the resized image is filled with black. Resizes all of the image: for the box of a crop, Pillow may
    choose another order of rows and columns, which moves single pixels by up to 24 levels with the bicubic filter. Raises
    ImageError if the resized image would have more than MAX_PIXELS pixels.
    """
    (height, width), (rows, columns) = image.shape[:2], out.shape[:2]
    short = min(height, width)
    resized_height, resized_width = short_side * height // short, short_side * width // short
    if resized_height * resized_width > MAX_PIXELS:
        raise ImageError(f"{width}x{height} pixels, more than {MAX_PIXELS:,} after the resize for evaluation")
    top, left = _first(resized_height, rows), _first(resized_width, columns)
    resized = Image.fromarray(image).resize((resized_width, resized_height), FILTERS[interpolation])
    out[:] = np.asarray(resized.crop((left, top, left + columns, top + rows)))


def crop_and_resize(image: np.ndarray, out: np.ndarray, *, share: float) -> None:
    """Fill `out` (uint8 [S, S, 3]) with the central square of a share of the short side, resized to the mean over areas.

    Row, column and side are rounded down, as in FFCV's CenterCropRGBImageDecoder.
    """
    height, width = image.shape[:2]
    side = max(int(share * min(height, width)), 1)
    top, left = (height - side) // 2, (width - side) // 2
    crop = image[top : top + side, left : left + side]
    cv2.resize(crop, out.shape[1::-1], dst=out, interpolation=cv2.INTER_AREA)


def center_crop(image: np.ndarray, out: np.ndarray, short_side: int) -> None:
    """Fill `out` (uint8 [S, S, 3]) with the center of `image` after resizing its short side to `short_side` pixels.

    Uses Pillow's bilinear filter, whose support grows with the reduction: published ImageNet accuracies assume it.
    """
    (height, width), (rows, columns) = image.shape[:2], out.shape[:2]
    short = min(height, width)
    resized_height, resized_width = short_side * height // short, short_side * width // short
    top, left = round((resized_height - rows) / 2), round((resized_width - columns) / 2)
    if (height, width) == (resized_height, resized_width):
        out[:] = image[top : top + rows, left : left + columns]
        return
    down, across = height / resized_height, width / resized_width
    box = (left * across, top * down, (left + columns) * across, (top + rows) * down)  # resize the crop only
    out[:] = np.asarray(Image.fromarray(image).resize((columns, rows), Image.Resampling.BILINEAR, box=box))


def training_transform(config: Config) -> tuple[Transform, int]:
    """(transform, image size) of training images: a random crop, or all of the image where the device augments it."""
    if config.data.crops_while_loading:
        ranges, seed = config.augment, config.seed

        def crop(pixels: np.ndarray, out: np.ndarray, position: int) -> None:
            random_resized_crop(pixels, out, ranges=ranges, random=random_numbers(seed, position))

        return crop, config.data.image_size
    size = config.data.stored_size or config.data.image_size
    return lambda pixels, out, position: center_crop(pixels, out, size), size


def evaluation_transform(config: Config) -> tuple[Transform, int]:
    """(transform, image size) of evaluation images.

    As the fields `data.eval_...` say, if one is given. Else, after training on random crops, ImageNet's standard: short side
    256/224 of the image size, then the center. Otherwise all of the image in the stored size.
    """
    short, size = evaluation_sides(config)
    if config.data.eval_interpolation == "area":
        share = config.data.evaluation_share
        return lambda pixels, out, position: crop_and_resize(pixels, out, share=share), size
    if config.data.sets_evaluation:
        prepare = partial(resize_and_crop, short_side=short, interpolation=config.data.eval_filter)
        return lambda pixels, out, position: prepare(pixels, out), size
    return lambda pixels, out, position: center_crop(pixels, out, short), size


def evaluation_sides(config: Config) -> tuple[int, int]:
    """(short side, side of the center crop) in pixels, with which the host resizes and then crops evaluation images."""
    data = config.data
    if data.sets_evaluation or data.crops_while_loading:
        return data.evaluation_side, data.evaluated_size
    return (data.stored_size or data.image_size,) * 2
