"""The configuration of a run: frozen dataclasses, without JAX. `validation.py` checks their values.

The text below a field is its help in `jaxdp train --help all`. Fields whose values have names take types and help from the
tables in `choices.py`; the section `schedule` stands in `schedules.py`. The fields that only some choices read are a record,
such as `Lars`, from which their section inherits. The tables at the end of the sections name the record of each choice.
"""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import Doc

from jaxdp import metrics
from jaxdp.choices import AUGMENTATIONS, AUTO_AUGMENTS, LOSSES, MIXES, OPTIMIZERS, SOURCES, TASKS
from jaxdp.errors import ConfigError as ConfigError
from jaxdp.fields import (
    LARGEST,
    SMALLEST,
    Bytes,
    Count,
    FromList,
    Minutes,
    NonNegative,
    OneOrMore,
    Positive,
    RegisteredName,
    Section,
)
from jaxdp.metrics import METRICS
from jaxdp.registry import OneOf
from jaxdp.schedules import MOMENTUM_RULES
from jaxdp.schedules import Schedule as Schedule
from jaxdp.strategies import STRATEGIES

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-100, 2.0**100  # of the loss, well within float32
BELOW_ONE = 0.9999999  # in float32 too
BelowOne = Annotated[float, Field(ge=0, le=BELOW_ONE)]
LARGEST_LEVEL = 10.0  # magnitude of rand_augment_increasing
RESNET = "resnet"  # the built-in model
MAX_CLASSES = 1_000_000
StrategyName = Annotated[
    RegisteredName,
    Doc(
        f"All-reduce algorithm. {STRATEGIES.help}; or a name registered with `jaxdp.register_strategy`. "
        "`jaxdp bench allreduce` measures which is the fastest"
    ),
]
AutoAugmentName = Annotated[RegisteredName, Doc(f"Policy of random operations on the pixels of the crop. {AUTO_AUGMENTS.help}")]
SourceName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_./:-]+$"),
    Doc(f"Data set: {', '.join(SOURCES.entries)}, or one of tensorflow-datasets. {SOURCES.help}"),
]

LARGEST_IMAGE, MOST_PIXELS = 4096, 2**16  # side of images of the network, and of images that are resized to
JITTERED = ("brightness", "contrast", "saturation", "hue")  # parts of augment.color_jitter
ImageSize = Annotated[int, Field(ge=8, le=LARGEST_IMAGE)]
Interpolation = Literal["bilinear", "bicubic", "area"]
BlurPool = Literal["none", "convolutions", "convolutions_and_pool"]
Stem = Literal["imagenet", "deep", "small"]


@dataclass(frozen=True, kw_only=True)
class EvalResize(Section):
    """Resize of images for evaluation."""

    eval_size: ImageSize | None = None
    """Height and width of evaluated images, in pixels (None: `image_size`)"""
    eval_resize: int | float | None = None
    """Short side that evaluated images are resized to before the center crop, in pixels; or, up to 1, the crop ratio: the
    evaluated size divided by it, rounded down (None: 8/7 of the evaluated size after training on random crops or with a larger
    `stored_size`, else the evaluated size)"""
    eval_interpolation: Interpolation | None = None
    """Filter that resizes evaluated images (None: bilinear). bilinear, bicubic: antialiased as in Pillow; area: OpenCV's, which
    resizes the center crop (FFCV)"""


@dataclass(frozen=True, kw_only=True)
class Preprocessing(EvalResize):
    """Preparation of images for evaluation, and their normalization; of weights, what is not given is as in their file."""

    mean: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], FromList] = ()
    """Mean of red, green and blue for normalization; white is 1 (empty: the data set's)"""
    std: Annotated[tuple[Annotated[float, Field(ge=1e-3, le=1)], ...], FromList] = ()
    """Standard deviation of red, green and blue for normalization; white is 1 (empty: the data set's)"""


@dataclass(frozen=True, kw_only=True)
class Splits(Section):
    """Parts of a data set."""

    train_split: str = "train"
    """Training split; for prepared data sets also a slice, such as train[:10%]; for digits train, or fit to hold out the
    validation split for tuning"""
    eval_split: str | None = None
    """Evaluation split (None: val, validation or test, whichever exists); for digits test or validation"""


@dataclass(frozen=True, kw_only=True)
class OnDisk(Splits, EvalResize):
    """Images of any size that are read and decoded in the background."""

    directory: str | None = None
    """Directory of the image folder or of the prepared data sets (None: ~/tensorflow_datasets); for file its path"""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of decoding threads (None: one per core)"""
    holdout: BelowOne = 0.0
    """Share of the images of each class to hold out, chosen by hashes of their names, of data with training images alone"""


@dataclass(frozen=True, kw_only=True)
class InFile(OnDisk):
    """Columns of a table."""

    image_column: str | None = None
    """Column of the images or their paths (file; None: image, img, path, file, file_name or filename)"""
    label_column: Annotated[tuple[str, ...], OneOrMore] = ()
    """Column of the labels, or several columns of 0 and 1 for task labels (file; empty: label or class)"""
    label_separator: str | None = None
    """Separator of the names of several labels in the column, such as ; (file, for task labels; None: one label)"""


@dataclass(frozen=True, kw_only=True)
class Synthetic(Section):
    """Numbers of synthetic images."""

    train_examples: Count = 4096
    """Number of training images (synthetic)"""
    eval_examples: Count = 1000
    """Number of evaluation images (synthetic)"""


@dataclass(frozen=True, kw_only=True)
class Mixed(Section):
    """Blending of images."""

    mix_alpha: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """Parameter of the distribution Beta(alpha, alpha) of the mixing ratio, sampled once per worker's batch (mixup_or_cutmix:
    for mixup; cutmix has 1)"""


@dataclass(frozen=True)
class Data(InFile, Synthetic, Mixed, Preprocessing):
    """Data set, decoding and augmentation."""

    source: SourceName = "digits"
    on_bad_image: Literal["stop", "skip"] = "stop"
    """Action on an image that cannot be read. stop: fail and name it; skip: use the next image, count it and list it at the
    end"""
    image_size: ImageSize = 32
    """Height and width of the network's input, in pixels"""
    stored_size: ImageSize | None = None
    """Height and width of the images transferred to the device, in pixels, from which `paper` crops (None: `image_size`)"""
    augmentation: Annotated[str, OneOf(AUGMENTATIONS)] = "none"
    """Random transform of training images"""
    auto_augment: AutoAugmentName = "none"
    sampling: Literal["shuffle", "balanced", "weights"] = "shuffle"
    """Order of the training images. shuffle: each once an epoch; with replacement, as many an epoch: balanced: each class
    equally often; weights: in proportion to the attribute `weights` of data given in Python"""
    repeats: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of times that a batch contains each of its images, differently augmented (Hoffer et al.)"""
    mix: Annotated[str, OneOf(MIXES)] = "none"
    """Blending of each image with another of its worker's batch"""

    def check(self) -> None:
        """The resize for evaluation is a short side or a crop ratio, normalization is for three channels, held-out images
        have one source, and copies are of images that are shuffled."""
        if self.holdout and self.eval_split is not None:
            reason = f"not used with data.eval_split={self.eval_split!r}"
            raise ConfigError("data.holdout", self.holdout, reason=reason, hint="use --data.holdout 0, or omit the split")
        if self.sampling != "shuffle" and self.repeats > 1:
            reason = f"not used with data.repeats={self.repeats}"
            raise ConfigError("data.sampling", self.sampling, reason=reason, hint="omit it")
        size, resize = self.evaluated_size, self.eval_resize
        if resize is not None and not (0.1 <= resize <= 1 or (isinstance(resize, int) and 8 <= resize <= MOST_PIXELS)):
            reason = f"must be a crop ratio from 0.1 to 1, or a whole number of pixels from 8 to {MOST_PIXELS}"
            raise ConfigError("data.eval_resize", resize, reason=reason, hint="for example 0.875, or 256 for 224 pixels")
        if self.eval_interpolation == "area" and resize is not None and resize > 1 and not 0.1 <= size / resize <= 1:
            reason = f"must be 1 to 10 times the evaluated size ({size}) with area, which resizes the center crop"
            raise ConfigError("data.eval_resize", resize, reason=reason, hint="use --data.eval-resize 0.875")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (0, 3):
                hint = f"for example --data.{name} 0.5 0.5 0.5"
                raise ConfigError(f"data.{name}", values, reason="must be three numbers: red, green, blue", hint=hint)

    @property
    def sets_evaluation(self) -> bool:
        """Whether a field sets how images are prepared for evaluation."""
        given = (self.eval_size, self.eval_resize)
        return any(value is not None for value in given) or self.eval_filter != "bilinear"

    @property
    def eval_filter(self) -> Interpolation:
        """`eval_interpolation` with its default."""
        return self.eval_interpolation or "bilinear"

    @property
    def evaluated_size(self) -> int:
        """Height and width of the network's input in evaluation, in pixels."""
        return self.eval_size or self.image_size

    @property
    def evaluation_side(self) -> int:
        """Short side that evaluated images are resized to, in pixels. A crop ratio is converted as in timm."""
        if self.eval_resize is not None:
            is_ratio = self.eval_resize <= 1
            return math.floor(self.evaluated_size / self.eval_resize) if is_ratio else int(self.eval_resize)
        trained_on_crops = self.crops_while_loading or self.stored_size not in (None, self.image_size)
        return round(self.evaluated_size * 8 / 7) if trained_on_crops else self.evaluated_size

    @property
    def evaluation_share(self) -> float:
        """Side of the center crop of evaluated images as a share of the short side, before the resize."""
        resize = self.eval_resize
        return resize if resize is not None and resize <= 1 else self.evaluated_size / self.evaluation_side

    @property
    def crops_while_loading(self) -> bool:
        """Whether random crops are taken while images are decoded, rather than on the device."""
        return self.augmentation == "random_resized_crop" and not SOURCES[self.source].in_memory


@dataclass(frozen=True, kw_only=True)
class GivenNetwork(Section):
    """What a file of weights may not state about its network."""

    blur_pool: BlurPool = "none"
    """BlurPool: a filter where maps shrink, against aliasing. convolutions: before strided convolutions, as FFCV's;
    convolutions_and_pool: also behind the maxima of the stem, as MosaicML Composer's"""


@dataclass(frozen=True, kw_only=True)
class Flip(Section):
    """Flip of training images."""

    flip: bool = True
    """Left-right flip with probability one half"""


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop(Flip):
    """Crop of random area and aspect ratio."""

    min_area: Annotated[float, Field(ge=1e-6, le=1)] = 0.08
    """Smallest fraction of the image area in a crop (random_resized_crop)"""
    crop_interpolation: Literal["unfiltered", "bilinear", "bicubic", "random", "area"] = "unfiltered"
    """Resize of a crop while decoding (random_resized_crop). unfiltered: bilinear without antialiasing, the fastest; bilinear,
    bicubic: antialiased as in Pillow; random: one of these two for each image; area: mean over the area, OpenCV's (FFCV)"""


@dataclass(frozen=True, kw_only=True)
class TrivialAugment(Section):
    """Random operations on the pixels."""

    operation_interpolation: Literal["nearest", "bilinear", "bicubic", "random"] | None = None
    """Interpolation of rotations, shears and shifts of `auto_augment`; random: bilinear or bicubic for each, as in timm;
    torchvision's policies have one for all (None: random for rand_augment_increasing, else nearest)"""


@dataclass(frozen=True, kw_only=True)
class RandAugment(TrivialAugment):
    """Random operations of one magnitude."""

    magnitude: Annotated[float, Field(ge=0, le=30)] | None = None
    """Magnitude of the operations (None: that published). rand_augment: a whole number up to 30, 9 published;
    rand_augment_increasing: the mean, up to 10, 7 published"""


@dataclass(frozen=True)
class Augment(RandAugment, RandomResizedCrop):
    """Random transforms of the pixels of training images."""

    color_jitter: Annotated[tuple[Annotated[float, Field(ge=0, le=10)], ...], FromList] = ()
    """Largest changes of brightness, contrast and saturation, as shares in either direction, and largest turn of the hue, at
    most 0.5, as in torchvision's ColorJitter (empty, or 0: none)"""
    erase_probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability of erasing a random rectangle of the image, of 0.02 to 0.33 of its area: it gets the mean of the data set"""

    def check(self) -> None:
        """Color jitter has four parts."""
        if len(self.color_jitter) > len(JITTERED):
            reason = f"must be at most four numbers: {', '.join(JITTERED)}"
            hint = "for example --augment.color-jitter 0.4 0.4 0.4 0.1"
            raise ConfigError("augment.color_jitter", self.color_jitter, reason=reason, hint=hint)
        if (hue := self.jitter_strengths.get("hue", 0.0)) > 0.5:
            raise ConfigError("augment.color_jitter", self.color_jitter, reason=f"the hue ({hue:g}) must be at most 0.5")

    @property
    def jitter_strengths(self) -> dict[str, float]:
        """Name -> strength of the parts of color jitter that are not off."""
        return {name: strength for name, strength in zip(JITTERED, self.color_jitter, strict=False) if strength}


@dataclass(frozen=True)
class Model(GivenNetwork):
    """Network architecture and precision."""

    name: RegisteredName = RESNET
    """Name of the network: resnet, or a name registered with `jaxdp.register_model`, whose function receives these fields"""
    depth: Literal[18, 34, 50, 101, 152] = 50
    """Number of layers of the ResNet v1.5"""
    width: Annotated[int, Field(ge=1, le=4096)] = 64
    """Number of channels of the first ResNet stage (published network: 64)"""
    stem: Stem = "imagenet"
    """First layers. imagenet: 7x7 convolution with stride 2, max pooling; deep: three 3x3 convolutions in its place, as in
    timm's resnet50d; small: 3x3 convolution with stride 1"""
    shortcut: Literal["strided", "pooled"] = "strided"
    """Shortcut where maps shrink. strided: 1x1 convolution with stride 2; pooled: 2x2 average pooling before it, as in timm's
    resnet50d"""
    classes: Annotated[int, Field(ge=1, le=MAX_CLASSES)] | None = None
    """Number of classes, or of the values that a registered task predicts (None: the data set's, or the task's)"""
    classifier_bias: Literal["zero", "class_frequency"] = "zero"
    """Initial bias of the classifier. class_frequency: -ln(classes), so that a binary loss starts from equally frequent
    classes"""
    drop_path: BelowOne = 0.0
    """Stochastic depth: probability that an image skips the last block's branch in training; it rises from 0 over the
    blocks before"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of activations and of weights in computations; parameters and batch statistics stay float32. float16 requires
    `optimizer.loss_scale`"""
    norm: Literal["per_worker", "synchronized"] = "per_worker"
    """Batch of batch normalization: each worker's (see docs/recipes.md), as in the paper, or all devices'"""
    norm_momentum: BelowOne = 0.9
    """Decay per step of the moving averages of batch statistics (mean and variance of batch normalization), which evaluation
    uses; 0: the statistics of the last training batch over all workers"""
    remat: bool = False
    """Recomputation of each block's activations in the backward pass, to save memory"""
    batch_norm: Literal["auto", "separate", "folded"] = "auto"
    """Batch normalization behind 1x1 convolutions in training. separate: of the convolution's result; folded: into its kernel,
    which moves less memory and is not yet measured on a GPU (see docs/performance.md); auto: separate"""

    def check(self) -> None:
        """The stem's pooling is blurred where there is one, and a deep stem begins with half its channels."""
        if self.blur_pool == "convolutions_and_pool" and self.stem == "small":
            reason = "model.stem='small' has no max pooling"
            raise ConfigError("model.blur_pool", self.blur_pool, reason=reason, hint="use --model.blur-pool convolutions")
        if self.stem == "deep" and self.width % 2:
            reason = "must be even with model.stem='deep', whose first convolutions have half the channels"
            raise ConfigError("model.width", self.width, reason=reason)

    @property
    def title(self) -> str:
        """The display name of the network."""
        if self.name != RESNET:
            return self.name
        blur = "" if self.blur_pool == "none" else f" with BlurPool ({self.blur_pool.replace('_', ' ')})"
        form = {("deep", "strided"): "-C", ("deep", "pooled"): "-D"}.get((self.stem, self.shortcut), "")
        return f"ResNet-{self.depth}{form}{blur}"

    @property
    def resolved_batch_norm(self) -> str:
        """`batch_norm` with auto replaced by the form that it selects."""
        return "separate" if self.batch_norm == "auto" else self.batch_norm

    @property
    def class_count(self) -> int:
        """The number of classes. Raises ConfigError while it is None, before the data set is opened."""
        if self.classes is None:
            reason = "the number of classes is not known before the data set is opened"
            raise ConfigError("model.classes", None, reason=reason, hint="give it, for example --model.classes 10")
        return self.classes


@dataclass(frozen=True)
class Phase(Section):
    """A phase: a part of training with one batch size and one image size."""

    global_batch: Count = 256
    """Number of images per step on all devices"""
    until_epoch: Positive | None = None
    """End of the phase, in epochs from the start of the run (None: the end of the run, for the last phase)"""
    per_worker_batch: Count | None = None
    """Number of images per worker, the batch of batch normalization (ghost batch). Devices accumulate the gradients of several
    workers (None: one worker per device)"""
    image_size: ImageSize | None = None
    """Height and width of the phase's training images, in pixels (None: data.image_size, which evaluation keeps)"""


@dataclass(frozen=True)
class EveryOptimizer(Section):
    """What every optimizer reads."""

    name: Annotated[RegisteredName, Doc(f"Update rule. {OPTIMIZERS.help}")] = "lars"
    momentum: BelowOne = 0.9
    """Momentum coefficient; decay per step of the accumulated gradient (lars, sgd) or of the averaged one (others: beta1)"""
    momentum_rule: Annotated[str, OneOf(MOMENTUM_RULES)] = "constant"
    """Momentum as a function of the global batch, with `momentum` at 32768 images"""
    weight_decay: NonNegative = 1e-4
    """Weight decay, added to the gradient (lars, sgd) or the update (others); not applied to biases and normalization,
    unless `adapt` is all"""

    def check(self) -> None:
        """The momentum rules assume that the effective rate is learning rate / (1 - momentum)."""
        if self.momentum_rule != "constant" and not OPTIMIZERS[self.name].accumulates:
            reason = f"not possible with optimizer.name={self.name!r}, whose momentum does not change the effective rate"
            raise ConfigError("optimizer.momentum_rule", self.momentum_rule, reason=reason, hint="use constant")


@dataclass(frozen=True, kw_only=True)
class Sgd(EveryOptimizer):
    """Stochastic gradient descent with momentum."""

    nesterov: bool = False
    """Nesterov momentum (lars, sgd)"""


@dataclass(frozen=True, kw_only=True)
class Lars(Sgd):
    """Layer-wise adaptive rate scaling."""

    trust_coefficient: Positive = 0.001
    """LARS coefficient (eta): factor on the trust ratio |w| / (|g| + decay |w|) (lars)"""
    eps: NonNegative = 1e-6
    """Constant in the denominator of the trust ratio (lars)"""
    adapt: Literal["weights", "all"] = "weights"
    """Tensors with trust ratio and weight decay (lars). weights: not biases and normalization (TensorFlow, MLPerf); all:
    every tensor (nnabla)"""


@dataclass(frozen=True, kw_only=True)
class Adam(EveryOptimizer):
    """Fields of AdamW and its variants."""

    beta2: BelowOne = 0.999
    """Decay per step of the average of squared gradients (adamw and its variants, such as lamb)"""


@dataclass(frozen=True, kw_only=True)
class BinaryLoss(Section):
    """Binary cross entropy."""

    target_threshold: BelowOne | None = None
    """Smoothed and mixed targets above it become 1, others 0 (binary, binary_sum, registered losses; None: they stay)"""


@dataclass(frozen=True)
class Group(Section):
    """A parameter group: factors of the parameters whose paths a pattern matches; `fc:rate=10,decay=0` as text.

    pattern: regular expression, searched in paths such as layer1_0/conv1/kernel. rate: factor on the learning rate. decay:
    factor on weight decay (None: 1 for tensors that decay without the group, else 0).
    """

    pattern: Annotated[str, Field(min_length=1)]
    rate: NonNegative = 1.0
    decay: NonNegative | None = None

    def __str__(self) -> str:
        given = {"rate": self.rate} | ({} if self.decay is None else {"decay": self.decay})
        return f"{self.pattern}:{','.join(f'{name}={factor:g}' for name, factor in given.items())}"

    @classmethod
    def from_text(cls, text: str, field: str) -> "Group":
        """The group of a text. Raises ConfigError, of `field`, for any other text."""
        pattern, _, text_of_factors = text.rpartition(":")
        try:
            factors = [part.split("=") for part in text_of_factors.split(",")]
            given = {name: float(factor) for name, factor in factors}
            if len(given) < len(factors):
                raise ValueError
            return cls(pattern, **given)
        except (TypeError, ValueError):
            hint = "for example 'fc:rate=10' or 'bias|scale:decay=0'"
            raise ConfigError(
                field, text, reason="must be PATTERN:rate=FACTOR,decay=FACTOR, or one of the two", hint=hint
            ) from None


@dataclass(frozen=True)
class Optimizer(BinaryLoss, Lars, Adam):
    """Parameter updates and regularization."""

    loss: Annotated[RegisteredName, Doc(f"Loss. {LOSSES.help}")] = "softmax"
    class_weights: Annotated[tuple[float, ...] | Literal["balanced"], FromList] = ()
    """A number for each class, its factor in the training loss as `weight` of PyTorch's cross_entropy (softmax), or for each
    label of the task labels, the factor of its positive targets as `pos_weight` (binary, binary_sum). balanced: images /
    (classes * images of the class), or images without the label / images with it, from the training labels (empty: none)"""
    groups: Annotated[tuple[Group, ...], FromList] = ()
    """Parameter groups, such as 'fc:rate=10' 'bias|scale:decay=0': factors on learning rate and weight decay of the parameters
    in whose paths the regular expression is found. The first group that matches applies. A decay factor also makes biases and
    normalization decay. `jaxdp plan --parameters` lists the paths (empty: none)"""
    label_smoothing: BelowOne = 0.0
    """Fraction of the target distributed evenly over all classes"""
    loss_scale: Literal["none", "dynamic"] | float = "none"
    """Factor on the loss that prevents underflow of float16 gradients, which are divided by it: a fixed number, or dynamic:
    halved when a gradient is not finite, and the step skipped; doubled after 2,000 finite steps"""
    clip_norm: Positive | None = None
    """Largest norm of the gradient; larger gradients are scaled down (None: no clipping)"""
    average_decay: BelowOne | None = None
    """Decay per step of an exponential moving average of parameters and batch statistics, used in evaluation (None: no
    averaging)"""
    average_start: Literal["unbiased", "initial", "warmup"] = "unbiased"
    """Start of the average. unbiased: all steps, their weights divided by the sum of these weights; initial: the values of
    the first step, as in timm; warmup: these, with the decay 1 - 1 / step^(2/3) until it is `average_decay`, as in timm"""

    def check(self) -> None:
        """Class weights and a fixed loss scale are positive; the start of an average is not given without an average; patterns
        of groups are regular expressions."""
        super().check()
        for group in self.groups:
            try:
                re.compile(group.pattern)
            except re.error as error:
                reason, hint = f"{group.pattern!r} is no regular expression: {error}", r"write a literal ( as \("
                raise ConfigError("optimizer.groups", str(group), reason=reason, hint=hint) from None
        if self.average_start != Optimizer.average_start and self.average_decay is None:
            reason, hint = "not used without optimizer.average_decay", "omit it, or use --optimizer.average-decay 0.9999"
            raise ConfigError("optimizer.average_start", self.average_start, reason=reason, hint=hint)
        if isinstance(self.loss_scale, float) and not SMALLEST_SCALE <= self.loss_scale <= LARGEST_SCALE:
            reason = "must be none, dynamic or a number from 2^-100 to 2^100"
            raise ConfigError("optimizer.loss_scale", self.loss_scale, reason=reason, hint="use dynamic")
        if self.class_weights != "balanced" and not all(SMALLEST <= weight <= LARGEST for weight in self.class_weights):
            hint = "give one number for each class, or balanced"
            raise ConfigError("optimizer.class_weights", self.class_weights, reason="must be greater than 0", hint=hint)


@dataclass(frozen=True)
class Finetune(Section):
    """Training from pretrained weights."""

    weights: str | None = None
    """Safetensors file with the initial weights: of jaxdp for any model, of torchvision or timm for a ResNet; a classifier for
    another number of classes is replaced (None: random weights)"""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    """Digest of the weights, or of `initial_params` in Python, recorded by the run and checked on resume (None: not checked)"""
    frozen_stages: Annotated[int, Field(ge=0, le=5)] = 0
    """Number of frozen parts, with their batch statistics: 0 none, 1 the stem, 2 also the first ResNet stage, up
    to 5, all but the classifier"""
    unfreeze_epoch: Positive | None = None
    """Epoch of the run from which the frozen parts train too: from the first step at or past it (None: never). Their
    optimizer state begins at zero, and their batch statistics follow the training images from then on"""
    layer_decay: Annotated[float, Field(ge=SMALLEST, le=1)] = 1.0
    """Factor on the learning rate for each layer below the classifier, as in timm: layer_decay^k for the k-th one. The layers
    of a ResNet are its blocks and the stem, of a registered module what its method `stages` returns (1: none). It multiplies
    the rates of `optimizer.groups`"""

    @property
    def frozen(self) -> int:
        """The frozen parts at first; in the config of `unfrozen` 0."""
        return 0 if self.unfreeze_epoch == 0 else self.frozen_stages

    @property
    def always_frozen(self) -> int:
        """The parts that are frozen to the end of the run."""
        return self.frozen_stages if self.unfreeze_epoch is None else 0


@dataclass(frozen=True)
class Mesh(Section):
    """Two-dimensional device mesh: rows are `horizontal` rings, columns are `vertical` rings."""

    vertical: Count | None = None
    """Number of devices along the vertical axis (None: number of hosts; on one host the most square mesh, or the published
    grid for the paper's numbers of devices)"""
    horizontal: Count | None = None
    """Number of devices along the horizontal axis (None: devices / vertical)"""
    cpu_devices: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of virtual devices on a CPU (None: 1)"""


@dataclass(frozen=True)
class Reduce(Section):
    """All-reduce of the gradients."""

    strategy: StrategyName = "torus"
    wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of gradients while they are communicated and summed"""
    bucket_bytes: Bytes | None = None
    """Largest bucket that packs several tensors, in bytes; larger tensors are sent alone (None: one bucket for all). On
    CPUs 65536 is faster"""
    overlap: bool = True
    """Overlap of all-reduces with the backward pass of later segments of the network; no effect with gradient accumulation"""
    update: Literal["replicated", "sharded"] = "replicated"
    """Update of the parameters: all on every device (replicated), or on each device its part, which is then gathered (sharded;
    for a strategy that begins with a reduce-scatter and ends with an all-gather, such as torus)"""


@dataclass(frozen=True)
class Evaluation(Section):
    """Evaluation during training."""

    every_epochs: Positive | None = 1.0
    """Number of epochs between evaluations (None: only at the end of the run, which is always evaluated)"""


@dataclass(frozen=True)
class Stop(Section):
    """Early stopping: the run ends when a metric of its evaluations no longer improves, and its result is the best checkpoint.

    The learning rate follows the whole schedule: it does not depend on where the run ends.
    """

    metric: Annotated[
        RegisteredName | None,
        Doc(
            "Metric of evaluations that early stopping follows, and that decides which checkpoint is the best (None: the first "
            f"one of the task). {METRICS.help}"
        ),
    ] = None
    patience: Count | None = None
    """Number of consecutive evaluations without improvement that end the run (None: no early stopping). An evaluation improves
    if its metric is better than at every evaluation before. The first one improves; one whose metric is not finite does not"""


@dataclass(frozen=True)
class Checkpoint(Section):
    """Checkpoints besides those saved at the end of each phase, at the end of the run, and on a stop signal.

    With early stopping, every evaluation that is the best so far is also followed by one.
    """

    every_epochs: Positive | None = 1.0
    """Number of epochs between checkpoints, which may be a fraction (None: not by epochs)"""
    every_minutes: Minutes | None = 30.0
    """Largest number of minutes between checkpoints (None: not by time)"""
    keep: Count = 2
    """Number of recent checkpoints to keep, besides the best one by `stop.metric`"""


@dataclass(frozen=True)
class Guard(Section):
    """Detection of runs that cannot continue."""

    non_finite: Literal["stop", "skip"] = "stop"
    """Action on a non-finite loss or gradient. stop: end the run; skip: skip the step, at most ten (dynamic loss scaling always
    skips)"""
    step_minutes: Minutes | None = 30.0
    """Time without progress, in minutes, after which all processes end; a compilation may take at least 30 (None: no limit)"""
    silence_seconds: Annotated[float, Field(ge=3, le=86_400, allow_inf_nan=False)] = 15.0
    """Time in seconds without a change of its status file, after which a process counts as lost and the run ends"""
    audit_every_steps: Count | None = 500
    """Number of steps between audits, which compare all reductions of a step with a reference reduction and end the run on a
    difference larger than rounding (None: no audits)"""
    start_minutes: Annotated[float, Field(gt=0, le=10_080, allow_inf_nan=False)] = 5.0
    """Timeout in minutes for all processes to start"""


@dataclass(frozen=True)
class Compile(Section):
    """Compilation by XLA."""

    deterministic: bool = False
    """Use of deterministic GPU kernels only; CPU kernels always are"""


@dataclass(frozen=True)
class Storage(Section):
    """Runs and data at URLs (s3://BUCKET/PATH, gs://BUCKET/PATH)."""

    directory: str = "auto"
    """Directory for local copies of runs and data at URLs. auto: jaxdp/storage in XDG_CACHE_HOME or ~/.cache"""
    cache_gigabytes: Positive = 100.0
    """Largest size of the local copies of data, in GB; what was used least recently is removed first"""


STEPS = re.compile(r"([1-9][0-9]{0,11}),([1-9][0-9]{0,11})")
WANDB_PROJECT = re.compile(r"[^/\\#?%:\x00-\x1f]{1,128}")
MLFLOW_URI = re.compile(r"(https?|sqlite)://[^\s]+|databricks(://[^\s]*)?")


@dataclass(frozen=True)
class Logging(Section):
    """Logs and profiles."""

    every_steps: Count | None = None
    """Number of steps between lines in metrics.jsonl (None: 10, or fewer in a run of less than 200 steps)"""
    tensorboard: bool = True
    """Output of TensorBoard events"""
    wandb: str | None = None
    """Project of Weights & Biases to send the run to; offline with WANDB_MODE=offline"""
    mlflow: str | None = None
    """Tracking URI of the MLflow server to send the run to, such as http://localhost:5000"""
    send_checkpoint: bool = False
    """Sending of the best checkpoint to them at the end of the run"""
    profile: str | None = None
    """Steps to profile, as FIRST,COUNT with the run's first step as 1; the trace is written to the directory `profile`"""

    def check(self) -> None:
        """Names that Weights & Biases and MLflow accept, and steps to profile."""
        if self.profile is not None and not STEPS.fullmatch(self.profile):
            reason = "must be FIRST,COUNT: the first step to profile, from 1, and the number of steps"
            raise ConfigError("logging.profile", self.profile, reason=reason, hint="for example 10,5")
        if self.wandb is not None and not WANDB_PROJECT.fullmatch(self.wandb):
            reason = r"must be a name of 1 to 128 characters without / \ # ? % :"
            raise ConfigError("logging.wandb", self.wandb, reason=reason, hint="WANDB_ENTITY names a team")
        if self.mlflow is not None and not MLFLOW_URI.fullmatch(self.mlflow):
            hint = "for example http://localhost:5000, of `mlflow server`, or sqlite:///FILE.db with `pip install mlflow`"
            raise ConfigError("logging.mlflow", self.mlflow, reason="must be the URI of an MLflow server", hint=hint)

    @property
    def profiled_steps(self) -> range:
        """The steps to profile, counted from 1; empty for none."""
        first, count = map(int, self.profile.split(",")) if self.profile else (0, 0)
        return range(first, first + count)


@dataclass(frozen=True)
class Config(Section):
    """A run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] = "run"
    """Name of the run; the default working directory is runs/NAME"""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed for initialization, data order and augmentation"""
    epochs: Positive = 90.0
    """Length of the run, in epochs"""
    task: Annotated[RegisteredName, Doc(f"What is predicted for an image. {TASKS.help}")] = "classes"
    scale_schedule: bool = True
    """Scaling of the recipe's phase ends, warm-up and schedule boundaries in proportion to another `--epochs`"""
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    model: Model = field(default_factory=Model)
    batch: Annotated[tuple[Phase, ...], FromList] = (Phase(),)
    """Phases of batch size, in order"""
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    finetune: Finetune = field(default_factory=Finetune)
    mesh: Mesh = field(default_factory=Mesh)
    reduce: Reduce = field(default_factory=Reduce)
    evaluation: Evaluation = field(default_factory=Evaluation)
    stop: Stop = field(default_factory=Stop)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    guard: Guard = field(default_factory=Guard)
    compile: Compile = field(default_factory=Compile)
    storage: Storage = field(default_factory=Storage)
    logging: Logging = field(default_factory=Logging)

    @property
    def first_metric(self) -> str:
        """The metric that describes the run, such as eval_accuracy."""
        return metrics.first(self.task)

    @property
    def deciding_metric(self) -> str:
        """The metric by which early stopping and the best checkpoint go."""
        return self.stop.metric or self.first_metric


# The records of the choices: what they read besides the fields that all choices read; an entry may name a choice whose record
# it reads too. A registered choice reads every field.
OPTIMIZERS.read("optimizer", sgd=Sgd, lars=Lars, adamw=Adam)
LOSSES.read("optimizer", binary=BinaryLoss)
AUGMENTATIONS.read("augment", paper=Flip, pad_and_crop=Flip, random_resized_crop=RandomResizedCrop)
AUTO_AUGMENTS.read("augment", rand_augment=RandAugment, trivial_augment=TrivialAugment)
MIXES.read("data", mixup=Mixed)
SOURCES.read("data", digits=Splits, synthetic=Synthetic, folder=OnDisk, file=InFile)


def divides_by_class_weights(config: Config) -> bool:
    """Whether the mean class weight of the global batch divides the loss, as in PyTorch's cross_entropy."""
    return bool(config.optimizer.class_weights) and config.data.mix == "none" and config.task == "classes"


def skips_steps(config: Config) -> bool:
    """Whether a step with a non-finite gradient leaves the state unchanged."""
    return config.optimizer.loss_scale != "none" or config.guard.non_finite == "skip"


def phase_image_size(config: Config, index: int) -> int:
    """Height and width of the training images of a phase, in pixels."""
    return config.batch[index].image_size or config.data.image_size


def unfrozen(config: Config) -> Config:
    """The config of training steps after `finetune.unfreeze_epoch`, and of their state."""
    return replace(config, finetune=replace(config.finetune, unfreeze_epoch=0.0))


def at_image_size(config: Config, size: int) -> Config:
    """The config of training steps on images of another size; not for evaluation."""
    return config if size == config.data.image_size else replace(config, data=replace(config.data, image_size=size))
