"""Test images, their encodings, and small sources of them."""

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps

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


def sampled_jpeg(pixels, factors) -> bytes:
    """A JPEG with any sampling factors, (horizontal, vertical) of Y, Cb and Cr. Pillow encodes each as a gray image."""
    height, width = pixels.shape[:2]
    most = [max(direction) for direction in zip(*factors, strict=True)]
    tables, scans = b"", b""
    for number, (plane, (across, down)) in enumerate(
        zip(Image.fromarray(pixels).convert("YCbCr").split(), factors, strict=True), 1
    ):
        size = (-(-width * across // most[0]), -(-height * down // most[1]))
        gray = encode(np.asarray(plane.resize(size, Image.Resampling.BOX)), mode="L")
        start = 2
        while (marker := gray[start + 1]) != 0xDA:  # the scan
            segment = gray[start : start + 2 + int.from_bytes(gray[start + 2 : start + 4], "big")]
            tables += segment if marker == 0xDB and number == 1 else b""  # quantization
            scans += segment if marker == 0xC4 else b""  # Huffman tables
            start += len(segment)
        scans += gray[start : start + 4] + b"\x01" + bytes([number]) + gray[start + 6 : -2]
    frame = struct.pack(">HBHHB", 17, 8, height, width, 3)
    frame += b"".join(bytes([number, across << 4 | down, 0]) for number, (across, down) in enumerate(factors, 1))
    jfif = b"\xff\xe0" + struct.pack(">H", 16) + b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0"
    return b"\xff\xd8" + jfif + tables + b"\xff\xc0" + frame + scans + b"\xff\xd9"


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


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


FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def published_evaluation(image: Image.Image, *, resize: int, crop: int, interpolation: str = "bilinear") -> Image.Image:
    """torchvision's documented Resize(resize) and CenterCrop(crop) of a Pillow image, with Pillow alone.

    Resize gives the short side and truncates the long one. CenterCrop pads with black, the odd pixel right and below, where
    the image is smaller than the crop, and rounds the first row and column to even.
    """
    short, long = sorted(image.size)
    long = int(resize * long / short)
    image = image.resize((resize, long) if image.width <= image.height else (long, resize), FILTERS[interpolation])
    missing = [max(0, crop - side) for side in image.size]
    image = ImageOps.expand(image, (missing[0] // 2, missing[1] // 2, (missing[0] + 1) // 2, (missing[1] + 1) // 2), fill=0)
    left, top = (round((side - crop) / 2) for side in image.size)
    return image.crop((left, top, left + crop, top + crop))


def mean_over_areas(image: np.ndarray, size: int) -> np.ndarray:
    """float64 [size, size, 3]: each is the mean of its rectangle of the image, where cut pixels count by their share."""

    def shares(pixels: int) -> np.ndarray:
        edges, places = np.arange(size + 1) * pixels / size, np.arange(pixels)
        overlap = np.minimum(edges[1:, None], places + 1) - np.maximum(edges[:-1, None], places)
        return np.maximum(overlap, 0) * size / pixels

    height, width = image.shape[:2]
    rows = np.tensordot(shares(height), image.astype(np.float64), axes=(1, 0))
    return np.moveaxis(np.tensordot(rows, shares(width), axes=(1, 1)), 2, 1)


def random_crops(height: int, width: int, *, min_area: float, count: int = 20_000) -> np.ndarray:
    """(height, width) of crops as torchvision's RandomResizedCrop draws them, in fractions of pixels: float64 [count, 2].

    The first of ten draws of area and aspect ratio that fits; those without one are left out.
    """
    rng = np.random.default_rng(0)
    area = height * width * rng.uniform(min_area, 1, (count, 10))
    ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3), (count, 10)))
    tall, wide = np.sqrt(area / ratio), np.sqrt(area * ratio)
    fits = (tall <= height) & (wide <= width)
    first = fits.argmax(1)[:, None]
    sides = [np.take_along_axis(side, first, 1)[:, 0] for side in (tall, wide)]
    return np.stack(sides, axis=1)[fits.any(1)]


def assert_like_random_crops(sides, height: int, width: int, *, min_area: float) -> None:
    """Area and aspect ratio of crops have the quantiles of `random_crops`. sides: (height, width), [n, 2], n of thousands."""
    expected = random_crops(height, width, min_area=min_area)
    for ours, theirs in zip(_areas_and_ratios(np.asarray(sides)), _areas_and_ratios(expected), strict=True):
        quantiles = [np.quantile(values, [0.02, 0.2, 0.4, 0.6, 0.8, 0.98]) for values in (ours, theirs)]
        np.testing.assert_allclose(*quantiles, rtol=0, atol=0.05 * np.ptp(theirs))


def _areas_and_ratios(sides: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return sides.prod(1), np.log(sides[:, 1] / sides[:, 0])
