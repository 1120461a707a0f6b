"""ResNet v1.5 in Flax linen (He et al., arXiv 1512.03385; stride on the 3x3 convolution, as in torchvision and MLPerf).

Initialization follows Goyal et al. (arXiv 1706.02677, section 5.1): He for convolutions, N(0, 0.01) for the classifier, and a
zero scale in the last batch normalization of each block, so that every block starts as the identity. In a run the modules set
weights to their standard deviations; `jaxdp.models.sample_params` then multiplies all of them by one long normal draw, which
compiles much faster than 54 draws.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.config import BlurPool
from jaxdp.errors import ConfigError, one_of
from jaxdp.models.batch_norm import BatchNormTerm, Fusion, Normalization, OneValue, moments, moments_in_one_reduction
from jaxdp.models.bn_relu import Term, bn_relu, centered_bn_relu, fused_bn_relu, gradient_barrier
from jaxdp.models.bn_relu_max_pool import bn_relu_max_pool
from jaxdp.models.convolution import BLURS_MAXIMA, average_pool, blur, blurs_input, convolve, form_on, max_pool
from jaxdp.models.folded_batch_norm import FoldedTerm, InputMoments, Projection
from jaxdp.models.gated_bn_relu import fused_gated_bn_relu, gated_bn_relu

BLOCKS: dict[int, tuple[int, ...]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
TWO_BLOCKS = 6  # depth of a tiny network for tests and `jaxdp doctor`, which compiles in a second; no validated config has it
BLOCKS[TWO_BLOCKS] = (1, 1)
BOTTLENECK_DEPTHS = (50, 101, 152)
MOST_FOLDED_CHANNELS = 512  # of the input of a folded convolution; with 1,024 its products cost nearly as much as they save
STEMS: dict[str, tuple[str, ...]] = {
    "imagenet": ("conv1", "bn1"),
    "small": ("conv1", "bn1"),
    "deep": ("stem_conv1", "stem_bn1", "stem_conv2", "stem_bn2", "stem_conv3", "bn1"),
}
HEAD = ("fc_kernel", "fc_bias")
CHOICES: dict[str, Iterable[Any]] = {
    "depth": BLOCKS,
    "stem": STEMS,
    "shortcut": ("strided", "pooled"),
    "blur_pool": get_args(BlurPool),
    "convolution": ("direct", "xla", "cudnn", "product", "by_platform", None),
}


def he_std(_: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Standard deviation of He initialization by fan-out for a kernel [K, K, C, F] (He et al., arXiv 1502.01852)."""
    return jnp.full(shape, math.sqrt(2 / (shape[0] * shape[1] * shape[3])), dtype)


def drawn(std: nn.initializers.Initializer) -> nn.initializers.Initializer:
    """An initializer that draws from normal distributions, with standard deviations from the given initializer."""
    return lambda key, shape, dtype: std(key, shape, dtype) * jax.random.normal(key, shape, dtype)


def parameter(module: nn.Module, name: str, init: nn.initializers.Initializer, *, shape: tuple[int, ...]) -> jax.Array:
    """`module.param`, float32. To compare shapes, Flax traces the initializer again, which takes half the time of a trace."""
    stored: Any = module.get_variable("params", name, None)
    return stored if stored is not None and stored.shape == shape else module.param(name, init, shape, jnp.float32)


class Conv(nn.Module):
    """Convolution without bias. size: of the kernel; method: see `jaxdp.models.convolution.convolve`.

    folds: a 1x1 convolution of few channels to more channels is not computed; the `BatchNorm` behind it receives it as a
    `Projection`. blur_pool: form of BlurPool; some forms blur the input.
    """

    features: int
    size: int
    stride: int = 1
    dtype: jax.typing.DTypeLike = jnp.float32
    method: str = "direct"
    folds: bool = False
    blur_pool: str = "none"
    kernel_init: nn.initializers.Initializer = he_std

    @nn.compact
    def __call__(self, x: jax.Array, center: jax.Array | None = None) -> jax.Array | Projection:
        """center: what was subtracted from x for a convolution that folds; see `Projection`."""
        channels = x.shape[-1]
        kernel = parameter(self, "kernel", self.kernel_init, shape=(self.size, self.size, channels, self.features))
        stride = self.stride
        if blurs_input(self.blur_pool, channels, stride):
            x = blur(x, stride if self.size == 1 else 1)  # a 1x1 convolution reads only the pixels of its stride
            stride = 1 if self.size == 1 else stride
        if self.folds_from(channels, rows=x.size // channels // stride**2):
            return Projection(x[:, ::stride, ::stride], kernel[0, 0], center)
        return convolve(x, kernel.astype(self.dtype), stride, method=self.method)

    def folds_from(self, channels: int, rows: int) -> bool:
        """Whether batch normalization is folded into the convolution of an input with so many channels, images and positions.

        With fewer rows than channels, the products of channels with channels cost more than they save.
        """
        return self.folds and self.size == 1 and channels < self.features and channels <= min(rows, MOST_FOLDED_CHANNELS)


class BatchNorm(nn.Module):
    """Batch normalization that reports the moments of its input.

    In training it stores the batch's mean and mean square ([C] float32) in the collection `moments` if that is mutable; the
    training step averages them over workers (images that are normalized together) and updates the moving averages once. Without
    `moments`, or if `batch_stats` is mutable, the module updates the moving averages itself, as Flax does with this momentum.
    Returns a term, because the ReLU behind it computes the output: a `FoldedTerm` of a `Projection`, else a `BatchNormTerm`.
    Raises OneValue in training.
    """

    train: bool
    fusion: Fusion = Fusion()
    custom_vjp: bool = True
    zero_scale: bool = False
    momentum: float = 0.9

    @nn.compact
    def __call__(self, x: jax.Array | Projection) -> Term:
        features = (x.kernel if isinstance(x, Projection) else x).shape[-1:]
        if self.train and not self.is_initializing():
            positions = math.prod((x.h if isinstance(x, Projection) else x).shape[:-1])
            if positions * lax.axis_size(self.fusion.axes) == 1:
                raise OneValue("/".join(self.path))
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        scale = parameter(self, "scale", zeros if self.zero_scale else ones, shape=features)
        bias = parameter(self, "bias", zeros, shape=features)
        mean_ = self.variable("batch_stats", "mean", jnp.zeros, features, jnp.float32)
        var_ = self.variable("batch_stats", "var", jnp.ones, features, jnp.float32)
        if isinstance(x, Projection):
            inputs = InputMoments.of(lax.stop_gradient(x.h))
            kernel = lax.stop_gradient(x.rounded_kernel)
            mean, square = inputs.projected(kernel, self.fusion.axes)
            variance = jnp.maximum(square - mean * mean, 0.0)
            whole = mean + x.projected_center(kernel)
            self._report(whole, variance + whole * whole)
            return FoldedTerm(x, inputs, Normalization(scale, bias, mean, variance))
        if not self.train:
            return BatchNormTerm(x, Normalization(scale, bias, mean_.value, var_.value))
        measure = moments_in_one_reduction if self.custom_vjp and self.fusion.on_accelerator else moments
        mean, square = measure(lax.stop_gradient(x) if self.custom_vjp else x, self.fusion.axes)
        return BatchNormTerm(x, Normalization(scale, bias, *self._report(mean, square)))

    def _report(self, mean: jax.Array, square: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Store the moments, or update the moving averages; return mean and variance."""
        variance = jnp.maximum(square - mean * mean, 0.0)
        if self.is_initializing():
            return mean, variance
        self.sow("moments", "mean", mean, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        self.sow("moments", "square", square, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        if self.is_mutable_collection("batch_stats") or not self.is_mutable_collection("moments"):
            for name, new in (("mean", mean), ("var", variance)):
                old: jax.Array = self.get_variable("batch_stats", name)
                self.put_variable("batch_stats", name, self.momentum * old + (1 - self.momentum) * new)
        return mean, variance


class Block(nn.Module):
    """A residual block, basic or bottleneck. conv, norm, relu: constructors from `ResNet`.

    entry_barrier: at the entry of a stage, the gradient of the first convolution's input is a separate kernel; pools: the
    shortcut averages in place of a stride.
    """

    features: int
    stride: int
    bottleneck: bool
    conv: Callable
    norm: Callable
    relu: Callable
    entry_barrier: bool = False
    pools: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, keep: jax.Array | None = None) -> jax.Array:
        """keep: factor on the branch for each image, see `branch_factor`; None without."""
        if self.bottleneck:
            width = 4 * self.features
            # At the entry of a stage two gradients of x meet. XLA would write one, padded, and add the other in a convolution.
            inner = gradient_barrier(x) if self.entry_barrier and self.stride != 1 else x
            y = self.relu(self.norm(name="bn1")(self.conv(self.features, 1, name="conv1")(inner)))
            middle = self.norm(name="bn2")(self.conv(self.features, 3, self.stride, name="conv2")(y))
            # A factor on the branch needs the convolution's result.
            last = self.conv(width, 1, folds=keep is None, name="conv3")
            if last.folds_from(self.features, rows=middle.x.size // self.features):
                y = last(self.relu(middle, centered=True), middle.norm.center_behind_relu)
            else:
                y = last(self.relu(middle))
            term = self.norm(zero_scale=True, name="bn3")(y)
        else:
            width = self.features
            y = self.relu(self.norm(name="bn1")(self.conv(self.features, 3, self.stride, name="conv1")(x)))
            term = self.norm(zero_scale=True, name="bn2")(self.conv(width, 3, name="conv2")(y))
        if self.stride != 1 or x.shape[-1] != width:
            kind, stride = ("pooled", 1) if self.pools else ("downsample", self.stride)
            entry = average_pool(x) if self.stride != stride else x
            shortcut = self.norm(name=f"{kind}_bn")(self.conv(width, 1, stride, name=f"{kind}_conv")(entry))
            return self.relu(term, shortcut, gate=keep)
        return self.relu(term, shortcut=x, gate=keep)


class ResNet(nn.Module):
    """ResNet v1.5 (He et al., arXiv 1512.03385) as a Flax module.

    `init(key, images, train=False)` returns {"params", "batch_stats"}; `apply(variables, images, train=True,
    mutable=["batch_stats"])` the logits and the running statistics after one more batch. images: [B, H, W, 3], normalized.
    depth: 18, 34, 50, 101 or 152. classes: their number. momentum: of the running statistics; they are of this device's batches
    unless `axes` names the axes of a `shard_map`. draws: False initializes weights to their standard deviations, for
    `sample_params`.

    width: channels of the first ResNet stage; stem: "imagenet" (7x7, max pooling), "deep" (three 3x3, max pooling) or "small"
    (3x3); shortcut: "strided" or "pooled"; "deep" and "pooled" are ResNet-D (He et al., arXiv 1812.01187, section 4); dtype: of
    activations; convolution: "cudnn" for GPUs, "product" for CPUs, "xla" for TPUs, else "direct"; None: by JAX's backend;
    axes: mesh axes of synchronized batch normalization; remat: recompute each block's activations in the backward pass;
    custom_vjp: use the hand-written gradients; folds: fold batch normalization into the 1x1 convolutions before it; drop_path:
    see `branch_factor`; blur_pool: see `jaxdp.models.convolution`; classifier_bias: its initial value.
    """

    depth: int
    classes: int
    width: int = 64
    stem: str = "imagenet"
    shortcut: str = "strided"
    dtype: jax.typing.DTypeLike = jnp.float32
    convolution: str | None = None
    axes: tuple[str, ...] = ()
    remat: bool = False
    custom_vjp: bool = True
    folds: bool = False
    blur_pool: str = "none"
    classifier_bias: float = 0.0
    drop_path: float = 0.0
    momentum: float = 0.9
    draws: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError for an unknown name, and for a number out of range."""
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                raise one_of(field, getattr(self, field), choices)
        for field in ("classes", "width"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), reason="must be at least 1")
        for field in ("momentum", "drop_path"):
            if not 0 <= getattr(self, field) <= 1:
                raise ConfigError(field, getattr(self, field), reason="must be from 0 to 1")
        super().__post_init__()

    @property
    def segments(self) -> tuple[tuple[str, ...], ...]:
        """Parameter names of each segment in forward order: the stem, every block, the head."""
        return STEMS[self.stem], *((name,) for name, _, _ in self._blocks), HEAD

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
    def __call__(
        self, x: jax.Array, train: bool, *, segment: tuple[str, ...] | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        """Logits [B, classes] float32 of images [B, H, W, 3]; with `segment`, the output of that segment for its input x.

        key: of drop-path in training; one for the batch, or [B], one for each image.
        """
        convolution = self.convolution or form_on()
        fusion = Fusion(self.axes, convolution)
        fused = train and self.custom_vjp

        def weights(std: nn.initializers.Initializer) -> nn.initializers.Initializer:
            return drawn(std) if self.draws else std

        def conv(features: int, size: int, stride: int = 1, *, name: str, folds: bool = True) -> Conv:
            folds = folds and train and self.folds
            form = (self.dtype, convolution, folds, self.blur_pool, weights(he_std))
            return Conv(features, size, stride, *form, name=name)

        def norm(*, zero_scale: bool = False, name: str) -> BatchNorm:
            return BatchNorm(train, fusion, self.custom_vjp, zero_scale, self.momentum, name=name)

        def relu(
            *terms: Term, shortcut: jax.Array | None = None, gate: jax.Array | None = None, centered: bool = False
        ) -> jax.Array:
            if centered:
                return centered_bn_relu(fusion, terms[0])
            if gate is not None:
                return fused_gated_bn_relu(fusion, terms, gate, shortcut) if fused else gated_bn_relu(terms, gate, shortcut)
            return fused_bn_relu(fusion, terms, shortcut) if fused else bn_relu(terms, shortcut)

        def stem(images: jax.Array) -> jax.Array:
            x = images.astype(self.dtype)
            if self.stem == "deep":
                x = relu(norm(name="stem_bn1")(conv(self.width // 2, 3, 2, name="stem_conv1")(x)))
                x = relu(norm(name="stem_bn2")(conv(self.width // 2, 3, name="stem_conv2")(x)))
            size, stride = (7, 2) if self.stem == "imagenet" else (3, 1)
            term = norm(name="bn1")(conv(self.width, size, stride, name=STEMS[self.stem][-2])(x))
            if self.stem == "small":
                return relu(term)
            blurs = self.blur_pool == BLURS_MAXIMA
            stride = 1 if blurs else 2
            merged = fused and convolution != "xla"  # a TPU would read the map nine times, and has an operation for pooling
            maxima = bn_relu_max_pool(fusion, stride, term) if merged else max_pool(relu(term), stride)
            return blur(maxima, 2) if blurs else maxima

        def head(x: jax.Array) -> jax.Array:
            x = x.astype(jnp.float32).mean((1, 2))
            kernel_init = weights(nn.initializers.constant(0.01))
            kernel = parameter(self, "fc_kernel", kernel_init, shape=(x.shape[-1], self.classes))
            bias = parameter(self, "fc_bias", nn.initializers.constant(self.classifier_bias), shape=(self.classes,))
            return jnp.dot(x.astype(self.dtype), kernel.astype(self.dtype), preferred_element_type=jnp.float32) + bias

        def keeps(number: int) -> tuple[jax.Array, ...]:
            rate = block_rate(self.drop_path, number, len(self._blocks))
            if not (train and rate):
                return ()
            if key is None:
                raise ValueError("drop-path needs a key in training")
            keys = key if key.ndim else jax.random.split(key, len(x))
            return (branch_factor(keys, rate, number),)

        if segment in (None, STEMS[self.stem]):
            x = stem(x)
        block_type = nn.remat(Block) if self.remat else Block
        build = partial(
            block_type,
            bottleneck=self.depth in BOTTLENECK_DEPTHS,
            conv=conv,
            norm=norm,
            relu=relu,
            entry_barrier=self.folds or convolution == "cudnn",
            pools=self.shortcut == "pooled",
        )
        for number, (name, features, stride) in enumerate(self._blocks):
            if segment in (None, (name,)):
                x = build(features, stride, name=name)(x, *keeps(number))
        return head(x) if segment in (None, HEAD) else x


def block_rate(rate: float, block: int, blocks: int) -> float:
    """The probability with which images skip the branch of a block, counted from 0, as in timm. rate: for the last block.

    The paper on drop-path divides by `blocks` instead.
    """
    return rate * block / (blocks - 1)


def branch_factor(keys: jax.Array, rate: float, block: int) -> jax.Array:
    """Drop-path (Huang et al., arXiv 1603.09382): 0 with probability `rate`, else 1 / (1 - rate), for each image of a block.

    Returns [B, 1, 1, 1] float32, whose mean is 1. keys: [B], of the images; block: its number, which makes draws of blocks
    independent. As in timm, each image is drawn by itself and branches are scaled in training. The paper (section 3) draws once
    for a mini-batch and multiplies the branch in evaluation instead.
    """
    uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, block), dtype=jnp.float32))(keys)
    return jnp.where(uniform < rate, 0.0, jnp.float32(1 / (1 - rate)))[:, None, None, None]
