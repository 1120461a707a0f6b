"""How the host crops and resizes images, for training and for evaluation."""

from functools import partial

import numpy as np

from jaxdp.config import Config
from jaxdp.data.batch_sources import Transform
from jaxdp.data.host_crops import center_crop, crop_and_resize, random_numbers, random_resized_crop, resize_and_crop


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
