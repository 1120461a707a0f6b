"""What happens to pixels on the device: normalisation, and random transforms drawn from (seed, position)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates

ANGLE, SCALE, SHEAR, SHIFT = 0.20, 0.10, 0.15, 0.08  # radians, ratio, ratio, share of the image's size


def normalise(images, mean: float, std: float):
    """uint8 (or float) images on the 0-255 scale to float32 with about zero mean and unit spread."""
    return (images.astype(jnp.float32) - mean) * (1.0 / std)


def keys_for(seed: int, positions):
    """One random key an example, from its position in the run alone: the same on any mesh. positions: [B] uint32."""
    return jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(positions)


def _random_affine(key):
    """[2, 3]: from output to input coordinates, both relative to the centre and to the size of the image."""
    angle, log_scale, shear, down, right = jax.random.uniform(key, (5,), minval=-1.0, maxval=1.0)
    cos, sin = jnp.cos(ANGLE * angle), jnp.sin(ANGLE * angle)
    rotate = jnp.array([[cos, -sin], [sin, cos]])
    slant = jnp.array([[1.0, SHEAR * shear], [0.0, 1.0]])
    shift = SHIFT * jnp.array([[down], [right]])
    return jnp.concatenate([rotate @ slant * jnp.exp(SCALE * log_scale), shift], axis=1)


def _resample(image, affine):
    height, width, _ = image.shape
    rows, columns = jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij")
    y, x = (rows + 0.5) / height - 0.5, (columns + 0.5) / width - 0.5
    source = jnp.einsum("ij,jhw->ihw", affine, jnp.stack([y, x, jnp.ones_like(y)]))
    coordinates = [(source[0] + 0.5) * height - 0.5, (source[1] + 0.5) * width - 0.5]
    one = partial(map_coordinates, coordinates=coordinates, order=1, mode="nearest")
    return jax.vmap(one, in_axes=-1, out_axes=-1)(image)


def jiggle(images, keys):
    """A small random rotation, scaling, shear and shift of each image, as one bilinear resample that repeats the edge.

    images: [B, H, W, C], any numeric dtype; keys: [B]. Returns float32.
    """
    return jax.vmap(_resample)(images.astype(jnp.float32), jax.vmap(_random_affine)(keys))


def augment(name: str, images, positions, seed: int):
    """The training transform of a config's `data.augmentation`, before normalisation."""
    if name == "none":
        return images
    return jiggle(images, keys_for(seed, positions))
