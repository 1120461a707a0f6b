"""Is a configuration one that can be run: types, ranges and relations between fields, and the JSON round trip."""

import dataclasses
import json
import re

from pydantic import TypeAdapter, ValidationError

from jaxdp.config import HARMLESS, IN_MEMORY, RESNET, Config, ConfigError, Data, Finetune
from jaxdp.flags import nearest
from jaxdp.registry import check_names

# Fields that mean something only where another field has one of these values; elsewhere they must keep their defaults.
USED_ONLY_WITH = (
    ("schedule.name", ("cosine", "polynomial", "sony_a", "sony_b"), "schedule", "start"),
    ("schedule.name", ("cosine", "polynomial", "sony_a"), "schedule", "end"),
    ("schedule.name", ("polynomial", "sony_a", "sony_b"), "schedule", "power"),
    ("schedule.name", ("goyal", "sony_b"), "schedule", "boundaries factor"),
    ("optimizer.name", ("lars",), "optimizer", "trust_coefficient eps denominator"),
    ("optimizer.momentum_rule", ("noise_scale", "as_printed"), "optimizer", "momentum_batch"),
    ("model.statistics", ("moving_average",), "model", "norm_momentum"),
    ("loss_scale.name", ("static", "dynamic"), "loss_scale", "initial"),
    ("loss_scale.name", ("dynamic",), "loss_scale", "growth_steps minimum maximum give_up_after"),
    ("data.augmentation", ("paper",), "augment", "min_scale max_scale angle aspect distortion"),
    ("data.augmentation", ("paper",), "augment", "brightness contrast contrast_centre noise"),
    ("data.augmentation", ("paper", "random_resized_crop", "pad_and_crop"), "augment", "flip"),
    ("data.augmentation", ("paper", "pad_and_crop"), "augment", "padding"),
    ("data.augmentation", ("random_resized_crop",), "augment", "min_area"),
    ("guard.non_finite", ("skip",), "guard", "skip_at_most"),
    ("data.mix", ("mixup", "cutmix"), "data", "mix_alpha"),
    ("data.source", ("synthetic",), "data", "train_examples eval_examples"),
)


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The Config that `to_json` wrote. Raises ConfigError for unknown fields, wrong types and values out of range."""
    try:
        config = TypeAdapter(Config).validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None
    _check_relations(config)
    return config


def from_dict(held: dict) -> Config:
    """The Config of a dict as `dataclasses.asdict` makes it, perhaps by way of JSON."""
    return from_json(json.dumps(held))


def validate(config: Config) -> Config:
    """The same Config, or ConfigError: one line that names the field, the value and what is allowed."""
    if not isinstance(config, Config):
        raise ConfigError(f"config: {config!r} is not allowed; give a jaxdp.Config")
    try:
        config = from_json(to_json(config))
    except TypeError as error:
        raise ConfigError(f"config: {error}; fields hold numbers, strings, booleans, tuples and None") from None
    check_names(config)
    return config


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    message = first["msg"][0].lower() + first["msg"][1:]
    if first["type"] == "json_invalid":
        return f"the configuration is not valid JSON: {message}"
    if first["type"] == "unexpected_keyword_argument":
        owner = Config()
        for part in first["loc"][:-1]:
            owner = owner[0] if isinstance(part, int) else getattr(owner, part)
        known = [f.name for f in dataclasses.fields(owner)]
        near = nearest(str(first["loc"][-1]), known)
        return f"{path}: unknown field; " + (f"did you mean {near}?" if near else f"known are {', '.join(known)}")
    if not path:
        return f"the configuration is {first['input']!r}, which is not allowed; give an object with fields such as name"
    return f"{path}: {first['input']!r} is not allowed; {message}"


def _check_relations(config: Config) -> None:
    """What no single field can know."""
    _check_used(config)
    profiled_steps(config.logging.profile)
    if not config.batch:
        raise ConfigError("batch: () is not allowed; give at least one phase")
    before = 0.0
    for index, phase in enumerate(config.batch):
        here, last = f"batch.{index}", index == len(config.batch) - 1
        if phase.until_epoch is None and not last:
            raise ConfigError(f"{here}.until_epoch: None is not allowed; only the last phase may leave it out")
        end = config.epochs if phase.until_epoch is None else phase.until_epoch
        if end <= before:
            what = f"{here}.until_epoch" if phase.until_epoch is not None else "epochs"
            raise ConfigError(
                f"{what}: {end:g} is not allowed; phases go forward, so it must be above batch.{index - 1}.until_epoch "
                f"({before:g})"
            )
        if last and end != config.epochs:
            raise ConfigError(
                f"{here}.until_epoch: {end:g} is not allowed; the last phase ends with the run "
                f"(epochs {config.epochs:g}); leave it out"
            )
        if phase.per_worker_batch is not None and phase.global_batch % phase.per_worker_batch:
            whole, part = phase.global_batch, phase.per_worker_batch
            divisor = min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - part))
            batch = max(1, round(whole / part)) * part
            raise ConfigError(
                f"{here}.per_worker_batch: {part} is not allowed; it must divide the global batch {whole}; the nearest that "
                f"does is {divisor}, or give --{here.replace('_', '-')}.global-batch {batch}"
            )
        before = end
    if config.compile.deterministic and config.reduce.strategy == "auto":
        raise ConfigError(
            "compile.deterministic: True is not allowed with reduce.strategy 'auto', which measures anew in another directory "
            "and may choose otherwise; give the strategy by name, as `jaxdp bench allreduce` recommends"
        )
    if config.augment.min_scale > config.augment.max_scale:
        raise ConfigError(
            f"augment.min_scale: {config.augment.min_scale:g} is not allowed; it must not exceed augment.max_scale "
            f"({config.augment.max_scale:g})"
        )
    stored = config.data.stored_size
    if config.data.augmentation in ("none", "digits", "pad_and_crop") and stored not in (None, config.data.image_size):
        raise ConfigError(
            f"data.stored_size: {stored} is not allowed with data.augmentation {config.data.augmentation!r}; it crops from no "
            f"other size than data.image_size ({config.data.image_size}); leave it out"
        )
    scale = config.loss_scale
    for name, value in (("model.dtype", config.model.dtype), ("reduce.wire_dtype", config.reduce.wire_dtype)):
        if value == "float16" and scale.name == "none":
            raise ConfigError(
                f"{name}: 'float16' is not allowed without loss scaling; give --loss-scale.name dynamic (or static), or "
                f"--{name.replace('_', '-')} bfloat16"
            )
    if scale.name == "dynamic" and not scale.minimum <= scale.initial <= scale.maximum:
        raise ConfigError(
            f"loss_scale.initial: {scale.initial:g} is not allowed; it must lie from loss_scale.minimum ({scale.minimum:g}) "
            f"to loss_scale.maximum ({scale.maximum:g})"
        )
    if config.schedule.warmup_epochs >= config.epochs:
        raise ConfigError(
            f"schedule.warmup_epochs: {config.schedule.warmup_epochs:g} is not allowed; "
            f"it must be below epochs ({config.epochs:g})"
        )
    if list(config.schedule.boundaries) != sorted(set(config.schedule.boundaries)):
        raise ConfigError(f"schedule.boundaries: {config.schedule.boundaries} is not allowed; it must increase")
    if config.schedule.boundaries and config.schedule.warmup_epochs > config.schedule.boundaries[0]:
        raise ConfigError(
            f"schedule.warmup_epochs: {config.schedule.warmup_epochs:g} is not allowed; it must end by the first of "
            f"schedule.boundaries ({config.schedule.boundaries[0]:g})"
        )
    _check_finetune(config)
    _check_data(config.data)
    needed = {"digits": 10, "cifar10": 10, "imagenet2012": 1000}.get(config.data.source, 2)
    if config.model.classes < needed:
        raise ConfigError(
            f"model.classes: {config.model.classes} is not allowed; {config.data.source} needs at least {needed}; give as "
            "many, or another data.source ('given' for datasets of your own)"
        )


def _check_finetune(config: Config) -> None:
    """What means something only where a run begins from a file of weights."""
    own = config.finetune
    if config.model.name != RESNET and own != Finetune():
        raise ConfigError(
            f"finetune: {own} is not allowed with model.name {config.model.name!r}; it knows resnet; leave it out"
        )
    if own.weights is not None:
        return
    if own.frozen_stages:
        raise ConfigError(
            f"finetune.frozen_stages: {own.frozen_stages} is not allowed without finetune.weights; random weights would stay "
            "so; give --finetune.weights FILE, or 0"
        )
    if own.new_head:
        raise ConfigError(
            "finetune.new_head: True is not allowed without finetune.weights; the classifier is new; leave it out"
        )
    if own.digest is not None:
        raise ConfigError(f"finetune.digest: {own.digest!r} is not allowed without finetune.weights; leave it out")


def profiled_steps(text: str | None) -> range | None:
    """The steps that `logging.profile` names, from 1. Raises ConfigError where it is not FIRST,COUNT."""
    if text is None:
        return None
    if not (found := re.fullmatch(r"([1-9][0-9]{0,11}),([1-9][0-9]{0,11})", text)):
        raise ConfigError(
            f"logging.profile: {text!r} is not allowed; it must be FIRST,COUNT: the first step to trace, from 1, and how many; "
            "give for example 10,5"
        )
    first, count = map(int, found.groups())
    return range(first, first + count)


def _check_data(data: Data) -> None:
    """What a source needs and what it does not know."""
    if data.source in IN_MEMORY:
        for name in ("directory", "threads"):
            if getattr(data, name) is not None:
                raise ConfigError(
                    f"data.{name}: {getattr(data, name)!r} is not allowed; {data.source} needs none; leave it out"
                )
    if data.source == "folder" and data.directory is None:
        raise ConfigError("data.directory: None is not allowed with data.source 'folder'; give the folder of SPLIT/CLASS/IMAGE")
    if data.source == "digits":
        for name, allowed in (("train_split", ("train", "fit")), ("eval_split", (None, "test", "validation"))):
            value = getattr(data, name)
            if value not in allowed:
                there = " and ".join(part for part in allowed if part)
                raise ConfigError(f"data.{name}: {value!r} is not allowed; the digits have {there}")
        if data.train_split == "train" and data.eval_split == "validation":
            raise ConfigError(
                "data.eval_split: 'validation' is not allowed; it is part of the training images "
                "unless data.train_split is 'fit'"
            )
    if data.source == "synthetic" and (data.train_split != "train" or data.eval_split is not None):
        raise ConfigError(
            "data.train_split, data.eval_split: not allowed with data.source 'synthetic', which has none; leave them out"
        )
    if data.source not in IN_MEMORY and data.augmentation == "random_resized_crop" and data.stored_size is not None:
        raise ConfigError(
            f"data.stored_size: {data.stored_size} is not allowed with random_resized_crop, which crops images of "
            f"{data.source} as they are decoded; leave it out"
        )


def changes(old: Config, new: Config, ignore=HARMLESS) -> list[str]:
    """Fields in which two configs differ, each as `field: old -> new`, leaving out the parts named in `ignore`."""
    flat_old, flat_new = flatten(dataclasses.asdict(old)), flatten(dataclasses.asdict(new))
    return [
        f"{name}: {flat_old.get(name)!r} -> {flat_new.get(name)!r}"
        for name in sorted(flat_old.keys() | flat_new.keys())
        if flat_old.get(name) != flat_new.get(name) and not any(f"{name}.".startswith(f"{part}.") for part in ignore)
    ]


def flatten(tree, prefix="") -> dict:
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, (tuple, list)) and tree and isinstance(tree[0], dict):
        items = enumerate(tree)
    else:
        return {prefix[:-1]: tree}
    return {name: value for key, part in items for name, value in flatten(part, f"{prefix}{key}.").items()}


def _check_used(config: Config) -> None:
    """A value that would be ignored is an error, so that nobody believes it at work."""
    values, defaults = flatten(dataclasses.asdict(config)), flatten(dataclasses.asdict(Config()))
    for chooser, allowed, part, names in USED_ONLY_WITH:
        fields = [f"{part}.{name}" for name in names.split()]
        ignored = [name for name in fields if values[name] != defaults[name]]
        if ignored and values[chooser] not in allowed:
            raise ConfigError(
                f"{', '.join(f'{name}: {values[name]!r}' for name in ignored)} is not allowed with {chooser} "
                f"{values[chooser]!r}, which does not use it; give {chooser} {' or '.join(allowed)}, or the default: "
                + " ".join(_flag(name, defaults[name]) for name in ignored)
            )


def _flag(name: str, value) -> str:
    """A field and its value as the command line takes them."""
    if isinstance(value, bool):
        *parts, last = name.replace("_", "-").split(".")
        return "--" + ".".join([*parts, last if value else f"no-{last}"])
    words = [str(part) for part in value] if isinstance(value, tuple) else [str(value)]
    return " ".join([f"--{name.replace('_', '-')}", *words])
