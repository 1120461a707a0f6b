"""Decodes images.

simplejpeg decodes JPEG and OpenCV PNG; Pillow decodes other formats, and what those two do not know. EXIF orientation is
ignored, as in the usual ImageNet pipelines.
"""

import errno
import io
import re
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from jaxdp.errors import StorageError, first_line
from jaxdp.files import NotRegularError, read_regular

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
RETRY_DELAYS = (0.1, 0.5, 2.0)  # seconds before a file is read again
# What is wrong with a path; every other error of a file system may pass, and says nothing about the image.
LASTING = {getattr(errno, name) for name in ["ENOENT", "ENOTDIR", "EACCES", "EPERM", "ELOOP", "ENAMETOOLONG", "EFBIG"]}

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
