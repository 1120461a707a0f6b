"""What happens to pixels on the device: normalisation, and random transforms drawn from (seed, position).

Every geometric transform is a map from output pixels to input pixels, followed by one bilinear resample that repeats the edge.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates

from jaxdp.config import Augment, Config, crops_while_loading

ANGLE, SCALE, SHEAR, SHIFT = 0.20, 0.10, 0.15, 0.08  # of `jiggle`: radians, ratio, ratio, share of the image's size
ATTEMPTS = 10  # of `random_resized_crop`, as torchvision has it


def normalise(images, mean, std):
    """uint8 (or float) images on the 0-255 scale to float32 with about zero mean and unit spread.

    mean, std: a number, or one for each channel.
    """
    mean, std = jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32)
    return (images.astype(jnp.float32) - mean) * (1.0 / std)


def keys_for(seed: int, positions):
    """One random key an example, from its position in the run alone: the same on any mesh. positions: [B] uint32."""
    return jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(positions)


def resample(image, rows, columns):
    """Bilinear samples of `image` [H, W, C] at fractional pixel indices rows, columns [h, w]; outside, the edge repeats."""
    one = partial(map_coordinates, coordinates=[rows, columns], order=1, mode="nearest")
    return jax.vmap(one, in_axes=-1, out_axes=-1)(image.astype(jnp.float32))


def _grid(height: int, width: int):
    """Row and column indices of every pixel, [h, w] each, float32."""
    return jnp.meshgrid(jnp.arange(height, dtype=jnp.float32), jnp.arange(width, dtype=jnp.float32), indexing="ij")


# digits: small rotations, scales, shears and shifts


def _random_affine(key):
    """[2, 3]: from output to input coordinates, both relative to the centre and to the size of the image."""
    angle, log_scale, shear, down, right = jax.random.uniform(key, (5,), minval=-1.0, maxval=1.0)
    cos, sin = jnp.cos(ANGLE * angle), jnp.sin(ANGLE * angle)
    rotate = jnp.array([[cos, -sin], [sin, cos]])
    slant = jnp.array([[1.0, SHEAR * shear], [0.0, 1.0]])
    shift = SHIFT * jnp.array([[down], [right]])
    return jnp.concatenate([rotate @ slant * jnp.exp(SCALE * log_scale), shift], axis=1)


def _resample_affine(image, affine):
    height, width, _ = image.shape
    rows, columns = _grid(height, width)
    y, x = (rows + 0.5) / height - 0.5, (columns + 0.5) / width - 0.5
    source = jnp.einsum("ij,jhw->ihw", affine, jnp.stack([y, x, jnp.ones_like(y)]))
    return resample(image, (source[0] + 0.5) * height - 0.5, (source[1] + 0.5) * width - 0.5)


def jiggle(image, key):
    """A small random rotation, scaling, shear and shift of one image [H, W, C]. Returns float32."""
    return _resample_affine(image, _random_affine(key))


# paper: nnabla's image augmentation


def paper_draws(key) -> dict:
    """The random numbers of one image: uniform in [0, 1), noise a key."""
    names = ("scale", "aspect", "angle", "row", "column", "flip", "brightness", "distortion", "noise")
    uniform, channels, noise = jax.random.split(key, 3)
    draws = dict(zip(names, jax.random.uniform(uniform, (len(names),)), strict=True))
    return draws | {"contrast": jax.random.uniform(channels, (3,)), "key": noise}


def paper_transform(image, out: int, ranges: Augment, draws: dict):
    """The augmentation of Mikami et al. (arXiv 1811.05233, section 3), in the form of nnabla's `image_augmentation`.

    image: [H, W, 3] on the 0-255 scale; returns [out, out, 3] float32 on the same scale. The stored image with `padding` all
    round is enlarged by scale = min (max / min)^u and, in width and height, by aspect^(u - 1/2) and its inverse; the crop lies
    about u (enlarged - out) + (out - 1) / 2. A pixel p of it is distorted by p (1 + d r^2) / (1 + d), with
    d = exp((2u - 1) distortion) - 1 and p and r relative to the middle and to half the size, then divided by the enlargement,
    and then turned by (2u - 1) angle. Then (x + b - centre) c + centre and noise. Outside the image its edge repeats.
    """
    height, width, _ = image.shape
    padding = ranges.padding or 0
    scale = ranges.min_scale * (ranges.max_scale / ranges.min_scale) ** draws["scale"]
    stretch = ranges.aspect ** (draws["aspect"] - 0.5)
    enlarge_rows, enlarge_columns = scale / stretch, scale * stretch
    centre, half = (out - 1) / 2, out / 2
    rows, columns = (axis - half for axis in _grid(out, out))
    bend = jnp.exp((2 * draws["distortion"] - 1) * ranges.distortion) - 1
    push = (1 + bend * (rows**2 + columns**2) / half**2) / (1 + bend)
    rows = (push * rows + half - centre) / enlarge_rows
    columns = (push * columns + half - centre) / enlarge_columns
    angle = (2 * draws["angle"] - 1) * ranges.angle
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rows, columns = sin * columns + cos * rows, cos * columns - sin * rows
    columns = jnp.where(ranges.flip & (draws["flip"] < 0.5), -columns, columns)
    row = draws["row"] * ((height + 2 * padding) * enlarge_rows - out) + centre
    column = draws["column"] * ((width + 2 * padding) * enlarge_columns - out) + centre
    pixels = resample(image, rows + row / enlarge_rows - padding, columns + column / enlarge_columns - padding) / 255
    contrast = ranges.contrast ** (2 * draws["contrast"] - 1)
    pixels += (2 * draws["brightness"] - 1) * ranges.brightness
    pixels = (pixels - ranges.contrast_centre) * contrast + ranges.contrast_centre
    if ranges.noise:
        pixels += jax.random.normal(draws["key"], pixels.shape) * (draws["noise"] * ranges.noise)
    return 255 * pixels


# the two that everyone uses


def random_resized_crop(image, out: int, ranges: Augment, key):
    """A crop of min_area to all of the image with a ratio of sides of 3/4 to 4/3, resized to [out, out, C]; or mirrored.

    Of ten draws the first that fits inside the image is taken, else its largest centre square (as torchvision does, but for
    the resize, which is bilinear without a filter).
    """
    height, width, _ = image.shape
    sizes, corner, mirror = jax.random.split(key, 3)
    area, ratio = jax.random.uniform(sizes, (2, ATTEMPTS))
    area = height * width * (ranges.min_area + (1 - ranges.min_area) * area)
    ratio = jnp.exp(jnp.log(3 / 4) + jnp.log(16 / 9) * ratio)
    tall, wide = jnp.sqrt(area / ratio), jnp.sqrt(area * ratio)
    fits = (tall <= height) & (wide <= width)
    first, side = jnp.argmax(fits), min(height, width)
    tall, wide = (jnp.where(fits.any(), size[first], side) for size in (tall, wide))
    down, right = jnp.where(fits.any(), jax.random.uniform(corner, (2,)), 0.5)
    rows, columns = _grid(out, out)
    columns = jnp.where(ranges.flip & jax.random.bernoulli(mirror), out - 1 - columns, columns)
    rows = down * (height - tall) + (rows + 0.5) * tall / out - 0.5
    columns = right * (width - wide) + (columns + 0.5) * wide / out - 0.5
    return resample(image, rows, columns)


def pad_and_crop(image, ranges: Augment, key):
    """A crop of the image's own size out of the image with `padding` (4) black pixels around it; or mirrored. [H, W, C]."""
    height, width, channels = image.shape
    padding = 4 if ranges.padding is None else ranges.padding
    place, mirror = jax.random.split(key)
    padded = jnp.pad(image, ((padding,) * 2, (padding,) * 2, (0, 0)))
    row, column = jax.random.randint(place, (2,), 0, 2 * padding + 1)
    crop = jax.lax.dynamic_slice(padded, (row, column, 0), (height, width, channels))
    return jnp.where(ranges.flip & jax.random.bernoulli(mirror), crop[:, ::-1], crop)


def augment(config: Config, images, positions):
    """The training transform of a config, before normalisation: [B, S, S, 3] to [B, image_size, image_size, 3]."""
    name, out, ranges = config.data.augmentation, config.data.image_size, config.augment
    if name == "none" or crops_while_loading(config):
        return images
    one = {
        "digits": jiggle,
        "paper": lambda image, key: paper_transform(image, out, ranges, paper_draws(key)),
        "random_resized_crop": lambda image, key: random_resized_crop(image, out, ranges, key),
        "pad_and_crop": lambda image, key: pad_and_crop(image, ranges, key),
    }[name]
    return jax.vmap(one)(images, keys_for(config.seed, positions))


def for_evaluation(config: Config, images):
    """[B, S, S, 3] to [B, image_size, image_size, 3]: the centre 7/8 of a larger stored image, resized (280 of 320 to 224)."""
    out, stored = config.data.image_size, images.shape[1]
    if stored == out:
        return images
    side = stored * 7 / 8
    place = (stored - side) / 2 + (jnp.arange(out) + 0.5) * side / out - 0.5
    rows, columns = jnp.meshgrid(place, place, indexing="ij")
    return jax.vmap(lambda image: resample(image, rows, columns))(images)


# blending within a worker's batch: no communication


def mix(config: Config, images, positions):
    """(images, partner, share): each image blended with its partner's, in place of which the batch reversed stands.

    images: [B, H, W, C]. partner: [B] row of each image's partner. share: [B] float32, how much of each image is its own;
    targets are to be weighted alike. mixup: Zhang et al. (arXiv 1710.09412); cutmix: Yun et al. (arXiv 1905.04899), a
    rectangle of the partner's pixels, `share` being the area left.
    """
    batch, height, width, _ = images.shape
    partner = jnp.arange(batch)[::-1]
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), positions[0]), 1)
    draw, place = jax.random.split(key)
    share = jax.random.beta(draw, config.data.mix_alpha, config.data.mix_alpha)
    if config.data.mix == "mixup":
        return share * images + (1 - share) * images[partner], partner, jnp.full((batch,), share)
    side = jnp.sqrt(1 - share)
    centre = jax.random.uniform(place, (2,))
    rows, columns = _grid(height, width)
    inside = (jnp.abs((rows + 0.5) / height - centre[0]) < side / 2) & (jnp.abs((columns + 0.5) / width - centre[1]) < side / 2)
    mixed = jnp.where(inside[..., None], images[partner], images)
    return mixed, partner, jnp.full((batch,), 1 - inside.mean(dtype=jnp.float32))
