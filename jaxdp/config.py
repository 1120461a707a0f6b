"""What a run is: frozen dataclasses without JAX in them. `validation.py` checks them before anything starts."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from jaxdp.errors import ConfigError as ConfigError

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Scale = Annotated[float, Field(ge=2.0**-100, le=2.0**100)]  # well within float32
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

RESNET = "resnet"  # the model that is not registered
OWN_NAME = r"[a-z][a-z0-9_]*"
OwnName = Annotated[str, Field(pattern=f"^{OWN_NAME}$")]  # `validate` asks the registry for what it means


class _Strict:
    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Data(_Strict):
    """Where the images come from."""

    source: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./:-]+$")] = "digits"
    """digits: scikit-learn's handwritten digits (1,797 real images); synthetic: seeded images of any size and number; folder:
    images in `directory`/SPLIT/CLASS/; else a data set that tensorflow-datasets has prepared, as imagenet2012, imagenette,
    cifar10, or name/config:version"""
    directory: str | None = None
    """of a folder of images, or where tensorflow-datasets keeps its data; None: its default, ~/tensorflow_datasets"""
    train_split: str = "train"
    """of a prepared data set slices too, as train[:10%]; digits: train, or fit to keep the part `validation` of the training
    images for choosing hyperparameters"""
    eval_split: str | None = None
    """None: the usual one of the source (val, validation or test); digits: test or validation"""
    on_bad_image: Literal["stop", "skip"] = "stop"
    """an image that cannot be read: stop and name it, or put the next one in its place, count it and list it at the end"""
    threads: Count | None = None
    """that decode images; None: one for each core"""
    resident: Literal["auto", "on", "off"] = "auto"
    """keep all training images on every device, so that only their numbers travel; auto: where they are in memory, small enough
    (512 MiB), and the devices are no CPUs"""
    ahead_bytes: Count = 2**31
    """of host memory for images on their way to the devices; larger batches travel in groups"""
    image_size: Annotated[int, Field(ge=8, le=4096)] = 32
    """height and width of the images that the network sees, in pixels"""
    stored_size: Annotated[int, Field(ge=8, le=4096)] | None = None
    """height and width of the images as they come to the device, from which the transform of the paper crops; None:
    `image_size`. Random resized crops are taken from encoded images as they are decoded"""
    augmentation: Literal["none", "digits", "paper", "random_resized_crop", "pad_and_crop"] = "none"
    """on the device: digits (small rotations, scales, shears, shifts), paper (Mikami et al., see `augment`),
    random_resized_crop and pad_and_crop (each with a left-right flip)"""
    mix: Literal["none", "mixup", "cutmix"] = "none"
    """blend each image with another of its worker's batch: all over (mixup) or in a rectangle (cutmix)"""
    mix_alpha: Positive = 1.0
    """the share of the blend is drawn from Beta(alpha, alpha), once for a worker's batch"""
    train_examples: Count = 4096
    """number of training images (synthetic only)"""
    eval_examples: Count = 1000
    """number of evaluation images (synthetic only)"""

    @property
    def image_bytes(self) -> int:
        """Bytes of an image as it travels to the devices."""
        return 3 * (self.stored_size or self.image_size) ** 2


@dataclass(frozen=True)
class Augment(_Strict):
    """Ranges of the random transforms. Defaults: the public ImageNet values of the paper's first author."""

    min_scale: Positive = 0.77
    """smallest enlargement of the stored image before the crop (paper)"""
    max_scale: Positive = 1.54
    """largest enlargement (paper)"""
    angle: NonNegative = 0.5
    """largest rotation either way, in radians (paper)"""
    aspect: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.3
    """largest ratio of the enlargements of height and width, either way (paper)"""
    distortion: NonNegative = 0.2
    """strength of barrel and pincushion distortion (paper)"""
    flip: bool = True
    """mirror left and right in half of the images"""
    brightness: NonNegative = 0.0
    """largest addition to all pixels either way, white being 1 (paper)"""
    contrast: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.1
    """largest factor on the distance of pixels from `contrast_centre`, a channel, either way (paper)"""
    contrast_centre: NonNegative = 0.5
    """what contrast leaves as it is, white being 1 (paper)"""
    noise: NonNegative = 0.0
    """largest standard deviation of normal noise, white being 1 (paper)"""
    padding: Annotated[int, Field(ge=0)] | None = None
    """pixels around the image before the crop; None: 4 of black (pad_and_crop), 0 that repeat the edge (paper)"""
    min_area: Annotated[float, Field(gt=0, le=1)] = 0.08
    """smallest share of the image in a crop (random_resized_crop)"""


@dataclass(frozen=True)
class Model(_Strict):
    """The network."""

    name: OwnName = RESNET
    """resnet, or a name given to `jaxdp.register_model`, whose function is handed these fields to use as it likes"""
    depth: Literal[18, 34, 50, 101, 152] = 50
    """ResNet v1.5 of this depth"""
    width: Annotated[int, Field(ge=1, le=4096)] = 64
    """channels of the first stage; 64 is the published network"""
    stem: Literal["imagenet", "small"] = "imagenet"
    """imagenet: 7x7 stride 2 and max pooling; small: 3x3 stride 1, no pooling"""
    classes: Annotated[int, Field(ge=2, le=1_000_000)] = 1000
    """number of classes"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """of activations and of the weights where they are used; parameters and statistics stay float32;
    float16 needs `loss_scale`"""
    norm: Literal["per_worker", "synchronised"] = "per_worker"
    """batch normalisation over each worker's batch (as the paper has it), or over what all devices compute at a time"""
    statistics: Literal["moving_average", "last_batch"] = "moving_average"
    """for evaluation: moving averages of the batches' statistics, or those of the last batch over all workers"""
    norm_momentum: BelowOne = 0.9
    """decay of the moving averages of batch normalisation, per step (moving_average)"""
    remat: bool = False
    """compute each block's activations again in the backward pass instead of keeping them"""
    gradients: Literal["own", "autodiff"] = "own"
    """of batch normalisation with ReLU, and of max pooling: written out, which moves less memory (a CPU computes ReLU as a root
    then, see jaxdp/models/normalization.py), or as JAX derives them"""
    convolution: Literal["auto", "direct", "product"] = "auto"
    """product: 1x1 and small-map convolutions as matrix products, faster on CPUs; auto: product on a CPU, else direct"""

    @property
    def title(self) -> str:
        """The network's name for people."""
        return f"ResNet-{self.depth}" if self.name == RESNET else self.name


@dataclass(frozen=True)
class Phase(_Strict):
    """A stretch of training with one batch size."""

    global_batch: Count = 256
    """images a step, over all devices"""
    until_epoch: Positive | None = None
    """where the phase ends, in epochs from the start; the last phase ends with the run"""
    per_worker_batch: Count | None = None
    """images a worker normalises together, whatever the devices: more workers than devices are accumulated;
    None: one worker a device, so that batch normalisation depends on the number of devices"""


@dataclass(frozen=True)
class Optimizer(_Strict):
    """How parameters are updated."""

    name: Literal["lars", "sgd"] = "lars"
    """lars: layer-wise adaptive rate scaling (You et al.); sgd: stochastic gradient descent with momentum"""
    momentum: BelowOne = 0.9
    """decay of the velocity"""
    momentum_rule: Literal["constant", "noise_scale", "as_printed"] = "constant"
    """how it follows the global batch: noise_scale keeps rate / (batch * (1 - momentum)); as_printed: the paper's formula"""
    momentum_batch: Count = 32768
    """global batch at which `momentum` holds (noise_scale, as_printed)"""
    nesterov: bool = False
    """look ahead along the velocity"""
    weight_decay: NonNegative = 1e-4
    """L2 regularisation, on tensors of two and more dimensions only"""
    trust_coefficient: Positive = 0.001
    """LARS: size of an update relative to its weights at learning rate 1"""
    eps: NonNegative = 1e-6
    """LARS: added to the denominator of the trust ratio"""
    denominator: Literal["sum_of_norms", "norm_of_sum"] = "sum_of_norms"
    """LARS: |g| + decay |w| (You et al., MLPerf) or |g + decay w| (optax)"""
    label_smoothing: BelowOne = 0.0
    """share of the target spread evenly over all classes"""
    clip_norm: Positive | None = None
    """largest norm of the whole gradient, to which a larger one is scaled; None: as it is"""
    average_decay: BelowOne | None = None
    """evaluate an exponential moving average, with this decay a step, of the parameters and of the statistics of batch
    normalisation; None: the parameters themselves"""


@dataclass(frozen=True)
class Schedule(_Strict):
    """Learning rate as a function of epochs."""

    name: Literal["cosine", "polynomial", "goyal", "sony_a", "sony_b"] = "cosine"
    """cosine, polynomial (sony_a): decay to `end`; goyal: steps, scaled linearly with the batch; sony_b: with jumps"""
    learning_rate: Positive = 1.0
    """the peak; for goyal the rate at a global batch of 256"""
    warmup_epochs: NonNegative = 5.0
    """epochs over which the rate rises linearly, updated each step"""
    start: NonNegative = 0.0
    """rate at epoch 0 where there is a warm-up (goyal starts at `learning_rate`)"""
    end: NonNegative = 0.0
    """rate at the last epoch (cosine, polynomial)"""
    power: Positive = 2.0
    """exponent (polynomial, sony_a, sony_b)"""
    boundaries: tuple[Positive, ...] = ()
    """epochs at which the rate is multiplied by `factor` (goyal, sony_b); none: it is not"""
    factor: Positive = 0.1
    """see `boundaries`"""


@dataclass(frozen=True)
class LossScale(_Strict):
    """A factor on the loss that keeps float16 gradients from vanishing; gradients are divided by it again."""

    name: Literal["none", "static", "dynamic"] = "none"
    """static: fixed; dynamic: halved, and the step skipped, where a gradient is not finite; doubled after `growth_steps`"""
    initial: Scale = 32768.0
    """the first scale, or the only one"""
    growth_steps: Count = 2000
    """finite steps after which the scale doubles (dynamic)"""
    minimum: Scale = 1.0
    """the scale never falls below (dynamic)"""
    maximum: Scale = 16777216.0
    """the scale never rises above (dynamic)"""
    give_up_after: Count = 50
    """steps skipped in a row that stop the run (dynamic; with a static scale the first one does)"""


@dataclass(frozen=True)
class Finetune(_Strict):
    """Training that begins from the weights of another."""

    weights: str | None = None
    """a safetensors file in jaxdp's names, torchvision's or timm's, from which the run begins; a classifier for another number
    of classes is replaced by a new one. None: begin from random weights"""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    """of the file's weights, written down by the run, so that no others take their place; None: whatever file is there"""
    frozen_stages: Annotated[int, Field(ge=0, le=5)] = 0
    """parts of the network that stay as the file has them, statistics of batch normalisation included: 0 none, 1 the stem, 2
    the first stage too, up to 5, all but the classifier"""
    new_head: bool = False
    """begin with a new classifier although the file's is for as many classes, which are others"""
    head_multiplier: Positive = 1.0
    """the learning rate of the classifier relative to that of the rest"""


@dataclass(frozen=True)
class Mesh(_Strict):
    """The two-dimensional device mesh: rows are `horizontal` rings, columns `vertical` ones."""

    vertical: Count | None = None
    """devices along the vertical axis; None: the number of hosts, on one host the most square shape"""
    horizontal: Count | None = None
    """devices along the horizontal axis; None: what is left"""
    cpu_devices: Annotated[int, Field(ge=1, le=1024)] | None = None
    """devices into which a CPU is split, where JAX runs on a CPU; None: 1. At most 1024: each takes threads and memory of its
    own before the run begins"""
    keep_memory: bool = True
    """where a CPU is the only device: memory that a step frees stays with the process for the next one, which holds on to the
    most that it ever needed; what JAX computes on the CPU is then done when a call returns"""
    idle: Literal["allow", "refuse"] = "allow"
    """what to do when a batch cannot use all devices: leave some idle, or stop"""


@dataclass(frozen=True)
class Reduce(_Strict):
    """How gradients are combined."""

    strategy: OwnName = "torus"
    """psum: XLA chooses; ring: exchanges with the next device; hierarchical: all-reduce horizontally, then vertically; torus:
    reduce-scatter horizontally, all-reduce vertically, all-gather horizontally; parameter_server: to one device and back;
    auto: the fastest of them for this model on this mesh, measured at the start; or a name that `jaxdp.register_strategy` was
    given"""
    wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """in which gradients travel"""
    bucket_bytes: Count | None = None
    """smaller tensors travel together in messages of up to so many bytes, larger ones alone; None: all in one message. On CPUs,
    where packing costs, 65536 is faster"""
    overlap: bool = True
    """send the gradient of each block of the network while that of the next one is computed; no message then reaches over
    blocks. Where gradients are accumulated, all travel at the end"""


@dataclass(frozen=True)
class Evaluation(_Strict):
    """When and how the held-out images are counted."""

    every_epochs: Positive | None = 1.0
    """epochs between evaluations; None: only at the end, where there always is one"""
    batch: Count | None = None
    """images an evaluation step, over all devices; None: at most what the phase's devices train on at a time"""


@dataclass(frozen=True)
class Checkpoint(_Strict):
    """When the run is saved, in addition to changes of phase, its end, and the moment at which it is asked to stop."""

    every_epochs: Positive | None = 1.0
    """epochs between checkpoints; None: no checkpoint falls due by epochs"""
    every_samples: Count | None = None
    """samples between checkpoints"""
    every_minutes: Positive | None = 30.0
    """minutes between checkpoints, at most"""
    keep: Count = 2
    """how many of the newest are kept, beside the one of the best accuracy"""


@dataclass(frozen=True)
class Guard(_Strict):
    """What stops a run that cannot go on."""

    non_finite: Literal["stop", "skip"] = "stop"
    """a loss or gradient that is not finite: stop, or leave the step out (dynamic loss scaling always does)"""
    skip_at_most: Count = 10
    """steps left out in all before the run stops (skip)"""
    exploding: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 4.0
    """a loss of so many times that of guessing, ln(classes), over twenty steps is reported"""
    step_minutes: Positive | None = 30.0
    """a step that takes longer ends the run, after telling where every thread stands; None: never"""
    silence_seconds: Annotated[float, Field(ge=3, allow_inf_nan=False)] = 15.0
    """a process of the run that is not heard of for so long is given up, and all others end"""
    start_minutes: Positive = 5.0
    """for which the processes of a run wait for one another at the start"""


@dataclass(frozen=True)
class Compile(_Strict):
    """How XLA compiles the programs of a run."""

    cache: str = "auto"
    """directory in which compiled programs are kept for the next run; nothing empties it. auto: JAX_COMPILATION_CACHE_DIR, or
    jaxdp/programs in XDG_CACHE_HOME or ~/.cache; off: none"""
    tuned: bool = True
    """with the options that make the step faster (see docs/performance.md); off: as XLA's defaults have it"""
    deterministic: bool = False
    """on GPUs only kernels that give the same bits whenever they run; on CPUs that is so in any case"""


@dataclass(frozen=True)
class Logging(_Strict):
    """What is written down."""

    every_steps: Count = 10
    """steps between lines in metrics.jsonl"""
    tensorboard: bool = True
    """write TensorBoard events"""
    profile: str | None = None
    """FIRST,COUNT: trace so many steps from that one on (the run's first step is 1) into the directory `profile`"""


@dataclass(frozen=True)
class Config(_Strict):
    """A run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """names the default working directory, runs/NAME"""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """of the initial parameters, the order of the data and the augmentation"""
    epochs: Positive = 90.0
    """length of the run"""
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    model: Model = field(default_factory=Model)
    batch: tuple[Phase, ...] = (Phase(),)
    """phases of batch size, in order"""
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    loss_scale: LossScale = field(default_factory=LossScale)
    finetune: Finetune = field(default_factory=Finetune)
    mesh: Mesh = field(default_factory=Mesh)
    reduce: Reduce = field(default_factory=Reduce)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    guard: Guard = field(default_factory=Guard)
    compile: Compile = field(default_factory=Compile)
    logging: Logging = field(default_factory=Logging)


# Sources whose images are made here, of one size.
IN_MEMORY = ("digits", "synthetic")

# Parts of a Config that say where and how a run is executed or watched, not what it computes.
HARMLESS = ("name", "mesh", "reduce.strategy", "reduce.bucket_bytes", "reduce.overlap", "logging", "checkpoint", "guard")
HARMLESS += ("finetune.weights",)  # its digest says what it holds
HARMLESS += ("compile", "data.directory", "data.threads", "data.ahead_bytes", "data.resident")


def skips_steps(config: Config) -> bool:
    """Whether a step whose gradient is not finite leaves the state as it was."""
    return config.loss_scale.name != "none" or config.guard.non_finite == "skip"


def crops_while_loading(config: Config) -> bool:
    """Whether images are cropped at random as they are decoded, and not on the device."""
    return config.data.augmentation == "random_resized_crop" and config.data.source not in IN_MEMORY
