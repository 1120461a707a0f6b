"""ResNet v1.5 in Flax linen (He et al., arXiv 1512.03385; stride on the 3x3 convolution, as torchvision and MLPerf have it).

Initialisation follows Goyal et al. (arXiv 1706.02677, section 5.1): He for convolutions, N(0, 0.01) for the classifier, and
a zero scale in the last batch normalisation of each block, so that every block starts as the identity. The modules give the
standard deviation of each weight; `jaxdp.models.Model.init` multiplies it by one long draw of unit normals, which compiles
much faster than 54 draws.
"""

import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax

from jaxdp.models.convolution import convolve, max_pool
from jaxdp.models.normalization import Normalised, moments, relu_of_sum, trained_relu_of_sum

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
TWO_BLOCKS = 6  # a depth for proofs and tests alone, which no validated config has: it compiles in a second
BLOCKS[TWO_BLOCKS] = (1, 1)
BOTTLENECK_DEPTHS = (50, 101, 152)
STEM, HEAD = ("conv1", "bn1"), ("fc_kernel", "fc_bias")


def he_spread(_, shape, dtype):
    """Standard deviation of He's initialisation by fan-out, for a kernel [K, K, C, F] (He et al., arXiv 1502.01852)."""
    return jnp.full(shape, math.sqrt(2 / (shape[0] * shape[1] * shape[3])), dtype)


class Conv(nn.Module):
    features: int
    size: int
    stride: int = 1
    dtype: Any = jnp.float32
    form: str = "direct"

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", he_spread, (self.size, self.size, x.shape[-1], self.features), jnp.float32)
        return convolve(x, kernel.astype(self.dtype), self.stride, self.form)


class BatchNorm(nn.Module):
    """Batch normalisation that reports its raw moments instead of updating a moving average.

    In training the batch's mean and squared mean (float32, [C]) are stored in the collection `moments`; the caller averages
    them over workers and makes one moving-average update (`jaxdp.training.step`). `axes` names the mesh axes over which the
    statistics are synchronised; empty means per worker. Returns what is to be normalised, a `Normalised`.
    """

    train: bool
    axes: tuple[str, ...] = ()
    own_gradients: bool = True
    zero_scale: bool = False

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1:]
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        scale = self.param("scale", zeros if self.zero_scale else ones, features, jnp.float32)
        bias = self.param("bias", zeros, features, jnp.float32)
        mean_ = self.variable("batch_stats", "mean", jnp.zeros, features, jnp.float32)
        var_ = self.variable("batch_stats", "var", jnp.ones, features, jnp.float32)
        if not self.train:
            return Normalised(x, scale, bias, mean_.value, var_.value)
        mean, square = moments(lax.stop_gradient(x) if self.own_gradients else x, self.axes)
        self.sow("moments", "mean", mean, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        self.sow("moments", "square", square, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        return Normalised(x, scale, bias, mean, jnp.maximum(square - mean * mean, 0.0))


class Block(nn.Module):
    features: int
    stride: int
    bottleneck: bool
    conv: Any
    norm: Any
    relu: Any

    @nn.compact
    def __call__(self, x):
        if self.bottleneck:
            width = 4 * self.features
            y = self.relu(self.norm(name="bn1")(self.conv(self.features, 1, name="conv1")(x)))
            y = self.relu(self.norm(name="bn2")(self.conv(self.features, 3, self.stride, name="conv2")(y)))
            y = self.norm(zero_scale=True, name="bn3")(self.conv(width, 1, name="conv3")(y))
        else:
            width = self.features
            y = self.relu(self.norm(name="bn1")(self.conv(self.features, 3, self.stride, name="conv1")(x)))
            y = self.norm(zero_scale=True, name="bn2")(self.conv(width, 3, name="conv2")(y))
        if self.stride != 1 or x.shape[-1] != width:
            return self.relu(y, self.norm(name="downsample_bn")(self.conv(width, 1, self.stride, name="downsample_conv")(x)))
        return self.relu(y, shortcut=x)


class ResNet(nn.Module):
    depth: int
    classes: int
    width: int = 64
    stem: str = "imagenet"
    dtype: Any = jnp.float32
    form: str = "direct"
    axes: tuple[str, ...] = ()
    remat: bool = False
    own_gradients: bool = True

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each part, in the order in which images pass: the stem, every block, the head."""
        return STEM, *((name,) for name, _, _ in self._blocks), HEAD

    @property
    def _blocks(self) -> list[tuple[str, int, int]]:
        """(name, features, stride) of every block."""
        stages = enumerate(BLOCKS[self.depth])
        return [
            (f"layer{stage + 1}_{block}", self.width * 2**stage, 2 if stage and not block else 1)
            for stage, blocks in stages
            for block in range(blocks)
        ]

    @nn.compact
    def __call__(self, x, train: bool, part: tuple[str, ...] | None = None):
        """Images to logits; part: one of `parts` alone, from what the one before it returns."""

        def conv(features, size, stride=1, name=None):
            return Conv(features, size, stride, self.dtype, self.form, name=name)

        def norm(zero_scale=False, name=None):
            return BatchNorm(train, self.axes, self.own_gradients, zero_scale, name=name)

        def relu(*terms, shortcut=None):
            if train and self.own_gradients:
                return trained_relu_of_sum(self.axes, self.form, terms, shortcut)
            return relu_of_sum(terms, shortcut)

        def stem(images):
            images = images.astype(self.dtype)
            if self.stem == "imagenet":
                x = relu(norm(name="bn1")(conv(self.width, 7, 2, name="conv1")(images)))
                return max_pool(x, self.own_gradients)
            return relu(norm(name="bn1")(conv(self.width, 3, name="conv1")(images)))

        def head(x):
            x = x.astype(jnp.float32).mean((1, 2))
            kernel = self.param("fc_kernel", nn.initializers.constant(0.01), (x.shape[-1], self.classes), jnp.float32)
            bias = self.param("fc_bias", nn.initializers.zeros, (self.classes,), jnp.float32)
            return jnp.dot(x.astype(self.dtype), kernel.astype(self.dtype), preferred_element_type=jnp.float32) + bias

        if part in (None, STEM):
            x = stem(x)
        block_type = nn.remat(Block) if self.remat else Block
        for name, features, stride in self._blocks:
            if part in (None, (name,)):
                x = block_type(features, stride, self.depth in BOTTLENECK_DEPTHS, conv, norm, relu, name=name)(x)
        return head(x) if part in (None, HEAD) else x
