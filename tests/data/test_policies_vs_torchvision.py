"""Operations and magnitudes against torchvision's own policies on Pillow images (extra `peers`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxdp.data import pixel_operations, policies

autoaugment = pytest.importorskip("torchvision.transforms.autoaugment", reason="needs the extra peers")
SIZE = 32


def published(policy, size):
    """Name of each operation -> (its magnitudes, whether they have a sign)."""
    if policy == "trivial_augment":
        return autoaugment.TrivialAugmentWide()._augmentation_space(policies.BINS)
    return autoaugment.RandAugment()._augmentation_space(policies.BINS, (size, size))


@pytest.mark.parametrize("policy", list(policies.SPACES))
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_operations_equal_torchvisions_at_every_magnitude(policy, interpolation):
    rng = np.random.default_rng(0)
    pixels = np.clip(rng.normal(120, 40, (SIZE, SIZE, 3)), 10, 245).astype(np.uint8)
    table = policies.table(policy, SIZE, interpolation == "nearest")
    flat = pixel_operations.Operation(*(leaf.reshape(-1, *leaf.shape[3:]) for leaf in table[:3]))

    def one(operation):
        operation = operation._replace(cubic=jnp.bool_(interpolation == "bicubic"))
        return pixel_operations.apply_operation(jnp.asarray(pixels), operation, interpolation=interpolation, fill=jnp.zeros(3))

    ours = np.asarray(jax.jit(jax.vmap(one))(flat)).reshape(-1, policies.BINS, 2, SIZE, SIZE, 3).astype(int)
    filtered = autoaugment.InterpolationMode(interpolation)
    for (name, (magnitudes, signed)), results in zip(published(policy, SIZE).items(), ours, strict=True):
        for bin_, magnitude in enumerate(np.broadcast_to(magnitudes.numpy(), policies.BINS).tolist()):
            for negative in (0, 1) if signed else (0,):
                amount = -magnitude if negative else magnitude
                expected = autoaugment._apply_op(Image.fromarray(pixels), name, amount, filtered, fill=None)
                assert np.abs(results[bin_, negative] - np.asarray(expected)).max() <= 1, (name, amount)


def test_shifts_equal_torchvisions_at_every_size():
    for size in range(8, 600):
        magnitudes, _ = published("rand_augment", size)["TranslateX"]
        np.testing.assert_array_equal(policies.magnitudes("rand_augment", "right", size), magnitudes.numpy().astype(int))
