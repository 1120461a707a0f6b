"""Augmentations that users register: functions of one image and its key, mapped over a batch."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxdp.choices import AUTO_AUGMENTS
from jaxdp.config import Config
from jaxdp.errors import ConfigError, first_line

Change = Callable[[jax.Array, jax.Array], jax.Array]


def apply(images: jax.Array, keys: jax.Array, *, name: str, change: Change) -> jax.Array:
    """The function `change`, registered as `name`, on images [B, S, S, 3]: float32, both on the 0-255 scale. keys: [B].

    Raises ConfigError if the function fails, or returns an image of another shape or dtype.
    """
    invalid = partial(ConfigError, "data.auto_augment", name)
    images = images.astype(jnp.float32) * jnp.float32(1 / 255)
    try:
        changed = jax.vmap(change)(images, keys)
        shape, dtype = changed.shape[1:], changed.dtype
    except Exception as error:
        reason = f"the registered function failed: {type(error).__name__}: {first_line(error)}"
        raise invalid(reason=reason, hint="it takes (image [S, S, 3] float32, key) and returns such an image") from error
    if (shape, dtype) != (images.shape[1:], images.dtype):
        reason = f"the registered function returned {dtype} {shape}; must be float32 {images.shape[1:]}, as its image"
        raise invalid(reason=reason, hint="keep shape and dtype of the image")
    return 255 * changed


def check(config: Config) -> None:
    """Trace a registered `data.auto_augment` on an image. Raises ConfigError as `apply` does."""
    name, size = config.data.auto_augment, config.data.image_size
    if name in AUTO_AUGMENTS.registered:
        image = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
        change = AUTO_AUGMENTS.implementation(name)
        jax.eval_shape(lambda image: change(image, jax.random.split(jax.random.key(0), 1)), image)
