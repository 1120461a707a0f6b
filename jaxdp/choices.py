"""Tables of the named choices of a configuration: optimizers, schedules, data sources, augmentations and a few others.

Config types, validation, `--help`, plan output and tests are derived from these tables. The functions that implement the
choices are added where they are defined, with `Registry.implement`, which raises at import if one is missing. This module
imports neither JAX nor third-party packages.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from jaxdp.registry import Registry


@dataclass(frozen=True)
class Choice:
    """One value of a config field.

    help: noun phrase for `--help`. uses: names of the fields that the implementation of the choice reads, separated by spaces.
    A field that some choices use is rejected with the other choices, unless it has its default.
    """

    help: str
    uses: str = ""


@dataclass(frozen=True)
class Source(Choice):
    """A data source.

    in_memory: it makes its images itself, in one size. classes: their number, if known without the data. train_split,
    eval_split: allowed values (None: any). train_images: size of the training set, if published. mean, std: pixel statistics
    for normalization, on the scale 0 to 255, per channel or for all channels.
    """

    in_memory: bool = False
    classes: int | None = None
    train_split: tuple[str, ...] | None = None
    eval_split: tuple[str, ...] | None = None
    train_images: int | None = None
    mean: float | tuple[float, ...] = (123.675, 116.28, 103.53)  # ImageNet's
    std: float | tuple[float, ...] = (58.395, 57.12, 57.375)


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


class Choices(Registry[Entry, Any]):
    """The choices of one config field.

    field: the field, such as `optimizer.name`. section: the section of the config that holds the fields in `Choice.uses`.
    other: entry for names that are not in the table; None if there are no others.
    """

    def __init__(
        self, field: str, section: str, entries: dict[str, Entry], *, other: Entry | None = None, function: str = ""
    ) -> None:
        super().__init__(field, entries, function=function)
        self.section, self.other = section, other

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

    @property
    def dependent_fields(self) -> list[str]:
        """Fields of `section` that some choices use and others ignore, sorted."""
        used = [frozenset(entry.uses.split()) for entry in self._all()]
        return sorted(used[0].union(*used) - used[0].intersection(*used))

    def ignored_fields(self, name: str) -> list[str]:
        """Fields of `section` that the choice `name` ignores and another choice uses, sorted."""
        return [field for field in self.dependent_fields if field not in self[name].uses.split()]

    def users(self, fields: Iterable[str]) -> list[str]:
        """Names of the choices that use all of `fields`."""
        needed = set(fields)
        return [name for name, entry in self.entries.items() if needed <= set(entry.uses.split())]

    def check_fields(self, section: type) -> None:
        """Raise TypeError for a name in `Choice.uses` that the dataclass `section` has no field for."""
        known = {field.name for field in fields(section)}
        for name, entry in [*self.entries.items(), *([("another name", self.other)] if self.other else [])]:
            if missing := [field for field in entry.uses.split() if field not in known]:
                raise TypeError(f"{self.field}: {name} uses {', '.join(missing)}, which {section.__name__} does not have")

    def _all(self) -> list[Choice]:
        return [*self.entries.values(), *([self.other] if self.other else [])]


OPTIMIZERS = Choices(
    "optimizer.name",
    "optimizer",
    {
        "lars": UpdateRule(
            "layer-wise adaptive rate scaling (You et al.)",
            "weight_decay nesterov velocity_dtype trust_coefficient eps denominator adapt",
            uses_weight_norms=True,
        ),
        "sgd": UpdateRule("stochastic gradient descent with momentum", "weight_decay nesterov velocity_dtype"),
        "adamw": UpdateRule(
            "Adam with decoupled weight decay (Loshchilov & Hutter)",
            "weight_decay velocity_dtype beta2 adam_eps",
            accumulates=False,
        ),
        "lamb": UpdateRule(
            "layer-wise scaled Adam (You et al.)",
            "weight_decay velocity_dtype beta2 adam_eps",
            accumulates=False,
            uses_weight_norms=True,
        ),
    },
    other=UpdateRule(
        "or a name registered with `jaxdp.register_optimizer`",
        "weight_decay nesterov velocity_dtype trust_coefficient eps denominator adapt beta2 adam_eps",
    ),
    function="register_optimizer",
)
MOMENTUM_RULES = Choices(
    "optimizer.momentum_rule",
    "optimizer",
    {
        "constant": Choice("the same for all batches"),
        "noise_scale": Choice("keeps learning rate / (batch * (1 - momentum)) constant", "momentum_batch"),
        "as_printed": Choice("the formula printed by Mikami et al.", "momentum_batch"),
    },
)
SCHEDULES = Choices(
    "schedule.name",
    "schedule",
    {
        "cosine": Choice("warm-up, then half a cosine down to `end`", "start end"),
        "polynomial": Choice("warm-up, then (1 - progress)^power down to `end`", "start end power"),
        "goyal": Choice("step decay, scaled linearly with the batch (Goyal et al.)", "boundaries factor"),
        "sony_a": Choice("configuration A of Mikami et al., polynomial", "start end power"),
        "sony_b": Choice("configuration B of Mikami et al., with step decay", "start power boundaries factor"),
    },
)
LOSSES = Choices(
    "optimizer.loss",
    "optimizer",
    {
        "softmax": Loss("cross entropy of the softmax over the classes"),
        "binary": Loss(
            "binary cross entropy of each class, averaged over the classes",
            "target_threshold",
            chance=lambda _: math.log(2),
            title="binary cross entropy",
        ),
        "binary_sum": Loss(
            "its sum over the classes",
            "target_threshold",
            chance=lambda classes: classes * math.log(2),
            title="sum of binary cross entropies",
        ),
    },
)
LOSS_SCALES = Choices(
    "loss_scale.name",
    "loss_scale",
    {
        "none": Choice(""),
        "static": Choice("fixed", "initial"),
        "dynamic": Choice(
            "halved when a gradient is not finite, and the step skipped; doubled after `growth_steps` finite steps",
            "initial growth_steps minimum maximum give_up_after",
        ),
    },
)
AUGMENTATIONS = Choices(
    "data.augmentation",
    "augment",
    {
        "none": Augmentation(""),
        "digits": Augmentation("small rotations, scales, shears and shifts"),
        "paper": Augmentation(
            "Mikami et al.",
            "flip padding",
            resizes=True,
        ),
        "random_resized_crop": Augmentation(
            "crop of random area and aspect ratio, flip", "flip min_area crop_interpolation", resizes=True
        ),
        "pad_and_crop": Augmentation("crop of the padded image, flip", "flip padding"),
    },
)
AUTO_AUGMENTS = Choices(
    "data.auto_augment",
    "augment",
    {
        "none": Choice(""),
        "rand_augment": Choice(
            "RandAugment (Cubuk et al.) as in torchvision, 14 operations", "operations magnitude operation_interpolation"
        ),
        "trivial_augment": Choice("TrivialAugmentWide (Müller & Hutter) as in torchvision", "operation_interpolation"),
        "rand_augment_increasing": Choice(
            "RandAugment as in timm's rand-m7-mstd0.5-inc1, 15 operations",
            "operations magnitude magnitude_std operation_interpolation",
        ),
    },
)
MIXES = Choices(
    "data.mix",
    "data",
    {
        "none": Choice(""),
        "mixup": Choice("blend of whole images (Zhang et al.)", "mix_alpha"),
        "cutmix": Choice("rectangle of the other image (Yun et al.)", "mix_alpha"),
        "mixup_or_cutmix": Choice("one of the two, drawn for each worker's batch", "mix_alpha cutmix_alpha"),
    },
)
READ_FROM_DISK = "directory threads train_split eval_split eval_size eval_resize eval_crop eval_interpolation"
SOURCES = Choices(
    "data.source",
    "data",
    {
        "digits": Source(
            "scikit-learn's handwritten digits (1,797 real images)",
            "train_split eval_split",
            in_memory=True,
            classes=10,
            train_split=("train", "fit"),
            eval_split=("test", "validation"),
            mean=78.0,
            std=89.0,
        ),
        "synthetic": Source(
            "seeded images of any size and number", "train_examples eval_examples", in_memory=True, mean=127.5, std=52.0
        ),
        "folder": Source("images in `directory`/SPLIT/CLASS/", READ_FROM_DISK),
        "given": Source("the `datasets` argument of `jaxdp.train`", READ_FROM_DISK),
        "imagenet2012": Source("ImageNet", READ_FROM_DISK, classes=1000, train_images=1_281_167),
        "cifar10": Source("CIFAR-10", READ_FROM_DISK, classes=10, train_images=50_000),
    },
    other=Source("or any data set prepared by tensorflow-datasets, as NAME, NAME/CONFIG or NAME:VERSION", READ_FROM_DISK),
)
BATCH_STATISTICS = Choices(
    "model.statistics",
    "model",
    {
        "moving_average": Choice("moving averages over the training batches", "norm_momentum"),
        "last_batch": Choice("statistics of the last training batch over all workers"),
    },
)
NON_FINITE = Choices(
    "guard.non_finite",
    "guard",
    {"stop": Choice("end the run"), "skip": Choice("skip the step (dynamic loss scaling always does)", "skip_at_most")},
)
STOP_METRICS = Choices(
    "stop.metric",
    "stop",
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
