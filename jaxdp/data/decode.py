"""From encoded bytes to pixels of one size: decoding, the random crop of training, the centre crop of evaluation.

Decoders are taken by their speed: simplejpeg for JPEG, OpenCV for PNG, Pillow for the rest. None turns an image as EXIF says;
nor do the usual ImageNet pipelines.
"""

import io
import math
import threading
from functools import lru_cache

import cv2
import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from jaxdp.config import Augment
from jaxdp.errors import first_line

ATTEMPTS = 10  # of the random crop, as torchvision has it
DRAWS = 3 + 2 * ATTEMPTS  # random numbers of an image: mirrored, down, right, then area and ratio of every attempt
BLOCK = 256  # images whose random numbers are drawn together
SMALLEST = 2  # pixels a side: one pixel is no picture
LARGEST = 2**26  # pixels of an image: a small file may claim to be huge
OPENCV_READS = (b"\x89PNG", b"BM", b"RIFF")
PILLOW_READS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
AUGMENTATION = 2**63  # sets these random numbers apart from those that shuffle the epochs


class ImageError(ValueError):
    """An image that cannot be used: one line that says why."""


def decode(data: bytes, scratch: "Scratch | None" = None) -> np.ndarray:
    """RGB pixels, uint8 [H, W, 3], of an encoded image: JPEG (grey, CMYK, progressive), PNG, whatever Pillow reads.

    scratch: memory to decode into, which the next image decoded with it overwrites; None: fresh memory. Raises ImageError for
    what is not whole, and for images of one pixel in width or height, or of more than LARGEST pixels.
    """
    if data[:2] == b"\xff\xd8":
        pixels = _jpeg(data, scratch)
    else:
        pixels = _opencv(data) if data.startswith(OPENCV_READS) else None
    if pixels is None:
        pixels = _pillow(data)
    _check_size(*pixels.shape[:2])
    return pixels


def _check_size(height: int, width: int) -> None:
    if min(height, width) < SMALLEST:
        raise ImageError(f"it has {width}x{height} pixels, and {SMALLEST}x{SMALLEST} are the least")
    if height * width > LARGEST:
        raise ImageError(f"it has {width}x{height} pixels, and {LARGEST:,} in all are the most")


class Scratch(threading.local):
    """Memory that each thread uses again and again: fresh pages for every image would take a fifth of the time."""

    MOST = 2**24  # bytes that are kept for the next image

    def __init__(self):
        self.memory = np.empty(0, np.uint8)

    def of(self, height: int, width: int):
        size = height * width * 3
        if size > self.MOST:
            return np.empty((height, width, 3), np.uint8)
        if self.memory.size < size:
            self.memory = np.empty(size, np.uint8)
        return self.memory[:size].reshape(height, width, 3)


def _jpeg(data: bytes, scratch):
    """None for CMYK. Anything that the decoder finds odd in the data is damage: others would paint over it without a word."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours in ("CMYK", "YCCK"):
            return None
        _check_size(height, width)
        return simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=scratch and scratch.of(height, width))
    except ImageError:
        raise
    except ValueError as error:
        raise ImageError(first_line(error)) from None


def _opencv(data: bytes):
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        return None
    return None if pixels is None else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def _pillow(data: bytes):
    try:
        with Image.open(io.BytesIO(data), formats=PILLOW_READS) as image:
            _check_size(image.height, image.width)
            return rgb(image)
    except UnidentifiedImageError:
        raise ImageError("it is no image of a known kind") from None
    except ImageError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError(first_line(error)) from None


def rgb(image: Image.Image) -> np.ndarray:
    """Pixels, uint8 [H, W, 3], of an image of Pillow's; of 16 bits the upper eight, as OpenCV and Pillow have them of colours.

    Raises ImageError for pixels whose white is not known.
    """
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    if image.mode in ("I", "F") and not sixteen:
        kind = {"I": "whole numbers of 32 bits", "F": "floating-point numbers"}[image.mode]
        raise ImageError(f"its pixels are {kind}, whose white is not known; convert it to 8 or 16 bits")
    if sixteen:
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
    return np.asarray(image.convert("RGB"))


@lru_cache(maxsize=64)
def _drawn(seed: int, block: int) -> list[list[float]]:
    key = np.array([seed, AUGMENTATION + block], np.uint64)  # a list of such numbers would be rounded to floats
    return np.random.Generator(np.random.Philox(key=key)).random((BLOCK, DRAWS)).tolist()


def random_for(seed: int, position: int) -> list[float]:
    """The random numbers in [0, 1) of the image at a position of the run, the same whoever loads it. float [DRAWS]."""
    return _drawn(seed, position // BLOCK)[position % BLOCK]


def random_crop_box(height: int, width: int, min_area: float, random) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a crop of `min_area` to all of an image with sides in a ratio of 3/4 to 4/3.

    Of ten draws the first that fits; else the largest centre crop of an allowed ratio (torchvision's RandomResizedCrop).
    random: as from `random_for`.
    """
    down, right = random[1:3]
    for area, ratio in zip(random[3::2], random[4::2], strict=True):
        area = height * width * (min_area + (1 - min_area) * area)
        ratio = (3 / 4) * (16 / 9) ** ratio
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def random_resized_crop(image, out, ranges: Augment, random) -> None:
    """Fill `out` (uint8 [S, S, 3]) with a random crop of `image` resized bilinearly, mirrored half of the time.

    random: as from `random_for`.
    """
    top, left, height, width = random_crop_box(*image.shape[:2], ranges.min_area, random)
    crop = image[top : top + height, left : left + width]
    cv2.resize(crop, (out.shape[1], out.shape[0]), dst=out, interpolation=cv2.INTER_LINEAR)
    if ranges.flip and random[0] < 0.5:
        cv2.flip(out, 1, dst=out)


def centre_crop(image, out, short_side: int) -> None:
    """Fill `out` (uint8 [S, S, 3]) with the centre of `image` after its short side has become `short_side` pixels.

    By Pillow's bilinear filter, which widens with the reduction: the resize that published ImageNet accuracies rest on.
    """
    (height, width), (rows, columns) = image.shape[:2], out.shape[:2]
    short = min(height, width)
    tall, wide = short_side * height // short, short_side * width // short
    top, left = round((tall - rows) / 2), round((wide - columns) / 2)
    if (height, width) == (tall, wide):
        out[:] = image[top : top + rows, left : left + columns]
        return
    down, across = height / tall, width / wide
    box = (left * across, top * down, (left + columns) * across, (top + rows) * down)  # only what is needed is resized
    out[:] = np.asarray(Image.fromarray(image).resize((columns, rows), Image.Resampling.BILINEAR, box=box))
