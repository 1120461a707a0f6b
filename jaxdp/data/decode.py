"""Decodes images and crops them to one size: random crops for training, center crops for evaluation.

simplejpeg decodes JPEG and OpenCV PNG; Pillow decodes other formats, and what those two do not know. EXIF orientation is
ignored, as in the usual ImageNet pipelines.
"""

import errno
import io
import math
import re
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from jaxdp.config import Augment, Interpolation
from jaxdp.errors import StorageError, first_line
from jaxdp.files import NotRegularError, read_regular

CROP_ATTEMPTS = 10  # as in torchvision's RandomResizedCrop
DRAWS = 3 + 2 * CROP_ATTEMPTS  # random numbers of an image: flip, row, column, then area and aspect ratio of every attempt
BLOCK = 256  # images whose random numbers are drawn together
MIN_SIDE = 2
MAX_PIXELS = 2**26  # a small file may claim to be huge
JPEG = b"\xff\xd8"
JPEG_DAMAGE = ("Corrupt JPEG data", "Premature end", "Inconsistent progression")  # libjpeg's warnings about the pixels
HARMLESS = {  # libjpeg's other warnings: bytes that cause them, and bytes that mean the same to the decoder without one
    "Warning: unknown JFIF revision": (rb"(\xff\xe0..JFIF\0).", b"\\1\1"),
    "Unknown Adobe color transform": (rb"(\xff\xee..Adobe.{6}).", b"\\1\1"),
    "Invalid SOS parameters": (rb"(\xff\xda\0(?:\x08\x01..|\x0c\x03.{6}))...", b"\\1\0\x3f\0"),
}
PNG_SIGNATURE, ANCILLARY = b"\x89PNG\r\n\x1a\n", 0x20  # the bit in the first letter of chunks that pixels do not need
PNG_HEADER = b"\0\0\0\rIHDR"  # the first chunk's length and kind
PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by color type
ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]  # left, top, steps
PILLOW_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
OPENCV_FILTERS = {"unfiltered": cv2.INTER_LINEAR, "area": cv2.INTER_AREA}
RETRY_DELAYS = (0.1, 0.5, 2.0)  # seconds before a file is read again
# What is wrong with a path; every other error of a file system may pass, and says nothing about the image.
LASTING = {getattr(errno, name) for name in ["ENOENT", "ENOTDIR", "EACCES", "EPERM", "ELOOP", "ENAMETOOLONG", "EFBIG"]}
AUGMENTATION_STREAM = 2**63  # separates these Philox keys from those that shuffle the epochs

# Pillow's warnings would be printed among the output of a run: of a size, which _check_size limits, and of odd metadata.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


class ImageError(ValueError):
    """An image that cannot be used; the message is the reason, on one line. hint: how to fix it."""

    def __init__(self, reason: object, hint: str = "fix or remove it, or give --data.on-bad-image skip") -> None:
        super().__init__(reason)
        self.hint = hint


def read_image(path: str | Path) -> bytes:
    """The bytes of an encoded image in a file, which is read again after errors that may pass.

    Raises ImageError for a path without a readable file, and StorageError if the errors do not pass.
    """
    try:
        return retried(partial(read_regular, path), str(path))
    except StorageError:
        raise
    except OSError as error:
        raise ImageError(error.strerror or first_line(error)) from None


def retried(read: Callable[[], Any], name: str) -> Any:
    """What a function reads, which is called again after errors of the file system that may pass.

    Raises OSError for what is wrong with a path, and StorageError, with `name`, if other errors do not pass.
    """
    for delay in (*RETRY_DELAYS, None):
        try:
            return read()
        except StorageError:  # has been tried again
            raise
        except OSError as error:
            if isinstance(error, NotRegularError) or error.errno in LASTING:
                raise
            if delay is None:
                raise StorageError(error.strerror or first_line(error), name) from error
        time.sleep(delay)
    raise AssertionError("the last attempt returns or raises")


class Scratch(threading.local):
    """A reusable buffer in each thread: allocating fresh pages for every image would take a fifth of the time."""

    MAX_BYTES = 2**24  # larger images get memory of their own

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)

    def array(self, height: int, width: int) -> np.ndarray:
        """uint8 [height, width, 3] with undefined content, valid until the next call in this thread."""
        size = height * width * 3
        if size > self.MAX_BYTES:
            return np.empty((height, width, 3), np.uint8)
        if self.memory.size < size:
            self.memory = np.empty(size, np.uint8)
        return self.memory[:size].reshape(height, width, 3)


def decode(data: bytes, scratch: Scratch | None = None) -> np.ndarray:
    """RGB pixels, uint8 [H, W, 3], of an encoded image: JPEG (gray, CMYK and progressive too), or another of PILLOW_FORMATS.

    scratch: buffer to decode into, which the next call with it overwrites; None: fresh memory. Raises ImageError for truncated
    or damaged data, and, from the header, for images with a side below MIN_SIDE or more than MAX_PIXELS pixels.
    """
    pixels = None
    if data.startswith(JPEG):
        pixels = _decode_jpeg(data, scratch)
    elif data.startswith(PNG_SIGNATURE):
        header, chunks = _pixel_chunks(data)
        data = b"".join([PNG_SIGNATURE, *chunks])
        kinds = b"".join(chunk[4:8] for chunk in chunks)
        regular = re.fullmatch(rb"IHDR(PLTE)?(IDAT)+IEND", kinds)  # what every decoder knows
        pixels = _decode_opencv(data) if regular else None
        if pixels is None or header.interlaced or (pixels[-1] == pixels[-1, 0]).all():  # as where rows are missing
            _check_rows(header, chunks)
    return _decode_pillow(data) if pixels is None else pixels


def _check_size(height: int, width: int) -> None:
    if min(height, width) < MIN_SIDE:
        raise ImageError(f"{width}x{height} pixels, fewer than {MIN_SIDE}x{MIN_SIDE}")
    if height * width > MAX_PIXELS:
        raise ImageError(f"{width}x{height} pixels, more than {MAX_PIXELS:,} in total")


def _decode_jpeg(data: bytes, scratch: Scratch | None) -> np.ndarray | None:
    """None for CMYK, and for sampling factors and other properties that simplejpeg does not know.

    Decoder warnings about the pixels are errors, because the decoder fills damaged regions with invented ones. It stops at the
    first warning, so files with a harmless one are decoded without its cause.
    """
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        if colors in ("CMYK", "YCCK"):
            return None
        _check_size(height, width)
        return simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=scratch and scratch.array(height, width))
    except ImageError:
        raise
    except KeyError:  # simplejpeg has no name for the sampling factors
        return None
    except ValueError as error:
        if str(error).startswith(JPEG_DAMAGE):
            raise ImageError(f"damaged or truncated JPEG: {first_line(error)}") from None
        for warning, (cause, other) in HARMLESS.items():
            if str(error).startswith(warning) and (changed := re.sub(cause, other, data, flags=re.DOTALL)) != data:
                return _decode_jpeg(changed, scratch)
        return None


class PngHeader(NamedTuple):
    """What the first chunk of a PNG says."""

    width: int
    height: int
    depth: int
    color: int
    compression: int
    filter: int
    interlaced: int


def _pixel_chunks(png: bytes) -> tuple[PngHeader, list[bytes]]:
    """The header of a PNG, and its chunks without metadata.

    libpng would print lines about damaged chunks and odd metadata; Pillow would refuse the image for a long text, and warn of a
    palette's transparency. Raises ImageError for truncated files, wrong checksums and, as `decode`, by the size in the header.
    """
    start, kind, chunks = len(PNG_SIGNATURE), b"", []
    if png[start : start + 8] != PNG_HEADER or len(png) < start + 21:
        raise ImageError("damaged or truncated PNG: it has no header")
    header = PngHeader(*struct.unpack(">IIBBBBB", png[start + 8 : start + 21]))
    _check_size(header.height, header.width)
    while kind != b"IEND":
        end = start + 12 + int.from_bytes(png[start : start + 4], "big")
        if end > len(png):
            raise ImageError("damaged or truncated PNG: it has no end")
        kind = png[start + 4 : start + 8]
        if not (kind[0] & ANCILLARY or (kind == b"PLTE" and header.color != 3)):  # 3: colors are indices; else a suggestion
            if zlib.crc32(memoryview(png)[start + 4 : end - 4]) != int.from_bytes(png[end - 4 : end], "big"):
                raise ImageError("damaged or truncated PNG: wrong checksum of a chunk")
            chunks.append(png[start:end])
        start = end
    return header, chunks


def _check_rows(header: PngHeader, chunks: Sequence[bytes]) -> None:
    """Raise ImageError if the pixel data of a PNG end before the last row: decoders leave the rest black."""
    bits = header.depth * PNG_CHANNELS.get(header.color, 0)
    sizes = [
        (-((left - header.width) // across), -((top - header.height) // down))  # rounded up
        for left, top, across, down in (ADAM7 if header.interlaced else [(0, 0, 1, 1)])
    ]
    expected = sum(rows * (1 + -(-columns * bits // 8)) for columns, rows in sizes if columns)  # a filter byte begins a row
    stream = zlib.decompressobj()
    try:
        found = sum(len(stream.decompress(memoryview(chunk)[8:-4])) for chunk in chunks if chunk[4:8] == b"IDAT")
    except zlib.error as error:
        raise ImageError(f"damaged or truncated PNG: {first_line(error)}") from None
    if found < expected:
        raise ImageError(f"damaged or truncated PNG: {found} of {expected} bytes of pixels")


def _decode_opencv(data: bytes) -> np.ndarray | None:
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:  # a side above its limits
        return None
    return None if pixels is None else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def _decode_pillow(data: bytes) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
            return rgb(image)
    except (ImageError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # Pillow's limits are larger
        raise ImageError(f"more than {MAX_PIXELS:,} pixels") from None
    except Exception as error:  # OSError, SyntaxError, TypeError, ..., by format and damage
        reason = "not an image of a known format" if isinstance(error, UnidentifiedImageError) else first_line(error)
        raise ImageError(f"damaged or truncated JPEG: {reason}" if data.startswith(JPEG) else reason) from None


def rgb(image: Image.Image) -> np.ndarray:
    """Pixels, uint8 [H, W, 3], of a Pillow image; of 16-bit pixels the upper eight bits. Transparency is dropped.

    Raises ImageError for sizes as `decode`, and for 32-bit and floating-point pixels, whose value for white is undefined.
    """
    _check_size(image.height, image.width)
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    if image.mode in ("I", "F") and not sixteen:
        kind = {"I": "32-bit integer", "F": "floating-point"}[image.mode]
        raise ImageError(f"{kind} pixels, whose value for white is undefined; convert the image to 8 or 16 bits")
    if sixteen:
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


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
