"""Operations and magnitudes against torchvision's own functions on Pillow images (extra `peers`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pillow_operations import assert_moved, assert_turned
from PIL import Image

from jaxdp.data import pixel_operations, policies
from jaxdp.data.pixel_operations import Kind

torch = pytest.importorskip("torch", reason="needs the extra peers")
torchvision = pytest.importorskip("torchvision", reason="needs the extra peers")
SIZE = 32


def applied(image, operation, magnitude, interpolation):
    """What torchvision's policies do on one of their operations, by its public functions."""
    from torchvision.transforms import functional as f

    still = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0], "interpolation": interpolation}
    slant, shift = np.degrees(np.arctan(magnitude)), int(magnitude)
    moves = {
        "shear_x": {"shear": [slant, 0.0], "center": [0, 0]},
        "shear_y": {"shear": [0.0, slant], "center": [0, 0]},
        "right": {"translate": [shift, 0]},
        "down": {"translate": [0, shift]},
    }
    if operation in moves:
        return f.affine(image, **(still | moves[operation]))
    if operation == "degrees":
        return f.rotate(image, magnitude, interpolation=interpolation)
    changes = {
        Kind.NONE: lambda: image,
        Kind.BRIGHTNESS: lambda: f.adjust_brightness(image, 1 + magnitude),
        Kind.COLOR: lambda: f.adjust_saturation(image, 1 + magnitude),
        Kind.CONTRAST: lambda: f.adjust_contrast(image, 1 + magnitude),
        Kind.SHARPNESS: lambda: f.adjust_sharpness(image, 1 + magnitude),
        Kind.POSTERIZE: lambda: f.posterize(image, int(magnitude)),
        Kind.SOLARIZE: lambda: f.solarize(image, magnitude),
        Kind.AUTO_CONTRAST: lambda: f.autocontrast(image),
        Kind.EQUALIZE: lambda: f.equalize(image),
    }
    return changes[operation]()


def published(policy, operation, size):
    """The 31 magnitudes as torchvision computes them."""
    wide = policy == "trivial_augment"
    if operation is Kind.POSTERIZE:
        return 8 - (torch.arange(31) / (30 / (6 if wide else 4))).round().int()
    ends = {"shear_x": (0.3, 0.99), "degrees": (30.0, 135.0), "right": (150 / 331 * size, 32.0), Kind.COLOR: (0.9, 0.99)}
    ends |= {"shear_y": ends["shear_x"], "down": ends["right"]} | dict.fromkeys(policies.BLENDS, ends[Kind.COLOR])
    if operation is Kind.SOLARIZE:
        return torch.linspace(255.0, 0.0, 31)
    return torch.linspace(0.0, ends[operation][wide], 31) if operation in ends else torch.zeros(31)


@pytest.mark.parametrize("policy", list(policies.SPACES))
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_operations_equal_torchvisions_at_every_magnitude(policy, interpolation):
    from torchvision.transforms import InterpolationMode

    rng = np.random.default_rng(0)
    pixels = np.clip(rng.normal(120, 40, (SIZE, SIZE, 3)), 10, 245).astype(np.uint8)
    device_pixels, fill = jnp.asarray(pixels), jnp.zeros(3)

    @jax.jit
    @jax.vmap
    def run(index, amount):
        operation = policies.operation_of(policies.OPERATIONS, index, amount, size=SIZE)
        operation = operation._replace(cubic=jnp.bool_(interpolation == "bicubic"))
        result = pixel_operations.apply_operation(device_pixels, operation, interpolation=interpolation, fill=fill)
        return operation.matrix, result

    for number, (operation, amounts) in enumerate(zip(policies.OPERATIONS, policies.amounts(policy, SIZE), strict=True)):
        magnitudes = published(policy, operation, SIZE).tolist()
        negative = [-1 if operation in (*policies.GEOMETRIC, *policies.BLENDS) else 1] * policies.BINS
        signed = np.stack([magnitudes, np.multiply(magnitudes, negative)], 1)
        for matrix, result, magnitude in zip(*run(np.full(62, number), amounts.ravel()), signed.ravel(), strict=True):
            expected = applied(Image.fromarray(pixels), operation, float(magnitude), InterpolationMode(interpolation))
            assert_moved(np.asarray(result), expected, np.asarray(matrix), tolerance=1)


def test_shifts_equal_torchvisions_at_every_size():
    for size in range(8, 600):
        ours = policies.magnitudes("rand_augment", "right", size)
        np.testing.assert_array_equal(ours, [int(shift) for shift in published("rand_augment", "right", size).tolist()])


def test_hue_and_jitter_factors_equal_torchvisions():
    from torchvision.transforms import functional as f

    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    for share in (-0.5, -0.2, 0.07, 0.5):
        ours = pixel_operations.shift_hue(jnp.asarray(pixels), jnp.float32(share))
        assert_turned(ours, f.adjust_hue(Image.fromarray(pixels), share), pixels)
