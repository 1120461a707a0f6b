"""Test images, their encodings, and small sources of them."""

import io

import numpy as np
from PIL import Image

from jaxdp.config import Config, Data, Model


def smooth_image(height=60, width=80, seed=0) -> np.ndarray:
    """Smooth random pixels, uint8 [height, width, 3], so that JPEG loses little."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def noise(height, width) -> np.ndarray:
    """Independent random pixels, uint8 [height, width, 3]."""
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3)).astype(np.uint8)


def encode(pixels, image_format="JPEG", mode="RGB", **options) -> bytes:
    """The pixels encoded by Pillow."""
    file = io.BytesIO()
    options = ({"quality": 95} if image_format == "JPEG" else {}) | options
    Image.fromarray(pixels).convert(mode).save(file, image_format, **options)
    return file.getvalue()


def folder_config(directory, **data) -> Config:
    """A config for a folder of three classes, with random resized crops unless `data` says otherwise."""
    data = {"augmentation": "random_resized_crop"} | data
    return Config(data=Data(source="folder", directory=str(directory), image_size=32, **data), model=Model(classes=3))


class GraySquares:
    """A source of three classes of gray images, uint8 [20, 24]: the class sets the brightness."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return self.examples

    def __getitem__(self, index):
        label = index % 3
        return np.full((20, 24), 80 * label, np.uint8), label
