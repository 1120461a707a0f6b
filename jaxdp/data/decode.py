"""From encoded bytes to pixels of one size: decoding, the random crop of training, the centre crop of evaluation.

Decoders are tried by their speed: simplejpeg (JPEG alone), OpenCV, Pillow. None turns an image as EXIF says; nor do
the usual ImageNet pipelines.
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

ATTEMPTS = 10  # of the random crop, as torchvision has it
DRAWS = 3 + 2 * ATTEMPTS  # random numbers of an image: mirrored, down, right, then area and ratio of every attempt
BLOCK = 256  # images whose random numbers are drawn together
SMALLEST = 2  # pixels a side: one pixel is no picture


class ImageError(ValueError):
    """An image that cannot be used: one line that says why."""


def decode(data: bytes, scratch: "Scratch | None" = None) -> np.ndarray:
    """RGB pixels, uint8 [H, W, 3], of an encoded image: JPEG (grey, CMYK, progressive), PNG, whatever Pillow reads.

    scratch: memory to decode into, which the next image decoded with it overwrites; None: fresh memory. Raises ImageError for
    what no decoder reads whole, and for images of one pixel in width or height.
    """
    pixels = _simplejpeg(data, scratch)
    if pixels is None:
        pixels = _opencv(data)
    if pixels is None:
        pixels = _pillow(data)
    if min(pixels.shape[:2]) < SMALLEST:
        raise ImageError(f"it has {pixels.shape[1]}x{pixels.shape[0]} pixels, and {SMALLEST}x{SMALLEST} are the least")
    return pixels


class Scratch(threading.local):
    """Memory that each thread uses again and again: fresh pages for every image would take a fifth of the time."""

    def __init__(self):
        self.memory = np.empty(0, np.uint8)

    def of(self, height: int, width: int):
        size = height * width * 3
        if self.memory.size < size:
            self.memory = np.empty(size, np.uint8)
        return self.memory[:size].reshape(height, width, 3)


def _simplejpeg(data: bytes, scratch):
    if data[:2] != b"\xff\xd8":
        return None
    try:
        if scratch is None:
            return simplejpeg.decode_jpeg(data, colorspace="RGB")
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        return simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=scratch.of(height, width))
    except ValueError:  # CMYK, a truncated file: the next decoder says which
        return None


def _opencv(data: bytes):
    """None for what OpenCV does not read, and for JPEGs that simplejpeg refused: OpenCV would fill in what is missing."""
    if data[:2] == b"\xff\xd8" or len(data) == 0:
        return None
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        return None
    return None if pixels is None else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def _pillow(data: bytes):
    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        raise ImageError("it is no image of a known kind") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError((str(error).splitlines() or [type(error).__name__])[0]) from None


@lru_cache(maxsize=64)
def _drawn(seed: int, block: int) -> list[list[float]]:
    return np.random.Generator(np.random.Philox(key=[seed, block])).random((BLOCK, DRAWS)).tolist()


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
    height, width = image.shape[:2]
    scale = short_side / min(height, width)
    size = (short_side, int(height * scale)) if width <= height else (int(width * scale), short_side)
    if (width, height) != size:
        image = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
    top, left = (round((have - want) / 2) for have, want in zip(image.shape[:2], out.shape[:2], strict=True))
    out[:] = image[top : top + out.shape[0], left : left + out.shape[1]]
