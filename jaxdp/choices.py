"""The choices of config fields whose implementations need JAX, or that have none: their names, help and properties.

Config types and `--help` need them without JAX. An entry refers to the function or class that implements it, which is imported
when it is chosen. The tables of schedules and strategies are in `schedules.py` and `strategies.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxdp.registry import Choice, Choices, LazyModule
from jaxdp.task import Task

if TYPE_CHECKING:  # for editors and type checkers
    from jaxdp import losses, models
    from jaxdp.data import augment, digits, file, folder, from_python, policies, synthetic, tfds
    from jaxdp.optim import optimizer
    from jaxdp.tasks import classes, labels
else:
    augment = LazyModule("jaxdp.data.augment")
    classes = LazyModule("jaxdp.tasks.classes")
    digits = LazyModule("jaxdp.data.digits")
    file = LazyModule("jaxdp.data.file")
    folder = LazyModule("jaxdp.data.folder")
    from_python = LazyModule("jaxdp.data.from_python")
    labels = LazyModule("jaxdp.tasks.labels")
    losses = LazyModule("jaxdp.losses")
    models = LazyModule("jaxdp.models")
    optimizer = LazyModule("jaxdp.optim.optimizer")
    policies = LazyModule("jaxdp.data.policies")
    synthetic = LazyModule("jaxdp.data.synthetic")
    tfds = LazyModule("jaxdp.data.tfds")


@dataclass(frozen=True)
class SourceChoice(Choice):
    """A data source. Its implementation is a subclass of `jaxdp.data.datasets.Source`.

    in_memory: it makes its images itself, in one size. from_python: the images are an argument of a function. layout: what
    `data.directory` must name; "" if it may be omitted. prepared: by tensorflow-datasets, under the same name. classes: their
    number, if known without the data. train_split, eval_split: allowed values (None: any). disjoint: evaluation split -> the
    only training split without its images, if there is another. train_images: size of the training set, if published. mean,
    std: pixel statistics for normalization, on the scale 0 to 255, per channel or for all channels. remark: a sentence about
    the images for model cards. tasks: names in TASKS whose labels it may have. mlperf: whether reports compare its runs with
    the target of MLPerf.
    """

    in_memory: bool = False
    from_python: bool = False
    layout: str = ""
    prepared: bool = False
    classes: int | None = None
    train_split: tuple[str, ...] | None = None
    eval_split: tuple[str, ...] | None = None
    disjoint: Mapping[str, str] = field(default_factory=dict)
    train_images: int | None = None
    mean: float | tuple[float, ...] = (123.675, 116.28, 103.53)  # ImageNet's
    std: float | tuple[float, ...] = (58.395, 57.12, 57.375)
    remark: str = ""
    tasks: tuple[str, ...] = ("classes",)
    mlperf: bool = False

    @property
    def own_images(self) -> bool:
        """Whether the images are the user's."""
        return not (self.in_memory or self.prepared)


@dataclass(frozen=True)
class TaskChoice(Choice):
    """What is predicted for an image. Its metrics are the entries of `jaxdp.metrics.METRICS` with its name.

    Its implementation is a module with the functions of `jaxdp.tasks.classes`, or an object with these methods. losses: names
    in LOSSES that fit its labels; () for all. like: the built-in task whose data, metrics and predictions it has. own: what a
    user registered; None for a built-in one.
    """

    losses: tuple[str, ...] = ()
    own: Task | None = None

    @property
    def targets(self) -> Any:
        """What the data give for an image, if that is the user's own: an array, or a mapping of arrays."""
        return self.own.targets if self.own else None

    @property
    def data(self) -> str:
        """The built-in task whose sources of data it can use; "" if that is the task itself."""
        if self.targets is None:
            return self.like
        is_class = getattr(self.targets, "shape", None) == () and self.targets.dtype.kind in "iub"
        return "classes" if is_class else "labels"


def kind_of_task(name: str) -> str:
    """The built-in task whose targets and predictions a task has; "" if they are its own."""
    return TASKS[name].like or (name if name in TASKS.builtin else "")


@dataclass(frozen=True)
class Augmentation(Choice):
    """An augmentation. Its implementation is f(image [S, S, 3], key, size=image_size, ranges=config.augment) of one image.

    resizes: it crops from stored images of another size than `data.image_size`.
    """

    resizes: bool = False


@dataclass(frozen=True)
class UpdateRule(Choice):
    """An optimizer. Its implementation is f(config.optimizer, learning_rate, momentum): an `optax.GradientTransformation`.

    accumulates: its momentum sums gradients, so that learning rate / (1 - momentum) is the effective rate. uses_weight_norms:
    its updates depend on the norms of the parameters. uses_update_norms: and on the norms of updates before their scaling.
    shards: it can update a part of each tensor, with norms of whole tensors from `jaxdp.optim.squares`.
    """

    accumulates: bool = True
    uses_weight_norms: bool = False
    uses_update_norms: bool = False
    shards: bool = True


@dataclass(frozen=True)
class Loss(Choice):
    """A loss. Its implementation is f(config.optimizer, logits [B, K], labels [B], mix=mix or None): [B] float32.

    chance: the loss of equal scores for a number of classes; infinite if it is not known.
    title: its name in a plan, "" for the usual one.
    """

    chance: Callable[[int], float] = lambda classes: math.inf
    title: str = ""


TASKS = Choices(
    "task",
    {
        "classes": TaskChoice("one class for each image", implementation=lambda: classes),
        "labels": TaskChoice(
            "any number of labels for each image, each 0 or 1",
            losses=("binary", "binary_sum"),
            implementation=lambda: labels,
        ),
    },
    other=TaskChoice("or a name registered with `jaxdp.register_task`"),
    function="register_task",
)
OPTIMIZERS = Choices(
    "optimizer.name",
    {
        "lars": UpdateRule(
            "layer-wise adaptive rate scaling (You et al.)",
            uses_weight_norms=True,
            implementation=lambda: optimizer.build_lars,
        ),
        "sgd": UpdateRule("stochastic gradient descent with momentum", implementation=lambda: optimizer.build_sgd),
        "adamw": UpdateRule(
            "Adam with decoupled weight decay (Loshchilov & Hutter)",
            accumulates=False,
            implementation=lambda: optimizer.build_adamw,
        ),
        "lamb": UpdateRule(
            "layer-wise scaled Adam (You et al.)",
            accumulates=False,
            uses_weight_norms=True,
            uses_update_norms=True,
            implementation=lambda: optimizer.build_lamb,
            like="adamw",
        ),
    },
    other=UpdateRule("or a name registered with `jaxdp.register_optimizer`"),
    function="register_optimizer",
)
LOSSES = Choices(
    "optimizer.loss",
    {
        "softmax": Loss(
            "cross entropy of the softmax over the classes", chance=math.log, implementation=lambda: losses.softmax
        ),
        "binary": Loss(
            "binary cross entropy of each class, averaged over the classes",
            chance=lambda _: math.log(2),
            title="binary cross entropy",
            implementation=lambda: losses.binary,
        ),
        "binary_sum": Loss(
            "its sum over the classes",
            chance=lambda classes: classes * math.log(2),
            title="sum of binary cross entropies",
            implementation=lambda: losses.binary_sum,
            like="binary",
        ),
    },
    other=Loss("or a name registered with `jaxdp.register_loss`"),
    other_reads="binary",
    function="register_loss",
)
AUGMENTATIONS = Choices(
    "data.augmentation",
    {
        "none": Augmentation(""),
        "digits": Augmentation("small rotations, scales, shears and shifts", implementation=lambda: augment.random_affine),
        "paper": Augmentation("Mikami et al.", resizes=True, implementation=lambda: augment.paper_augmentation),
        "random_resized_crop": Augmentation(
            "crop of random area and aspect ratio, flip",
            resizes=True,
            implementation=lambda: augment.random_resized_crop,
        ),
        "pad_and_crop": Augmentation("crop of the padded image, flip", implementation=lambda: augment.pad_and_crop),
    },
)
AUTO_AUGMENTS = Choices(
    "data.auto_augment",
    {
        "none": Choice(""),
        "rand_augment": Choice(
            "RandAugment (Cubuk et al.) as in torchvision, 14 operations", implementation=lambda: policies.RAND_AUGMENT
        ),
        "trivial_augment": Choice(
            "TrivialAugmentWide (Müller & Hutter) as in torchvision", implementation=lambda: policies.TRIVIAL_AUGMENT
        ),
        "rand_augment_increasing": Choice(
            "RandAugment as in timm's rand-m7-mstd0.5-inc1, 15 operations",
            implementation=lambda: policies.RAND_AUGMENT_INCREASING,
            like="rand_augment",
        ),
    },
    other=Choice("or a name registered with `jaxdp.register_augmentation`"),
    other_reads="none",
    function="register_augmentation",
)
MIXES = Choices(
    "data.mix",
    {
        "none": Choice(""),
        "mixup": Choice("blend of whole images (Zhang et al.)", implementation=lambda: augment.mix_by_mixup),
        "cutmix": Choice(
            "rectangle of the other image (Yun et al.)", implementation=lambda: augment.mix_by_cutmix, like="mixup"
        ),
        "mixup_or_cutmix": Choice(
            "one of the two, drawn for each worker's batch",
            implementation=lambda: augment.mix_by_either,
            like="mixup",
        ),
    },
)
SOURCES = Choices(
    "data.source",
    {
        "digits": SourceChoice(
            "scikit-learn's handwritten digits (1,797 real images)",
            in_memory=True,
            classes=10,
            train_split=("train", "fit"),
            eval_split=("test", "validation"),
            disjoint={"validation": "fit"},
            mean=78.0,
            std=89.0,
            implementation=lambda: digits.Digits,
        ),
        "synthetic": SourceChoice(
            "seeded images of any size and number",
            in_memory=True,
            mean=127.5,
            std=52.0,
            remark="The images of this source are synthetic patterns.",
            implementation=lambda: synthetic.SyntheticImages,
        ),
        "folder": SourceChoice(
            "images in `directory`/SPLIT/CLASS/",
            layout="FOLDER, which contains SPLIT/CLASS/",
            implementation=lambda: folder.Folder,
        ),
        "file": SourceChoice(
            "`directory` is a CSV, TSV, Parquet or .npz file, a folder with one for each split, CIFAR as published, or a "
            "data set of Hugging Face saved to disk",
            layout="PATH, a CSV, TSV, Parquet or .npz file, or a folder with train.csv and val.csv, ...",
            tasks=("classes", "labels"),
            implementation=lambda: file.File,
        ),
        "given": SourceChoice(
            "the `datasets` argument of `jaxdp.train`",
            from_python=True,
            tasks=("classes", "labels"),
            implementation=lambda: from_python.Given,
            like="folder",
        ),
        "imagenet2012": SourceChoice(
            "ImageNet",
            prepared=True,
            classes=1000,
            train_images=1_281_167,
            mlperf=True,
            implementation=lambda: tfds.Prepared,
            like="folder",
        ),
        "cifar10": SourceChoice(
            "CIFAR-10", prepared=True, classes=10, train_images=50_000, implementation=lambda: tfds.Prepared, like="folder"
        ),
    },
    other=SourceChoice(
        "or a name registered with `jaxdp.register_dataset`, or any data set prepared by tensorflow-datasets, as NAME, "
        "NAME/CONFIG or NAME:VERSION",
        prepared=True,
        implementation=lambda: tfds.Prepared,
    ),
    other_reads="imagenet2012",
    function="register_dataset",
)
MODELS = Choices(
    "model.name",
    {"resnet": Choice("ResNet v1.5 (He et al.)", implementation=lambda: models.create_resnet)},
    function="register_model",
)
