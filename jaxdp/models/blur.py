"""Anti-aliasing before subsampling (Zhang, arXiv 1904.11486, section 3): BlurPool.

`model.blur_pool` places the filter as one of three public implementations. "activations" is that of timm's `resnetblur50`:
behind the ReLU of a strided 3x3 convolution, which then has stride 1, and behind the maxima of the stem. "convolutions" is
FFCV's: before each strided convolution of at least 16 channels. "convolutions_and_pool" is MosaicML Composer's: that, and
behind the maxima of the stem.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

BLURRED_POOLS = ("activations", "convolutions_and_pool")  # the forms that blur behind the maxima of the stem
LEAST_CHANNELS = 16  # of a convolution's input that FFCV and Composer blur: not the image

Padding = Literal["constant", "reflect"]


def blur(images: jax.Array, stride: int = 1, *, padding: Padding = "constant") -> jax.Array:
    """Convolve every channel with [1 2 1] x [1 2 1] / 16: [B, H, W, C] to [B, ceil(H / stride), ceil(W / stride), C].

    padding: of one pixel on every side, with zeros or the pixel beside the edge. Computed in float32.
    """
    blurred = images.astype(jnp.float32)
    for axis in (1, 2):
        size = blurred.shape[axis]
        padded = jnp.pad(blurred, [(int(n == axis),) * 2 for n in range(4)], mode=padding)
        # Slices and not a convolution: XLA fuses them with the ReLU before them.
        before, here, after = (lax.slice_in_dim(padded, k, k + size, stride, axis) for k in range(3))
        blurred = 0.25 * (before + after) + 0.5 * here
    return blurred.astype(images.dtype)


def blurs_input(form: str, channels: int, stride: int) -> bool:
    """Whether a form of BlurPool blurs the input, of so many channels, of a convolution with this stride."""
    return form.startswith("convolutions") and stride > 1 and channels >= LEAST_CHANNELS


def pool_padding(form: str) -> Padding:
    """The padding of the blur behind the maxima of the stem."""
    return "reflect" if form == "activations" else "constant"
