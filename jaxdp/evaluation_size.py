"""Sizes to which images are resized for evaluation."""

import math

from jaxdp.config import Config, crops_while_loading


def evaluation_side(config: Config) -> int:
    """Short side that evaluated images are resized to, in pixels. A crop ratio is converted as in timm."""
    data = config.data
    if data.eval_resize is not None:
        is_ratio = data.eval_resize <= 1
        return math.floor(data.evaluated_size / data.eval_resize) if is_ratio else int(data.eval_resize)
    trained_on_crops = crops_while_loading(config) or data.stored_size not in (None, data.image_size)
    return round(data.evaluated_size * 8 / 7) if trained_on_crops else data.evaluated_size


def evaluation_share(config: Config) -> float:
    """Side of the center crop of evaluated images as a share of the short side, before the resize."""
    resize = config.data.eval_resize
    return resize if resize is not None and resize <= 1 else config.data.evaluated_size / evaluation_side(config)
