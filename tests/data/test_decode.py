"""Decoding of encoded images, compared with Pillow and OpenCV."""

import errno
import io
import os
import runpy
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
from helpers.images import (
    encode,
    noise,
    png_chunk,
    sampled_jpeg,
    smooth_image,
)
from PIL import Image

from jaxdp.data import decode
from jaxdp.data.decode import ImageError
from jaxdp.errors import StorageError


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_decode_jpeg_matches_pillow(options):
    data = encode(smooth_image(), **options)
    ours, pillow = decode.decode(data).astype(int), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(ours - pillow).max() <= 2


def test_decode_cmyk_and_palette_as_pillow_and_png_exactly():
    whole = smooth_image()
    cmyk, palette = encode(whole, mode="CMYK"), encode(whole, "GIF", mode="P")
    expected = np.asarray(Image.open(io.BytesIO(cmyk)).convert("RGB")).astype(int)
    assert np.abs(decode.decode(cmyk) - expected).max() <= 2
    np.testing.assert_array_equal(decode.decode(palette), np.asarray(Image.open(io.BytesIO(palette)).convert("RGB")))
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):  # ImageNet has one PNG, named .JPEG
        image = Image.fromarray(noise(19, 31)).convert(mode)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        np.testing.assert_array_equal(decode.decode(buffer.getvalue()), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize(("suffix", "channels"), [("png", ()), ("tiff", ()), ("pgm", ()), ("png", (3,)), ("tiff", (3,))])
def test_decode_16_bits_takes_the_upper_eight(suffix, channels):
    deep = np.random.default_rng(0).integers(0, 2**16, (20, 30, *channels), np.uint16)
    written, data = cv2.imencode(f".{suffix}", deep[..., ::-1] if channels else deep)
    assert written
    expected = np.broadcast_to((deep >> 8).reshape(20, 30, -1), (20, 30, 3))
    pixels = decode.decode(data.tobytes())
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, expected)


def test_a_png_of_known_chunks_is_decoded_without_pillow_which_is_slower(monkeypatch):
    files = [encode(noise(9, 12), "PNG", mode=mode) for mode in ("L", "P", "RGB")]
    expected = [decode.decode(data) for data in files]
    monkeypatch.setattr(decode.Image, "open", None)
    for data, pixels in zip(files, expected, strict=True):
        np.testing.assert_array_equal(decode.decode(data), pixels)


@pytest.mark.parametrize(("form", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})])
def test_decode_animation_or_pages_returns_first_frame(form, options):
    frames = [Image.fromarray(np.full((20, 30, 3), color, np.uint8)) for color in ((200, 10, 10), (10, 200, 10), (0, 0, 99))]
    buffer = io.BytesIO()
    frames[0].save(buffer, form, save_all=True, append_images=frames[1:], **options)
    np.testing.assert_array_equal(decode.decode(buffer.getvalue()), np.asarray(frames[0]))


@pytest.mark.parametrize(("dtype", "kind"), [(np.int32, "32-bit integer"), (np.float32, "floating-point")])
def test_decode_pixels_without_defined_white_raises(dtype, kind):
    buffer = io.BytesIO()
    Image.fromarray(np.ones((20, 30), dtype)).save(buffer, "TIFF")
    with pytest.raises(
        ImageError, match=f"{kind} pixels, whose value for white is undefined; convert the image to 8 or 16 bits"
    ):
        decode.decode(buffer.getvalue())


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_decode_ignores_exif_orientation(form):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert decode.decode(encode(smooth_image(), form, exif=exif)).shape == (60, 80, 3)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("damage", ["zeros within", "second half zeros", "half and end marker", "half"])
def test_decode_damaged_jpeg_raises_instead_of_filling_in(progressive, damage):
    data = encode(noise(60, 80), progressive=progressive)
    half = len(data) // 2
    damaged = {
        "zeros within": data[:half] + bytes(1000) + data[half + 1000 :],
        "second half zeros": data[:half] + bytes(len(data) - half - 2) + data[-2:],
        "half and end marker": data[:half] + b"\xff\xd9",
        "half": data[:half],
    }[damage]
    with pytest.raises(ImageError, match=r"^damaged or truncated JPEG: "):
        decode.decode(damaged)


@pytest.mark.parametrize("data", [b"", b"no image", b"\xff\xd8\xff"])
def test_decode_data_that_are_no_image_raises(data):
    with pytest.raises(ImageError, match=r"^(damaged or truncated JPEG: .*|not an image of a known format)$"):
        decode.decode(data)


def test_decode_names_the_damage_of_a_known_format():
    data = encode(noise(60, 80), "BMP")
    with pytest.raises(ImageError, match="truncated"):
        decode.decode(data[: len(data) // 2])


def test_pillows_warnings_of_sizes_and_metadata_are_not_printed():
    odd = {"message": "odd metadata", "category": UserWarning, "filename": "file.py", "lineno": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(decode.__file__)
        Image.open(io.BytesIO(claim("PNG", 10_000, 10_000)))
        warnings.warn_explicit(**odd, module="PIL.TiffImagePlugin")
        with pytest.raises(UserWarning):
            warnings.warn_explicit(**odd, module="jaxdp.data")


CHROMA = ((1, 1), (1, 1))
LUMA = [(across, down) for across in range(1, 5) for down in range(1, 5)]
UNEVEN = [((2, 2), (2, 1), (1, 1)), ((2, 2), (1, 2), (2, 1)), ((1, 1), (2, 2), (2, 2)), ((2, 1), (1, 1), (2, 1))]


@pytest.mark.parametrize("factors", [*((luma, *CHROMA) for luma in LUMA), *UNEVEN], ids=str)
def test_decode_jpeg_of_any_sampling_factors_matches_opencv(factors):
    data = sampled_jpeg(smooth_image(), factors)
    expected = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[..., ::-1].astype(int)
    pixels = decode.decode(data)
    assert np.abs(pixels - expected).max() <= 2
    assert np.abs(pixels - smooth_image().astype(int)).mean() < 10
    for length in (10, 400, len(data) // 2, len(data) - 2):
        with pytest.raises(ImageError, match=r"^damaged or truncated JPEG: "):
            decode.decode(data[:length])


def test_decode_jpeg_with_harmless_warnings_matches_pillow():
    """An unknown revision of JFIF, color transform of Adobe and spectral selection say nothing about the pixels."""
    data = encode(smooth_image())
    at, scan = data.index(b"JFIF") + 5, data.index(b"\xff\xda") + 11
    adobe = b"\xff\xee" + struct.pack(">H", 14) + b"Adobe" + struct.pack(">HHHB", 100, 0, 0, 9)
    revision = data[:at] + b"\x03" + data[at + 1 :]
    selection = data[:scan] + bytes(3) + data[scan + 3 :]
    both = revision[:scan] + bytes(3) + revision[scan + 3 :]
    for changed in (revision, data[:2] + adobe + data[2:], data[:2] + adobe + data[20:], selection, both):
        pixels, pillow = decode.decode(changed), np.asarray(Image.open(io.BytesIO(changed)).convert("RGB"))
        assert np.abs(pixels.astype(int) - pillow).max() <= 2
        with pytest.raises(ImageError, match=r"^damaged or truncated JPEG: "):  # Pillow would fill in the rest
            decode.decode(changed[: len(changed) // 2 + 400] + b"\xff\xd9")


def claim(form, width, height) -> bytes:
    """A small image of a format whose header gives another size."""
    data = bytearray(encode(np.zeros((16, 16, 3), np.uint8), form))
    if form == "TIFF":
        tags = struct.unpack_from("<I", data, 4)[0]
        for entry in range(tags + 2, tags + 2 + 12 * struct.unpack_from("<H", data, tags)[0], 12):
            tag = struct.unpack_from("<H", data, entry)[0]
            if tag in (256, 257):
                struct.pack_into("<HII", data, entry + 2, 4, 1, {256: width, 257: height}[tag])
        return bytes(data)
    if form == "PPM":
        return data.replace(b"16 16", b"%d %d" % (width, height), 1)
    at, size = {
        "PNG": (16, struct.pack(">II", width, height)),
        "JPEG": (data.find(b"\xff\xc0") + 5, struct.pack(">HH", height, width)),
        "GIF": (6, struct.pack("<HH", width, height)),
        "BMP": (18, struct.pack("<ii", width, height)),
        "WEBP": (26, struct.pack("<HH", width, height)),
    }[form]
    data[at : at + len(size)] = size
    if form == "PNG":
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.parametrize("side", [8_200, 10_000, 16_383])  # below Pillow's warning, between it and Pillow's error, above
@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
def test_decode_refuses_a_huge_image_by_its_header(form, side):
    with pytest.raises(ImageError, match="more than 67,108,864"):  # decoded, the data would be truncated
        decode.decode(claim(form, side, side))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
def test_decode_accepts_sizes_up_to_both_limits(form, monkeypatch):
    monkeypatch.setattr(decode, "MAX_PIXELS", 10)
    for height, width in ((2, 5), (5, 2)):
        assert decode.decode(encode(noise(height, width), form)).shape == (height, width, 3)
    for height, width, limit in ((1, 5, "fewer than 2x2"), (5, 1, "fewer than 2x2"), (3, 4, "more than 10 in total")):
        with pytest.raises(ImageError, match=f"^{width}x{height} pixels, {limit}$"):
            decode.decode(encode(noise(height, width), form))


def test_decode_into_a_buffer_of_the_thread_gives_the_same_pixels_and_large_images_their_own(monkeypatch):
    scratch, largest = decode.Scratch(), (20, 30)
    monkeypatch.setattr(decode.Scratch, "MAX_BYTES", 20 * 30 * 3)
    decode.decode(encode(smooth_image(*largest)), scratch)
    memory = scratch.memory
    for size in ((10, 10), largest, (5, 7), (21, 30)):
        data = encode(smooth_image(*size))
        pixels = decode.decode(data, scratch)
        np.testing.assert_array_equal(pixels, decode.decode(data))
        assert np.shares_memory(pixels, scratch.memory) == (size != (21, 30))
    assert scratch.memory is memory
    assert scratch.memory.size == 20 * 30 * 3
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: scratch.memory.size).result() == 0


def test_rgb_refuses_a_huge_image_by_its_header():
    """Of the user's own data set."""
    image = Image.open(io.BytesIO(claim("PNG", 8_200, 8_200)))
    with pytest.raises(ImageError, match="8200x8200 pixels, more than 67,108,864 in total"):
        decode.rgb(image)


def test_decode_refuses_a_damage_at_which_pillow_raises_no_error_of_its_own():
    data = bytearray(encode(smooth_image(), "TIFF"))
    entry = data.index(struct.pack("<HHI", 273, 4, 1))  # StripOffsets, as a fraction
    struct.pack_into("<H", data, entry + 2, 5)
    with pytest.raises(ImageError):
        decode.decode(bytes(data))


def test_decode_png_ignores_metadata(recwarn):
    """A long compressed text, a damaged profile and a palette's transparency keep no decoder from the pixels."""
    image = Image.fromarray(smooth_image()).convert("P")
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=bytes(range(256)))
    data = buffer.getvalue()
    text = png_chunk(b"zTXt", b"Raw profile\0\0" + zlib.compress(bytes(2**21)))
    profile = png_chunk(b"iCCP", b"name\0\0no profile")[:-1] + b"x"
    pixels = decode.decode(data[:33] + text + profile + data[33:])
    np.testing.assert_array_equal(pixels, np.asarray(image.convert("RGB")))
    assert not recwarn


# Passes of the pixels of a block, PNG specification 8.2.
PASSES = ["16462646", "77777777", "56565656", "77777777", "36463646", "77777777", "56565656", "77777777"]


def png_rows(height: int, width: int, *, bits: int, interlaced: bool) -> list[bytes]:
    """Random rows of the passes of a PNG, each after its filter byte."""
    rows, generator = [], np.random.default_rng(0)
    for number in "1234567" if interlaced else "0":
        for row in range(height):
            columns = sum(number in ("0", PASSES[row % 8][column % 8]) for column in range(width))
            if columns:
                rows.append(b"\0" + generator.bytes(-(-columns * bits // 8)))
    return rows


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(
    ("color", "channels", "depth"), [(0, 1, 1), (0, 1, 8), (2, 3, 8), (2, 3, 16), (3, 1, 4), (4, 2, 8), (6, 4, 8)]
)
@pytest.mark.parametrize("size", [(3, 2), (9, 5), (16, 23)])
def test_decode_refuses_a_png_whose_complete_stream_lacks_a_row(size, color, channels, depth, interlaced):
    def png(rows: list[bytes]) -> bytes:
        header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", size[1], size[0], depth, color, 0, 0, interlaced))
        palette = png_chunk(b"PLTE", bytes(range(48))) if color == 3 else b""
        stream = zlib.compress(b"".join(rows))
        parts = [png_chunk(b"IDAT", part) for part in (stream[:7], stream[7:])]
        return decode.PNG_SIGNATURE + header + palette + b"".join(parts) + png_chunk(b"IEND", b"")

    rows = png_rows(*size, bits=channels * depth, interlaced=interlaced)
    assert decode.decode(png(rows)).shape == (*size, 3)
    for count in (len(rows) - 1, len(rows) // 2, 1):
        with pytest.raises(ImageError, match=r"^damaged or truncated PNG: \d+ of \d+ bytes of pixels$"):
            decode.decode(png(rows[:count]))


@pytest.mark.parametrize(
    "damage", ["length", "IDAT", "checksum", "no end", "cut", 28, 29, "no header", "only end", "short header"]
)
def test_decode_refuses_damaged_or_truncated_png_on_one_line(damage, capfd):
    data = bytearray(encode(smooth_image(), "PNG"))
    if damage in ("no end", "cut"):
        del data[{"no end": -12, "cut": -300}[damage] :]
    elif damage in (28, 29):
        del data[damage:]
    elif damage in ("no header", "only end"):
        del data[8 : {"no header": 33, "only end": -12}[damage]]
    elif damage == "short header":
        data[8:33] = png_chunk(b"IHDR", data[16:24])
    else:
        data[{"length": 33, "IDAT": 60, "checksum": -13}[damage]] ^= 1
    reasons = {"IDAT": "wrong checksum of a chunk", "checksum": "wrong checksum of a chunk"}
    reasons |= dict.fromkeys(("length", "no end", "cut", 29), "it has no end")
    reason = reasons.get(damage, "it has no header")
    with pytest.raises(ImageError, match=rf"^damaged or truncated PNG: {reason}$") as raised:
        decode.decode(bytes(data))
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


class Failing:
    """`read_regular` of a file system that fails `times` times."""

    def __init__(self, number, times):
        self.number, self.times = number, times

    def __call__(self, path):
        self.times -= 1
        if self.times >= 0:
            raise OSError(self.number, os.strerror(self.number), path)
        return b"content"


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.ENOTCONN])
def test_read_errors_that_may_pass_say_nothing_about_the_image(monkeypatch, number):
    slept = []
    monkeypatch.setattr(decode.time, "sleep", slept.append)
    monkeypatch.setattr(decode, "read_regular", Failing(number, 3))
    assert decode.read_image("a.png") == b"content"
    assert slept == list(decode.RETRY_DELAYS)
    monkeypatch.setattr(decode, "read_regular", Failing(number, 99))
    with pytest.raises(StorageError) as raised:  # which no setting of --data.on-bad-image skips
        decode.read_image(Path("a.png"))
    assert (raised.value.filename, raised.value.strerror) == ("a.png", os.strerror(number))


def test_what_is_no_file_is_an_unusable_image_at_once_and_an_error_without_a_number_keeps_its_text(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(decode.time, "sleep", slept.append)
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("pipe.png", ""):
        with pytest.raises(ImageError, match=r"not a regular file|directory"):
            decode.read_image(tmp_path / name)
    assert not slept
    monkeypatch.setattr(decode, "read_regular", lambda path: (_ for _ in ()).throw(OSError("no answer")))
    with pytest.raises(StorageError) as raised:
        decode.read_image("a.png")
    assert (raised.value.filename, raised.value.strerror) == ("a.png", "no answer")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ELOOP])
def test_a_path_without_a_readable_file_is_an_unusable_image_at_once(monkeypatch, number):
    monkeypatch.setattr(decode, "read_regular", Failing(number, 1))
    with pytest.raises(ImageError, match=os.strerror(number)):
        decode.read_image("a.png")
