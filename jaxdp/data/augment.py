"""Pixel transforms on the device: normalization, and augmentations with random numbers drawn from (seed, position).

Every geometric augmentation maps output pixels to input pixels and resamples once, bilinearly, repeating the edge.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.ndimage import map_coordinates

from jaxdp.choices import AUGMENTATIONS, MIXES
from jaxdp.config import Augment, Config, Data

ANGLE, SCALE, SHEAR, SHIFT = 0.20, 0.10, 0.15, 0.08  # of `random_affine`: radians, ratio, ratio, share of the image's size
# Of `paper_transform`: the public ImageNet values of the paper's first author, for stored images of 320 pixels; the paper gives
# none. Enlargement, ratio of the enlargements of width and height, radians, strength of the distortion; then ratio and fixed
# point of the contrast.
PAPER_SCALE, PAPER_ASPECT, PAPER_ANGLE, PAPER_DISTORTION = (0.77, 1.54), 1.3, 0.5, 0.2
PAPER_CONTRAST, PAPER_CONTRAST_CENTER = 1.1, 0.5
CUTMIX_ALPHA = 1.0  # of `mixup_or_cutmix`: the ratio is uniform, as published
CUTMIX_PROBABILITY = 0.5  # of `mixup_or_cutmix`, as in timm and torchvision
Seed = jax.typing.ArrayLike | None  # an integer, which may be traced; None: the config's
PixelStat = jax.typing.ArrayLike | tuple[float, ...]
MIX_KEY, MODEL_KEY = 1, 2  # uses of `worker_key`
PADDING = 4  # of `pad_and_crop`, in pixels, as in He et al. on CIFAR-10
CROP_ATTEMPTS = 10  # of `random_resized_crop`, as in torchvision


def normalize(images: jax.Array, mean: PixelStat, std: PixelStat) -> jax.Array:
    """(images - mean) / std in float32.

    images: uint8 or float on the 0-255 scale; mean, std: a number, or one for each channel.
    """
    means, stds = jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32)
    return (images.astype(jnp.float32) - means) * (1.0 / stds)


def keys_for(seed: jax.typing.ArrayLike, positions: jax.Array) -> jax.Array:
    """One random key for each example, which depends on seed and position alone: equal on any mesh. positions: [B] uint32."""
    return jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(positions)


def worker_key(seed: jax.typing.ArrayLike, positions: jax.Array, use: int) -> jax.Array:
    """One random key for a worker's batch, from seed and first position; another one for each use. positions: [B] uint32."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), positions[0]), use)


def image_keys(seed: jax.typing.ArrayLike, positions: jax.Array, use: int) -> jax.Array:
    """`keys_for` of another use than augmentation: [B]."""
    return jax.vmap(lambda key: jax.random.fold_in(key, use))(keys_for(seed, positions))


def resample(image: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Bilinear samples of `image` [H, W, C] at fractional pixel indices rows, columns [h, w]: [h, w, C] float32."""
    channel = partial(map_coordinates, coordinates=[rows, columns], order=1, mode="nearest")
    return jax.vmap(channel, in_axes=-1, out_axes=-1)(image.astype(jnp.float32))


def _grid(height: int, width: int) -> list[jax.Array]:
    """Row and column indices of every pixel, [h, w] float32 each."""
    return jnp.meshgrid(jnp.arange(height, dtype=jnp.float32), jnp.arange(width, dtype=jnp.float32), indexing="ij")


def affine_matrix(key: jax.Array) -> jax.Array:
    """[2, 3]: a small random map from output to input coordinates, both relative to the center and size of the image."""
    angle, log_scale, shear, down, right = jax.random.uniform(key, (5,), jnp.float32, minval=-1.0, maxval=1.0)
    cos, sin = jnp.cos(ANGLE * angle), jnp.sin(ANGLE * angle)
    rotate = jnp.array([[cos, -sin], [sin, cos]])
    slant = jnp.array([[1.0, SHEAR * shear], [0.0, 1.0]])
    shift = SHIFT * jnp.array([[down], [right]])
    return jnp.concatenate([rotate @ slant * jnp.exp(SCALE * log_scale), shift], axis=1)


def resample_affine(image: jax.Array, matrix: jax.Array) -> jax.Array:
    """`image` [H, W, C] under an `affine_matrix`, float32 [H, W, C]."""
    height, width, _ = image.shape
    rows, columns = _grid(height, width)
    y, x = (rows + 0.5) / height - 0.5, (columns + 0.5) / width - 0.5
    source = jnp.einsum("ij,jhw->ihw", matrix, jnp.stack([y, x, jnp.ones_like(y)]))
    return resample(image, (source[0] + 0.5) * height - 0.5, (source[1] + 0.5) * width - 0.5)


def random_affine(image: jax.Array, key: jax.Array, *, size: int, ranges: Augment) -> jax.Array:
    """A small random rotation, scaling, shear and shift of one image [H, W, C], float32; for digits."""
    return resample_affine(image, affine_matrix(key))


def paper_draws(key: jax.Array) -> dict[str, jax.Array]:
    """The random numbers of `paper_transform`: uniform in [0, 1), "contrast" [3].

    Those for brightness and noise, which nnabla has and the published values turn off, are drawn and left out.
    """
    names = ("scale", "aspect", "angle", "row", "column", "flip", "", "distortion", "")
    uniform, channels, _ = jax.random.split(key, 3)
    draws = dict(zip(names, jax.random.uniform(uniform, (len(names),), jnp.float32), strict=True))
    del draws[""]
    return draws | {"contrast": jax.random.uniform(channels, (3,), jnp.float32)}


def paper_transform(image: jax.Array, draws: dict[str, jax.Array], *, size: int, ranges: Augment) -> jax.Array:
    """The augmentation of Mikami et al. (arXiv 1811.05233, section 3), in the form of nnabla's `image_augmentation`.

    image: [H, W, 3] on the 0-255 scale; returns [size, size, 3] float32 on the same scale. Every u below is a
    separate draw from [0, 1).

    1. The image is enlarged by scale = min (max / min)^u, times aspect^(u - 1/2) in width and its inverse
       in height. The crop's center is u (enlarged - size) + (size - 1) / 2.
    2. An output pixel p, relative to the center and in half sizes, is distorted to p (1 + d r^2) / (1 + d), where r is its
       radius and d = exp((2u - 1) distortion) - 1; it is divided by the enlargement and rotated by (2u - 1) angle.
    3. Pixels x become (x - center) contrast^(2u - 1) + center, in each channel.
    """
    height, width, _ = image.shape
    smallest, largest = PAPER_SCALE
    scale = smallest * (largest / smallest) ** draws["scale"]
    stretch = PAPER_ASPECT ** (draws["aspect"] - 0.5)
    enlarge_rows, enlarge_columns = scale / stretch, scale * stretch
    center, half = (size - 1) / 2, size / 2
    rows, columns = (axis - half for axis in _grid(size, size))
    distortion = jnp.exp((2 * draws["distortion"] - 1) * PAPER_DISTORTION) - 1
    factor = (1 + distortion * (rows**2 + columns**2) / half**2) / (1 + distortion)
    rows = (factor * rows + half - center) / enlarge_rows
    columns = (factor * columns + half - center) / enlarge_columns
    angle = (2 * draws["angle"] - 1) * PAPER_ANGLE
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rows, columns = sin * columns + cos * rows, cos * columns - sin * rows
    columns = jnp.where(ranges.flip & (draws["flip"] < 0.5), -columns, columns)
    row = draws["row"] * (height * enlarge_rows - size) + center
    column = draws["column"] * (width * enlarge_columns - size) + center
    pixels = resample(image, rows + row / enlarge_rows, columns + column / enlarge_columns) / 255
    contrast = PAPER_CONTRAST ** (2 * draws["contrast"] - 1)
    return 255 * ((pixels - PAPER_CONTRAST_CENTER) * contrast + PAPER_CONTRAST_CENTER)


def paper_augmentation(image: jax.Array, key: jax.Array, *, size: int, ranges: Augment) -> jax.Array:
    """`paper_transform` with random draws."""
    return paper_transform(image, paper_draws(key), size=size, ranges=ranges)


def random_resized_crop(image: jax.Array, key: jax.Array, *, size: int, ranges: Augment) -> jax.Array:
    """A random crop resized to [size, size, C] float32, flipped with probability 1/2.

    Its area is min_area to 1 of the image and its aspect ratio 3/4 to 4/3: the first of ten draws that fits, else the largest
    center square. As torchvision's, except that the bilinear resize does not filter.
    """
    height, width, _ = image.shape
    sizes, corner, flip = jax.random.split(key, 3)
    area, ratio = jax.random.uniform(sizes, (2, CROP_ATTEMPTS), jnp.float32)
    area = height * width * (ranges.min_area + (1 - ranges.min_area) * area)
    ratio = jnp.exp(jnp.log(3 / 4) + jnp.log(16 / 9) * ratio)
    crop_height, crop_width = jnp.sqrt(area / ratio), jnp.sqrt(area * ratio)
    fits = (crop_height <= height) & (crop_width <= width)
    first, side = lax.argmax(fits, 0, jnp.int32), min(height, width)
    crop_height, crop_width = (jnp.where(fits.any(), length[first], side) for length in (crop_height, crop_width))
    down, right = jnp.where(fits.any(), jax.random.uniform(corner, (2,), jnp.float32), 0.5)
    rows, columns = _grid(size, size)
    columns = jnp.where(ranges.flip & jax.random.bernoulli(flip, jnp.float32(0.5)), size - 1 - columns, columns)
    rows = down * (height - crop_height) + (rows + 0.5) * crop_height / size - 0.5
    columns = right * (width - crop_width) + (columns + 0.5) * crop_width / size - 0.5
    return resample(image, rows, columns)


def pad_and_crop(image: jax.Array, key: jax.Array, *, size: int, ranges: Augment) -> jax.Array:
    """A random crop [H, W, C] of the image padded by 4 black pixels, flipped with probability 1/2."""
    height, width, channels = image.shape
    corner, flip = jax.random.split(key)
    padded = jnp.pad(image, ((PADDING,) * 2, (PADDING,) * 2, (0, 0)))
    row, column = jax.random.randint(corner, (2,), 0, 2 * PADDING + 1, jnp.int32)
    crop = lax.dynamic_slice(padded, (row, column, jnp.int32(0)), (height, width, channels))
    return jnp.where(ranges.flip & jax.random.bernoulli(flip, jnp.float32(0.5)), crop[:, ::-1], crop)


def augment(config: Config, images: jax.Array, positions: jax.Array, *, seed: Seed = None) -> jax.Array:
    """Augment a batch before normalization: [B, S, S, 3] to [B, image_size, image_size, 3].

    positions: [B] uint32. seed: None for the config's.
    """
    if config.data.augmentation == "none" or config.data.crops_while_loading:
        return images
    augmentation = AUGMENTATIONS.implementation(config.data.augmentation)
    one_image = partial(augmentation, size=config.data.image_size, ranges=config.augment)
    return jax.vmap(one_image)(images, keys_for(config.seed if seed is None else seed, positions))


def resize_for_evaluation(config: Config, images: jax.Array) -> jax.Array:
    """[B, S, S, 3] to [B, image_size, image_size, 3]: the center 7/8 of a larger stored image, resized (280 of 320 to 224).

    Images that the fields `data.eval_...` prepare for evaluation are returned unchanged.
    """
    size, stored = config.data.image_size, images.shape[1]
    if stored == size or config.data.sets_evaluation:
        return images
    indices = evaluation_indices(size, stored)
    rows, columns = jnp.meshgrid(indices, indices, indexing="ij")
    return jax.vmap(lambda image: resample(image, rows, columns))(images)


def evaluation_indices(size: int, stored: int) -> jax.Array:
    """Fractional indices [size] of the rows, and columns, that `resize_for_evaluation` samples from `stored` ones."""
    side = stored * 7 / 8
    return (stored - side) / 2 + (jnp.arange(size, dtype=jnp.float32) + 0.5) * side / size - 0.5


def mixup(images: jax.Array, partners: jax.Array, *, share: jax.Array) -> jax.Array:
    """Blend all pixels: share x images + (1 - share) x partners (Zhang et al., arXiv 1710.09412)."""
    return share * images + (1 - share) * partners


def cutmix(images: jax.Array, partners: jax.Array, *, share: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Paste a rectangle of about 1 - share of the area, and return the share that is left (Yun et al., arXiv 1905.04899)."""
    _, height, width, _ = images.shape
    side = jnp.sqrt(1 - share)
    center = jax.random.uniform(key, (2,), jnp.float32)
    rows, columns = _grid(height, width)
    inside = (jnp.abs((rows + 0.5) / height - center[0]) < side / 2) & (jnp.abs((columns + 0.5) / width - center[1]) < side / 2)
    return jnp.where(inside[..., None], partners, images), 1 - inside.mean(dtype=jnp.float32)


def mix_by_mixup(data: Data, images: jax.Array, partners: jax.Array, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    draw, _ = jax.random.split(key)
    share = jax.random.beta(draw, data.mix_alpha, data.mix_alpha, dtype=jnp.float32)
    return mixup(images, partners, share=share), share


def mix_by_cutmix(data: Data, images: jax.Array, partners: jax.Array, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    draw, place = jax.random.split(key)
    return cutmix(images, partners, share=jax.random.beta(draw, data.mix_alpha, data.mix_alpha, dtype=jnp.float32), key=place)


def mix_by_either(data: Data, images: jax.Array, partners: jax.Array, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    cuts = jax.random.uniform(jax.random.fold_in(key, 2), dtype=jnp.float32) < CUTMIX_PROBABILITY
    blended = mix_by_mixup(data, images, partners, key=key)
    pasted = mix_by_cutmix(dataclasses.replace(data, mix_alpha=CUTMIX_ALPHA), images, partners, key=key)
    return jnp.where(cuts, pasted[0], blended[0]), jnp.where(cuts, pasted[1], blended[1])


def mix(
    config: Config, images: jax.Array, positions: jax.Array, *, seed: Seed = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mixed images, partner, share): blend each image with one of the same worker's batch, so without communication.

    images: [B, H, W, C]; the partners are the batch in reverse order. partner: [B] row of each partner; share: [B] float32, the
    weight of an image's own label. The config's `data.mix` must not be "none".
    """
    batch = len(images)
    partner = jnp.arange(batch, dtype=jnp.int32)[::-1]
    key = worker_key(config.seed if seed is None else seed, positions, MIX_KEY)
    mixed, share = MIXES.implementation(config.data.mix)(config.data, images, images[partner], key=key)
    return mixed, partner, jnp.full((batch,), share)
