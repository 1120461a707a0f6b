"""Tables of the named choices of a configuration: optimizers, schedules, data sources, augmentations and a few others.

Config types, validation, `--help`, plan output and tests are derived from these tables. A field that only some choices read
says so where it is declared: `nesterov: Annotated[bool, OPTIMIZERS.only("lars", "sgd")]`. The functions that implement the
choices are added where they are defined, with `Registry.implement`, which raises at import if one is missing. This module
imports neither JAX nor third-party packages.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from jaxdp.registry import Registry


@dataclass(frozen=True)
class Choice:
    """One value of a config field. help: noun phrase for `--help`."""

    help: str


@dataclass(frozen=True)
class Source(Choice):
    """A data source.

    in_memory: it makes its images itself, in one size. from_python: the images are an argument of a function. needs_directory:
    of the user's images. prepared: by tensorflow-datasets, under the same name. classes: their number, if known without the
    data. train_split, eval_split: allowed values (None: any). disjoint: evaluation split -> the only training split without
    its images, if there is another. train_images: size of the training set, if published. mean, std: pixel statistics for
    normalization, on the scale 0 to 255, per channel or for all channels. remark: a sentence about the images for model cards.
    """

    in_memory: bool = False
    from_python: bool = False
    needs_directory: bool = False
    prepared: bool = False
    classes: int | None = None
    train_split: tuple[str, ...] | None = None
    eval_split: tuple[str, ...] | None = None
    disjoint: Mapping[str, str] = field(default_factory=dict)
    train_images: int | None = None
    mean: float | tuple[float, ...] = (123.675, 116.28, 103.53)  # ImageNet's
    std: float | tuple[float, ...] = (58.395, 57.12, 57.375)
    remark: str = ""

    @property
    def own_images(self) -> bool:
        """Whether the images are the user's."""
        return self.from_python or self.needs_directory


@dataclass(frozen=True)
class Augmentation(Choice):
    """An augmentation. resizes: it crops from stored images of another size than `data.image_size`."""

    resizes: bool = False


@dataclass(frozen=True)
class UpdateRule(Choice):
    """An optimizer.

    accumulates: its momentum sums gradients, so that learning rate / (1 - momentum) is the effective rate. uses_weight_norms:
    its updates depend on the norms of the parameters. shards: it can update a part of each tensor, with norms of whole tensors
    from `jaxdp.optim.squares`.
    """

    accumulates: bool = True
    uses_weight_norms: bool = False
    shards: bool = True


@dataclass(frozen=True)
class Loss(Choice):
    """A loss. chance: the chance-level loss of a number of classes, that of equal scores for all of them. title: its name in a
    plan, "" for the usual one."""

    chance: Callable[[int], float] = math.log
    title: str = ""


@dataclass(frozen=True)
class Metric(Choice):
    """A metric of evaluations. sign: 1 if higher values are better, -1 if lower ones are."""

    sign: int = 1


Entry = TypeVar("Entry", bound=Choice)


@dataclass(frozen=True, eq=False)
class Only:
    """Annotation of a field: the choices of `table` that read it. With the others it must keep its default."""

    table: "Choices"
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class OneOf:
    """Annotation of a field whose value is a name in a table."""

    table: "Choices"

    def __get_pydantic_core_schema__(self, _: Any, handler: Any) -> Any:
        return handler.generate_schema(Literal[tuple(self.table)])


class Choices(Registry[Entry, Any]):
    """The choices of one config field.

    other: entry for names that are not in the table; None if there are no others. other_reads: the built-in choice that reads
    the same fields as such a name; None: they read all. readers: SECTION.FIELD -> names of the choices that read it, of fields
    that not all of them read; `jaxdp.config` collects them from the annotations.
    """

    def __init__(
        self,
        field: str,
        entries: dict[str, Entry],
        *,
        other: Entry | None = None,
        other_reads: str | None = None,
        function: str = "",
    ) -> None:
        super().__init__(field, entries, function=function)
        self.other, self.other_reads = other, other_reads
        self.readers: dict[str, tuple[str, ...]] = {}

    def __getitem__(self, name: str) -> Entry:
        """The entry of a name. Raises KeyError for an unknown one."""
        if self.other is not None:
            return self.entries.get(name, self.other)
        return self.entries[name]

    @property
    def help(self) -> str:
        """Names with their help texts, for `--help`."""
        texts = [f"{name}: {entry.help}" if entry.help else name for name, entry in self.entries.items()]
        return "; ".join([*texts, self.other.help] if self.other else texts)

    def only(self, *names: str) -> Only:
        """The annotation of a field that only these choices read. Raises TypeError for an unknown name."""
        if unknown := [name for name in names if name not in self.builtin]:
            raise TypeError(f"{self.field} has no {', '.join(unknown)}")
        return Only(self, names)

    def read_fields(self, name: str) -> list[str]:
        """The fields SECTION.FIELD that the choice `name` reads and another choice ignores."""
        reader = name if name in self.builtin else self.other_reads
        return [field for field, names in self.readers.items() if reader is None or reader in names]

    def ignored_fields(self, name: str) -> list[str]:
        """The fields SECTION.FIELD that the choice `name` ignores and another choice reads, sorted."""
        return sorted(self.readers.keys() - set(self.read_fields(name)))


OPTIMIZERS = Choices(
    "optimizer.name",
    {
        "lars": UpdateRule("layer-wise adaptive rate scaling (You et al.)", uses_weight_norms=True),
        "sgd": UpdateRule("stochastic gradient descent with momentum"),
        "adamw": UpdateRule("Adam with decoupled weight decay (Loshchilov & Hutter)", accumulates=False),
        "lamb": UpdateRule("layer-wise scaled Adam (You et al.)", accumulates=False, uses_weight_norms=True),
    },
    other=UpdateRule("or a name registered with `jaxdp.register_optimizer`"),
    function="register_optimizer",
)
MOMENTUM_RULES = Choices(
    "optimizer.momentum_rule",
    {
        "constant": Choice("the same for all batches"),
        "noise_scale": Choice("keeps learning rate / (batch * (1 - momentum)) constant"),
        "as_printed": Choice("the formula printed by Mikami et al."),
    },
)
SCHEDULES = Choices(
    "schedule.name",
    {
        "cosine": Choice("warm-up, then half a cosine down to `end`"),
        "polynomial": Choice("warm-up, then (1 - progress)^power down to `end`"),
        "goyal": Choice("step decay, scaled linearly with the batch (Goyal et al.)"),
        "sony_a": Choice("configuration A of Mikami et al., polynomial"),
        "sony_b": Choice("configuration B of Mikami et al., with step decay"),
    },
)
LOSSES = Choices(
    "optimizer.loss",
    {
        "softmax": Loss("cross entropy of the softmax over the classes"),
        "binary": Loss(
            "binary cross entropy of each class, averaged over the classes",
            chance=lambda _: math.log(2),
            title="binary cross entropy",
        ),
        "binary_sum": Loss(
            "its sum over the classes",
            chance=lambda classes: classes * math.log(2),
            title="sum of binary cross entropies",
        ),
    },
)
LOSS_SCALES = Choices(
    "loss_scale.name",
    {
        "none": Choice(""),
        "static": Choice("fixed"),
        "dynamic": Choice("halved when a gradient is not finite, and the step skipped; doubled after 2,000 finite steps"),
    },
)
AUGMENTATIONS = Choices(
    "data.augmentation",
    {
        "none": Augmentation(""),
        "digits": Augmentation("small rotations, scales, shears and shifts"),
        "paper": Augmentation("Mikami et al.", resizes=True),
        "random_resized_crop": Augmentation("crop of random area and aspect ratio, flip", resizes=True),
        "pad_and_crop": Augmentation("crop of the padded image, flip"),
    },
)
AUTO_AUGMENTS = Choices(
    "data.auto_augment",
    {
        "none": Choice(""),
        "rand_augment": Choice("RandAugment (Cubuk et al.) as in torchvision, 14 operations"),
        "trivial_augment": Choice("TrivialAugmentWide (Müller & Hutter) as in torchvision"),
        "rand_augment_increasing": Choice("RandAugment as in timm's rand-m7-mstd0.5-inc1, 15 operations"),
    },
)
MIXES = Choices(
    "data.mix",
    {
        "none": Choice(""),
        "mixup": Choice("blend of whole images (Zhang et al.)"),
        "cutmix": Choice("rectangle of the other image (Yun et al.)"),
        "mixup_or_cutmix": Choice("one of the two, drawn for each worker's batch"),
    },
)
SOURCES = Choices(
    "data.source",
    {
        "digits": Source(
            "scikit-learn's handwritten digits (1,797 real images)",
            in_memory=True,
            classes=10,
            train_split=("train", "fit"),
            eval_split=("test", "validation"),
            disjoint={"validation": "fit"},
            mean=78.0,
            std=89.0,
        ),
        "synthetic": Source(
            "seeded images of any size and number",
            in_memory=True,
            mean=127.5,
            std=52.0,
            remark="The images of this source are synthetic patterns.",
        ),
        "folder": Source("images in `directory`/SPLIT/CLASS/", needs_directory=True),
        "given": Source("the `datasets` argument of `jaxdp.train`", from_python=True),
        "imagenet2012": Source("ImageNet", prepared=True, classes=1000, train_images=1_281_167),
        "cifar10": Source("CIFAR-10", prepared=True, classes=10, train_images=50_000),
    },
    other=Source("or any data set prepared by tensorflow-datasets, as NAME, NAME/CONFIG or NAME:VERSION", prepared=True),
    other_reads="imagenet2012",
)
ON_DISK = ("folder", "given", "imagenet2012", "cifar10")  # sources whose images are read in the background
BATCH_STATISTICS = Choices(
    "model.statistics",
    {
        "moving_average": Choice("moving averages over the training batches"),
        "last_batch": Choice("statistics of the last training batch over all workers"),
    },
)
NON_FINITE = Choices(
    "guard.non_finite",
    {"stop": Choice("end the run"), "skip": Choice("skip the step, at most ten (dynamic loss scaling always skips)")},
)
STOP_METRICS = Choices(
    "stop.metric",
    {
        "eval_accuracy": Metric("held-out accuracy, the higher the better"),
        "eval_top5": Metric("held-out top-5 accuracy, the higher the better; with six classes or more"),
        "eval_loss": Metric("held-out loss, the lower the better", sign=-1),
    },
)
MODELS: Registry[Choice, Any] = Registry("model.name", {"resnet": Choice("ResNet v1.5 (He et al.)")}, function="register_model")
TABLES: tuple[Choices, ...] = (
    OPTIMIZERS,
    MOMENTUM_RULES,
    SCHEDULES,
    LOSSES,
    LOSS_SCALES,
    AUGMENTATIONS,
    AUTO_AUGMENTS,
    MIXES,
    SOURCES,
    BATCH_STATISTICS,
    NON_FINITE,
    STOP_METRICS,
)
