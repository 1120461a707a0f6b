"""Convolution in forms that compute the same numbers; max and average pooling; BlurPool.

`convolve` is "direct", one `conv_general_dilated`, or one of two forms that `form_on` selects. "product" is for CPUs: XLA is
slow for 1x1 kernels and for maps of a few pixels there, which are computed as matrix products instead. "cudnn" is for GPUs:
cuDNN is slow for three channels, so the first convolution of the ImageNet stem is computed over blocks of 2x2 pixels, and it
would write zeros into the input gradient of a strided 1x1 convolution. "xla" is "direct" for TPUs, with XLA's max pooling.
`jaxdp.models.bn_relu_max_pool` has max pooling with a faster gradient.

BlurPool is anti-aliasing before subsampling (Zhang, arXiv 1904.11486, section 3). `model.blur_pool` places the filter as one of
two public implementations. "convolutions" is FFCV's: before each strided convolution of at least 16 channels.
"convolutions_and_pool" is MosaicML Composer's: that, and behind the maxima of the stem.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
SMALL_MAP = 4  # largest output side, in pixels, that is computed as a product of patches
BLURS_MAXIMA = "convolutions_and_pool"  # the form that blurs behind the maxima of the stem
LEAST_CHANNELS = 16  # of a convolution's input that FFCV and Composer blur: not the image
EVERY_PLATFORM = "every platform"  # of `form_on`: the program chooses the fastest form when it is lowered
# Form by platform; others: "direct". On a CPU, 1x1 convolutions and those over maps of a few pixels are up to 4.5 times as fast
# as products (benchmarks/README.md). Blocks are slower there, and move more bytes in programs for TPUs.
CONVOLUTIONS = {"cpu": "product", "gpu": "cudnn", "tpu": "xla", EVERY_PLATFORM: "by_platform"}


def form_on(platform: str | None = None) -> str:
    """The method of `convolve` for devices of a platform; None: JAX's default backend."""
    return CONVOLUTIONS.get(platform or jax.default_backend(), "direct")


def convolve(images: jax.Array, kernel: jax.Array, stride: int = 1, *, method: str = "direct") -> jax.Array:
    """Cross-correlate, with zero padding of half the kernel on every side.

    images: [B, H, W, C]; kernel: [K, K, C, F], K odd; method: "direct", "xla", "product", "cudnn", or "by_platform", one of
    these by the platform for which the program is compiled. Returns [B, ceil(H / stride), ceil(W / stride), F].
    """
    if method == "by_platform":
        product, cudnn, direct = (partial(convolve, stride=stride, method=form) for form in ("product", "cudnn", "direct"))
        return lax.platform_dependent(images, kernel, cpu=product, cuda=cudnn, default=direct)
    size = len(kernel)
    if method == "cudnn" and size == 1 and stride > 1:
        return _strided(stride, images, kernel)
    if method == "product":
        if size == 1:
            return _product(images[:, ::stride, ::stride, :], kernel[0, 0])
        height, width = (-(-n // stride) for n in images.shape[1:3])
        if max(height, width) <= SMALL_MAP and size == 3:
            return _small_map(images, kernel, stride, out_shape=(height, width))
    if method == "cudnn" and stride == 2 and kernel.shape[:3] == (7, 7, 3) and not any(n % 2 for n in images.shape[1:3]):
        return convolve_by_blocks(images, kernel)
    pad = size // 2
    return lax.conv_general_dilated(images, kernel, (stride, stride), [(pad, pad), (pad, pad)], dimension_numbers=DIMENSIONS)


@jax.jit  # marks it in compiled programs: `jaxdp.xla.kernels` does not count the zeros
def convolve_by_blocks(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """`convolve` with stride 2 as one convolution of 4x4 taps with stride 1 over blocks of 2x2 pixels.

    images: [B, H, W, 3], H and W even; kernel: [7, 7, 3, F]. Blocks begin one pixel outside: cuDNN wants equal padding.
    """
    blocks = _blocks(images, before=1)  # [B, H / 2 + 1, W / 2 + 1, 16]
    taps = _blocks(kernel.transpose(3, 0, 1, 2), before=0)  # [F, 4, 4, 16]
    return lax.conv_general_dilated(blocks, taps, (1, 1), [(1, 1), (1, 1)], dimension_numbers=("NHWC", "OHWI", "NHWC"))


def _blocks(images: jax.Array, before: int) -> jax.Array:
    """2x2 pixels of [B, H, W, 3], behind `before` rows and columns of zeros and before one, as 12 channels and 4 of zeros."""
    padded = jnp.pad(images, ((0, 0), (before, 1), (before, 1), (0, 0)))
    batch, height, width, channels = padded.shape
    blocks = padded.reshape(batch, height // 2, 2, width // 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
    return jnp.pad(blocks.reshape(*blocks.shape[:3], 12), ((0, 0), (0, 0), (0, 0), (0, 4)))


def _product(images: jax.Array, matrix: jax.Array) -> jax.Array:
    """[B, H, W, C] times [C, F] as one two-dimensional product: [B, H, W, F]."""
    return _matmul(images.reshape(-1, images.shape[-1]), matrix).reshape(*images.shape[:-1], matrix.shape[-1])


@jax.custom_vjp
def _matmul(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    return rows @ matrix


def _matmul_backward(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weight gradient is a product or its transpose: the one with the smaller matrix on the left."""
    rows, matrix = residuals
    if matrix.shape[0] <= matrix.shape[1]:
        return cotangent @ matrix.T, rows.T @ cotangent
    return cotangent @ matrix.T, lax.optimization_barrier(cotangent.T @ rows).T  # XLA would undo the transpose otherwise


_matmul.defvjp(lambda rows, matrix: (rows @ matrix, (rows, matrix)), _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _strided(stride: int, images: jax.Array, kernel: jax.Array) -> jax.Array:
    """`convolve` with a 1x1 kernel. The gradient of the images is computed without the zeros between the pixels that it reads.

    XLA inserts them in the kernel that uses the gradient, where cuDNN would write them.
    """
    return convolve(images, kernel, stride)


def _strided_backward(stride: int, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    images, kernel = residuals
    of_kernel = jax.linear_transpose(lambda kernel: convolve(images, kernel, stride), kernel)
    pixels = convolve(cotangent, kernel.swapaxes(2, 3))
    edges = [(0, whole - stride * (read - 1) - 1, stride - 1) for whole, read in zip(images.shape, pixels.shape, strict=True)]
    edges[0] = edges[-1] = (0, 0, 0)
    return lax.pad(pixels, jnp.zeros((), pixels.dtype), edges), *of_kernel(cotangent)


_strided.defvjp(lambda stride, images, kernel: (convolve(images, kernel, stride), (images, kernel)), _strided_backward)


def _used_taps(size: int, stride: int, *, out: int, inside: int) -> list[int]:
    """Kernel rows (or columns) that reach at least one of `inside` real pixels from one of `out` outputs."""
    pad = size // 2
    return [k for k in range(size) if any(0 <= o * stride + k - pad < inside for o in range(out))]


def _small_map(images: jax.Array, kernel: jax.Array, stride: int, *, out_shape: tuple[int, int]) -> jax.Array:
    """Patches times kernel, without the taps that only ever see padding."""
    size, pad = len(kernel), len(kernel) // 2
    height, width = out_shape
    rows = _used_taps(size, stride, out=height, inside=images.shape[1])
    columns = _used_taps(size, stride, out=width, inside=images.shape[2])
    padded = jnp.pad(images, ((0, 0), (pad, pad + stride), (pad, pad + stride), (0, 0)))
    patches = [padded[:, i : i + stride * height : stride, j : j + stride * width : stride, :] for i in rows for j in columns]
    used = kernel[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return _product(jnp.concatenate(patches, axis=-1), used.reshape(-1, kernel.shape[-1]))


def max_pool(images: jax.Array, stride: int) -> jax.Array:
    """3x3 maximum with padding 1: [B, H, W, C] to [B, ceil(H / stride), ceil(W / stride), C].

    The gradient goes to the first maximum of a window.
    """
    strides = (1, stride, stride, 1)
    return lax.reduce_window(images, -jnp.inf, lax.max, (1, 3, 3, 1), strides, [(0, 0), (1, 1), (1, 1), (0, 0)])


def average_pool(images: jax.Array) -> jax.Array:
    """Means of 2x2 pixels, at odd edges of those that exist: [B, H, W, C] to [B, ceil(H / 2), ceil(W / 2), C].

    As AvgPool2d(2, ceil_mode=True, count_include_pad=False) of PyTorch. Computed in float32.
    """
    means = images.astype(jnp.float32)
    for axis in (1, 2):
        size = means.shape[axis]
        even = jnp.pad(means, [(0, size % 2 if n == axis else 0) for n in range(4)], mode="edge")
        first, second = (lax.slice_in_dim(even, k, even.shape[axis], 2, axis) for k in range(2))
        means = 0.5 * (first + second)
    return means.astype(images.dtype)


def blur(images: jax.Array, stride: int) -> jax.Array:
    """Convolve every channel with [1 2 1] x [1 2 1] / 16: [B, H, W, C] to [B, ceil(H / stride), ceil(W / stride), C].

    Zeros surround the image. Computed in float32.
    """
    blurred = images.astype(jnp.float32)
    for axis in (1, 2):
        size = blurred.shape[axis]
        padded = jnp.pad(blurred, [(int(n == axis),) * 2 for n in range(4)])
        # Slices and not a convolution: XLA fuses them with the ReLU before them.
        before, here, after = (lax.slice_in_dim(padded, k, k + size, stride, axis) for k in range(3))
        blurred = 0.25 * (before + after) + 0.5 * here
    return blurred.astype(images.dtype)


def blurs_input(form: str, channels: int, stride: int) -> bool:
    """Whether a form of BlurPool blurs the input, of so many channels, of a convolution with this stride."""
    return form.startswith("convolutions") and stride > 1 and channels >= LEAST_CHANNELS
