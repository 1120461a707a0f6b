"""The operations of torchvision's and timm's policies by Pillow alone, from their published definitions."""

from PIL import Image, ImageEnhance, ImageOps

from jaxdp.data.pixel_operations import Kind

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
