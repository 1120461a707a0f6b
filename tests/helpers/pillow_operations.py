"""The operations of torchvision's and timm's policies by Pillow alone, from their published definitions."""

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from jaxdp.data.pixel_operations import FIXED, Kind

ENHANCERS = {
    Kind.BRIGHTNESS: ImageEnhance.Brightness,
    Kind.COLOR: ImageEnhance.Color,
    Kind.CONTRAST: ImageEnhance.Contrast,
    Kind.SHARPNESS: ImageEnhance.Sharpness,
}


def apply(image: Image.Image, operation, amount: float, *, resample=Image.Resampling.NEAREST, fill=(0, 0, 0)) -> Image.Image:
    """One operation. amount: shear, pixels, degrees, factor, bits, threshold or addend, as `operation` takes it."""
    coefficients = {
        "shear_x": (1, amount, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, amount, 1, 0),
        "right": (1, 0, amount, 0, 1, 0),
        "down": (1, 0, 0, 0, 1, amount),
    }
    if operation in coefficients:
        data = coefficients[operation]
        return image.transform(image.size, Image.Transform.AFFINE, data, resample=resample, fillcolor=fill)
    if operation == "degrees":
        return image.rotate(amount, resample=resample, fillcolor=fill)
    if operation in ENHANCERS:
        return ENHANCERS[operation](image).enhance(amount)
    others = {
        Kind.NONE: lambda: image,
        Kind.POSTERIZE: lambda: ImageOps.posterize(image, int(amount)) if amount else Image.new("RGB", image.size),
        Kind.SOLARIZE: lambda: ImageOps.solarize(image, amount),
        Kind.SOLARIZE_ADD: lambda: image.point([min(255, i + int(amount)) if i < 128 else i for i in range(256)] * 3),
        Kind.AUTO_CONTRAST: lambda: ImageOps.autocontrast(image),
        Kind.EQUALIZE: lambda: ImageOps.equalize(image),
        Kind.INVERT: lambda: ImageOps.invert(image),
    }
    return others[operation]()


def difference(ours, pillows) -> int:
    """The largest distance of two images, of 255."""
    return int(np.abs(np.asarray(ours, int) - np.asarray(pillows, int)).max())


def assert_moved(ours, pillows, matrix, *, tolerance: int) -> None:
    """At most `tolerance` apart, but where rounding of the matrix decides on which side of a pixel's edge a place is."""
    rows, columns = np.mgrid[: ours.shape[0], : ours.shape[1]]
    places = np.tensordot(matrix, [columns, rows, np.ones_like(rows)], 1) % FIXED
    near = sum(ours.shape)  # each entry of the matrix is at most one step off Pillow's
    clear = ((places > near) & (places < FIXED - near)).all(0)
    assert clear.mean() > 0.7
    assert difference(ours[clear], np.asarray(pillows)[clear]) <= tolerance


def turned(image, share) -> Image.Image:
    """The image with its hue turned by `share` of a full turn."""
    hue, *others = (np.asarray(channel) for channel in Image.fromarray(image).convert("HSV").split())
    hue = ((hue.astype(int) + int(share * 255)) % 256).astype(np.uint8)
    return Image.fromarray(np.stack([hue, *others], axis=-1), "HSV").convert("RGB")


def assert_turned(ours, pillows, image) -> None:
    """At most 1 of 255 apart, but where the hue is a whole one of Pillow's 255 steps: Pillow stores some of them one lower."""
    apart = np.abs(np.asarray(ours, int) - np.asarray(pillows, int)).max(-1)
    low, middle, high = np.moveaxis(np.sort(image.astype(int), -1), -1, 0)
    whole = 255 * (middle - low) % (6 * np.maximum(high - low, 1)) == 0
    assert apart[~whole].max(initial=0) <= 1
    assert apart.max() <= 1 + 6  # a sixth of a turn changes a channel by all of its 255 levels
    assert (apart > 1).mean() < 0.01
