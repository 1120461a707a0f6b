"""Validation of configurations: types, ranges, and fields that do not fit together.

Also their conversion from and to JSON, and what differs between two of them.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jaxdp import metrics
from jaxdp.choices import AUGMENTATIONS, AUTO_AUGMENTS, LOSSES, MIXES, MODELS, OPTIMIZERS, SOURCES, TASKS, kind_of_task
from jaxdp.config import BELOW_ONE, LARGEST_LEVEL, RESNET, Config, Group, Optimizer
from jaxdp.errors import ConfigError, one_of, plural, suggest
from jaxdp.fields import SMALLEST, Section
from jaxdp.files import check_local, check_no_password, expand_user
from jaxdp.metrics import METRICS
from jaxdp.registry import Choices
from jaxdp.schedules import MOMENTUM_RULES, SCHEDULES
from jaxdp.strategies import STRATEGIES
from jaxdp.task import Task

TABLES: tuple[Choices, ...] = (
    OPTIMIZERS,
    MOMENTUM_RULES,
    SCHEDULES,
    LOSSES,
    AUGMENTATIONS,
    AUTO_AUGMENTS,
    MIXES,
    SOURCES,
)
REGISTRIES = (MODELS, OPTIMIZERS, LOSSES, SCHEDULES, AUTO_AUGMENTS, STRATEGIES, TASKS)  # besides data and metrics
# Fields that change where and how a run executes, not what it computes: a run may resume with other values.
RESUME_SAFE_FIELDS = (
    "name",
    "scale_schedule",
    "mesh",
    "reduce.strategy",
    "reduce.bucket_bytes",
    "reduce.overlap",
    "reduce.update",
    "logging",
    "checkpoint",
    "guard",
    "finetune.weights",  # identified by finetune.digest
    "compile",
    "storage",
    "data.directory",
    "data.threads",
)
REMOVED = {"finetune.head_multiplier": "remove it; for a rate other than 1, add the group fc:rate=RATE to optimizer.groups"}
ALL_BLOCKS_FROZEN = 5  # of finetune.frozen_stages
PATHS = ("data.directory", "finetune.weights", "storage.directory")  # fields whose ~ is the home directory


def validate(config: Config, *, trains: bool = True) -> Config:
    """An equal Config with checked values. Raises ConfigError for the first invalid field.

    trains: whether all parts that the config names must be registered; False: the model.
    """
    check_type(config)
    config = _checked(lambda: _adapter().validate_python(config))
    if trains:
        check_names(config)
    else:
        MODELS.check(config.model.name)
    return config


def check_type(config: Any) -> None:
    """Raise ConfigError for anything but a Config, such as the name of a recipe."""
    if not isinstance(config, Config):
        hint = f"use jaxdp.load_config({str(config)!r})" if isinstance(config, (str, Path)) else ""
        raise ConfigError("config", config, reason="must be a jaxdp.Config", hint=hint)


def to_json(config: Config) -> str:
    """The Config as a JSON document."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The Config written by `to_json`. Raises ConfigError for unknown fields, wrong types and values out of range."""
    return _checked(lambda: _adapter().validate_json(text))


def _checked(parse: Callable[[], Config]) -> Config:
    try:
        config = parse()
    except ValidationError as error:
        raise _config_error(error) from None
    for path in PATHS:
        if (value := attrgetter(path)(config)) is not None:
            config = with_fields(config, {path: expand_user(value, path)})
    for field, value in flatten(dataclasses.asdict(config)).items():
        check_no_password(value, field)
    for check in (_check_dependent_fields, _check_sections, *RELATIONS):
        check(config)
    return config


def from_dict(tree: dict[str, Any]) -> Config:
    """The Config of a dict as `dataclasses.asdict` returns it, possibly converted to JSON and back."""
    return _checked(lambda: _adapter().validate_python(tree))


@cache  # slow to construct
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _config_error(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if not re.search(r"\[|^(int|float)$", str(part)))  # types of a union
    reason = re.sub(r"^(Input|String) should ", "must ", first["msg"])
    bound = next(iter(first.get("ctx", {}).values()), None)
    if bound == SMALLEST and first["input"] <= 0:
        reason = "must be greater than 0"
    elif bound == BELOW_ONE and first["input"] >= 1:
        reason = "must be less than 1"
    elif isinstance(bound, float):
        reason = f"{reason.rpartition(' ')[0]} {bound:.10g}"  # pydantic writes all digits
    if first["type"] == "json_invalid":
        return ConfigError("config", reason=f"invalid JSON: {reason}")
    if first["type"] == "unexpected_keyword_argument":
        part: Any = Config()
        for name in first["loc"][:-1]:
            part = (part or (Group("any"),))[0] if isinstance(name, int) else getattr(part, name)
        if removed := REMOVED.get(field):
            return ConfigError(field, reason="removed", hint=removed)
        known = [known.name for known in dataclasses.fields(part)]
        return ConfigError(field, reason="unknown field", hint=suggest(str(first["loc"][-1]), known))
    if not field:
        return ConfigError("config", first["input"], reason="must be a JSON object with fields such as name")
    return ConfigError(field, first["input"], reason=reason)


def _check_dependent_fields(config: Config) -> None:
    values, defaults = flatten(dataclasses.asdict(config)), flatten(dataclasses.asdict(Config()))
    for table in TABLES:
        choice = values[table.field]
        if changed := [field for field in table.ignored_fields(choice) if values[field] != defaults[field]]:
            users = [name for name in table.builtin if {*changed} <= {*table.read_fields(name)}]
            normal = {field: "empty" if defaults[field] == () else defaults[field] for field in changed}
            omitted = ", ".join(f"{field} (default: {value})" for field, value in normal.items())
            others = f" (or {', '.join(users[1:])})" if users[1:] else ""
            set_choice = f"use --{table.field.replace('_', '-')} {users[0]}{others}, or " if users else ""
            reason = f"not used with {table.field}={choice!r}"
            raise ConfigError(changed[0], values[changed[0]], reason=reason, hint=f"{set_choice}omit {omitted}")


def _check_sections(config: Config) -> None:
    for section in vars(config).values():
        if isinstance(section, Section):
            section.check()


def changes(old: Config, new: Config, ignore: Iterable[str] = RESUME_SAFE_FIELDS) -> list[str]:
    """Fields that differ between two configs, each as `field: old -> new`. ignore: fields and sections to leave out.

    Fields that `scale_schedule` scales with the number of epochs are not listed but mentioned with it. "auto" of
    `model.batch_norm` equals the form that it selects.
    """
    flat_old, flat_new = map(_comparable, (old, new))
    changed = {
        name: (flat_old.get(name), flat_new.get(name))
        for name in sorted(flat_old.keys() | flat_new.keys())
        if flat_old.get(name) != flat_new.get(name) and not any(f"{name}.".startswith(f"{part}.") for part in ignore)
    }
    scaled = [name for name, values in changed.items() if _is_scaled(name, values, ratio=new.epochs / old.epochs)]
    lines = {name: f"{name}: {_change(*values)}" for name, values in changed.items() if name not in scaled}
    if scaled:
        lines["epochs"] += ", which scales the schedule"
    return list(lines.values())


def _comparable(config: Config) -> dict[str, Any]:
    """The leaves of a config, with each group as text."""
    leaves = {name: value for name, value in flatten(dataclasses.asdict(config)).items() if "optimizer.groups" not in name}
    groups = tuple(map(str, config.optimizer.groups))
    return leaves | {"model.batch_norm": config.model.resolved_batch_norm, "optimizer.groups": groups}


def _is_scaled(name: str, values: tuple[Any, Any], *, ratio: float) -> bool:
    """Whether a field has changed as `scale_schedule` changes it with the number of epochs."""
    if ratio == 1 or not re.fullmatch(
        r"batch\.\d+\.until_epoch|schedule\.(warmup_epochs|boundaries)|finetune\.unfreeze_epoch", name
    ):
        return False
    before, after = (value if isinstance(value, tuple) else (value,) for value in values)
    if len(before) != len(after) or None in (*before, *after):
        return False
    return all(math.isclose(epoch * ratio, scaled) for epoch, scaled in zip(before, after, strict=True))


def _change(old: Any, new: Any) -> str:
    """`old -> new` with four significant digits, or more if they differ only there."""

    def short(value: Any) -> str:
        if isinstance(value, tuple):
            return f"({', '.join(map(short, value))})"
        return f"{value:.4g}" if isinstance(value, float) else repr(value)

    texts = short(old), short(new)
    return f"{old!r} -> {new!r}" if texts[0] == texts[1] else " -> ".join(texts)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dicts and of lists of dicts, by dotted names such as `batch.0.global_batch`."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, (tuple, list)) and tree and isinstance(tree[0], dict):
        items = enumerate(tree)
    else:
        return {prefix[:-1]: tree}
    return {name: value for key, part in items for name, value in flatten(part, f"{prefix}{key}.").items()}


def with_choices(config: Config, chosen: Mapping[str, str]) -> Config:
    """`config` with the choices in `chosen`, such as {"optimizer.name": "sgd"}, and defaults in the fields that they ignore.

    With another source, a number of classes that the config's source gave is reset too.
    """
    defaults, classes = flatten(dataclasses.asdict(Config())), SOURCES[config.data.source].classes
    if chosen.get(SOURCES.field, config.data.source) != config.data.source and config.model.classes == classes:
        config = with_fields(config, {"model.classes": None})
    config = with_fields(config, chosen)
    for table in TABLES:
        if table.field in chosen:
            config = with_fields(config, {field: defaults[field] for field in table.ignored_fields(chosen[table.field])})
    if {SOURCES.field, AUGMENTATIONS.field} & chosen.keys():
        config = with_fields(config, {field: defaults[field] for field in unusable_fields(config)})
    return config


def with_fields(config: Config, values: Mapping[str, Any]) -> Config:
    """`config` with other values in the fields SECTION.FIELD."""
    for path, value in values.items():
        section, _, field = path.partition(".")
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{field: value})})
    return config


# Relations between the sections of a config; those within a section are in its method `check`.


def _check_phases(config: Config) -> None:
    """Phases end in order, and the last one with the run."""
    if not config.batch:
        raise ConfigError("batch", (), reason="needs at least one phase")
    last, previous_end = len(config.batch) - 1, 0.0
    for index, phase in enumerate(config.batch):
        field = f"batch.{index}.until_epoch"
        if phase.until_epoch is None and index < last:
            raise ConfigError(field, None, reason="required for all phases but the last")
        end = config.epochs if phase.until_epoch is None else phase.until_epoch
        if end <= previous_end and phase.until_epoch is None:
            reason = f"phase {index - 1} must end before the run (epochs={config.epochs:g})"
            load = f"in Python use load_config(name, ['--epochs', '{config.epochs:g}']), which scales the phases"
            hint = f"lower it, or {load if config.scale_schedule else 'omit --no-scale-schedule'}"
            raise ConfigError(f"batch.{index - 1}.until_epoch", previous_end, reason=reason, hint=hint)
        if end <= previous_end:
            raise ConfigError(field, end, reason=f"must be greater than batch.{index - 1}.until_epoch ({previous_end:g})")
        if index == last and end != config.epochs:
            reason = f"the last phase ends with the run (epochs={config.epochs:g})"
            raise ConfigError(field, end, reason=reason, hint="omit it")
        previous_end = end


def _check_worker_batches(config: Config) -> None:
    for index, phase in enumerate(config.batch):
        whole, part = phase.global_batch, phase.per_worker_batch
        if part is not None and whole % part:
            divisors = {d for n in range(1, math.isqrt(whole) + 1) if whole % n == 0 for d in (n, whole // n)}
            divisor = min(divisors, key=lambda n: (abs(n - part), n))
            batch = max(1, round(whole / part)) * part
            hint = f"use --batch.{index}.per-worker-batch {divisor}, or --batch.{index}.global-batch {batch}"
            raise ConfigError(
                f"batch.{index}.per_worker_batch", part, reason=f"must divide the global batch {whole}", hint=hint
            )


def _check_augmentation(config: Config) -> None:
    data, name = config.data, config.data.augmentation
    for field, reason in unusable_fields(config).items():
        raise ConfigError(field, attrgetter(field)(config), reason=reason, hint="omit it")
    for index, phase in enumerate(config.batch):
        if phase.image_size is not None and data.stored_size is not None and not AUGMENTATIONS[name].resizes:
            reason = f"data.augmentation={name!r} does not resize images of data.stored_size ({data.stored_size})"
            raise ConfigError(f"batch.{index}.image_size", phase.image_size, reason=reason, hint="omit data.stored_size")


def unusable_fields(config: Config) -> dict[str, str]:
    """Fields that the source and the augmentation together cannot use, each with the reason."""
    data, name = config.data, config.data.augmentation
    unusable = {}
    if data.stored_size not in (None, data.image_size) and not AUGMENTATIONS[name].resizes:
        reason = f"data.augmentation={name!r} does not resize; must equal data.image_size ({data.image_size})"
        unusable["data.stored_size"] = reason
    if data.stored_size is not None and data.crops_while_loading:
        unusable["data.stored_size"] = f"random_resized_crop crops images of {data.source} while decoding"
    crops_on_device = name == "random_resized_crop" and not data.crops_while_loading
    if config.augment.crop_interpolation != "unfiltered" and crops_on_device:
        unusable["augment.crop_interpolation"] = f"images of {data.source} are cropped on the device, not while decoding"
    return unusable


def _check_policies(config: Config) -> None:
    ranges, policy = config.augment, config.data.auto_augment
    if ranges.magnitude is not None and policy == "rand_augment" and ranges.magnitude % 1:
        hint = f"use {round(ranges.magnitude)}"
        raise ConfigError("augment.magnitude", ranges.magnitude, reason="must be a whole number with rand_augment", hint=hint)
    if ranges.magnitude is not None and policy == "rand_augment_increasing" and ranges.magnitude > LARGEST_LEVEL:
        reason = f"must not exceed {LARGEST_LEVEL:g} with rand_augment_increasing"
        raise ConfigError("augment.magnitude", ranges.magnitude, reason=reason, hint="the published one is 7")


def check_targets(config: Config) -> None:
    """Targets by `optimizer.target_threshold` depend on the label. Not checked while the number of classes is unknown."""
    threshold, smoothing = config.optimizer.target_threshold, config.optimizer.label_smoothing
    classes = config.model.classes or SOURCES[config.data.source].classes
    if threshold is None or classes is None:
        return
    others = smoothing / classes
    own = 1 - smoothing + others
    error = partial(ConfigError, "optimizer.target_threshold", threshold)
    if smoothing and threshold <= others:
        other = f"optimizer.label_smoothing / classes ({others:.4g})"
        reason = f"all targets are 1: it must exceed the target of other classes, {other}"
        raise error(reason=reason, hint="raise it, or lower optimizer.label_smoothing")
    if threshold >= own:
        reason = f"all targets are 0: it must be below the target of the true class ({own:.4g})"
        raise error(reason=reason, hint="lower it, or optimizer.label_smoothing")


def check_class_weights(config: Config) -> None:
    """Each class has a weight. Not checked while the number of classes is unknown."""
    weights, classes = config.optimizer.class_weights, config.model.classes or SOURCES[config.data.source].classes
    if weights and weights != "balanced" and classes is not None and len(weights) != classes:
        reason = f"{plural(len(weights), 'weight')} for {plural(classes, 'class')}"
        hint = "give one for each class, or use balanced"
        raise ConfigError("optimizer.class_weights", weights, reason=reason, hint=hint)
    if TASKS[config.task].own:  # has its own loss, see `_check_own_task`
        return
    able = TASKS[config.task].losses or ("softmax",)
    if weights and config.optimizer.loss not in able:
        reason = f"not used with optimizer.loss={config.optimizer.loss!r}"
        raise ConfigError("optimizer.class_weights", weights, reason=reason, hint=f"use {' or '.join(able)}, or omit it")


def check_stop(config: Config) -> None:
    """Early stopping follows a metric that the evaluations have. Not checked while the number of classes is unknown."""
    metric, classes = config.deciding_metric, config.model.classes or SOURCES[config.data.source].classes
    known = metrics.names(config.task, classes)
    if metric in METRICS and metric not in known:
        reason = f"not a metric of the task {config.task!r}"
        if classes is not None and metric in metrics.names(config.task):
            reason = f"with {plural(classes, 'class')}, {METRICS[metric].lacking}"
        raise ConfigError("stop.metric", metric, reason=reason, hint=f"use {' or '.join(known)}")


def _check_task(config: Config) -> None:
    """The loss and the number of classes of a task."""
    entry = TASKS[config.task]
    if entry.own is not None:
        _check_own_task(config, entry.own)
    elif entry.losses and config.optimizer.loss in LOSSES.builtin and config.optimizer.loss not in entry.losses:
        reason, hint = f"not possible with task={config.task!r}", f"use {' or '.join(entry.losses)}, or a registered loss"
        raise ConfigError("optimizer.loss", config.optimizer.loss, reason=reason, hint=hint)
    if config.data.sampling == "balanced" and kind_of_task(config.task) != "classes":
        reason = f"task={config.task!r} has no classes, one for each image"
        raise ConfigError("data.sampling", "balanced", reason=reason, hint="use weights")
    if config.task in TASKS and entry.targets is None and config.model.classes == 1:
        raise ConfigError("model.classes", 1, reason=f"task={config.task!r} needs at least two", hint="omit it")


def _check_own_task(config: Config, task: Task) -> None:
    """A registered task has its own loss, and says whether its targets can be mixed and smoothed."""
    optimizer, plain, given = config.optimizer, Optimizer(), f"task={config.task!r}"
    for field in ("loss", "class_weights"):
        if getattr(optimizer, field) != getattr(plain, field):
            reason = f"not used with {given}, which has its own loss"
            raise ConfigError(f"optimizer.{field}", getattr(optimizer, field), reason=reason, hint="omit it")
    if task.like:
        return
    needed = {
        "optimizer.target_threshold": (optimizer.target_threshold, None, None, ""),
        "optimizer.label_smoothing": (optimizer.label_smoothing, plain.label_smoothing, task.smooth, "smooth"),
        "data.mix": (config.data.mix, "none", task.mix, "mix"),
    }
    for field, (value, default, function, name) in needed.items():
        if value != default and function is None:
            hint = f"omit it, or give jaxdp.Task({name}=...)" if name else "omit it"
            raise ConfigError(field, value, reason=f"the targets of {given} do not say what it means", hint=hint)


def _check_blocks(config: Config) -> None:
    model = config.model
    if model.drop_path and config.finetune.always_frozen == ALL_BLOCKS_FROZEN:
        reason = f"not used: finetune.frozen_stages={ALL_BLOCKS_FROZEN} freezes all blocks"
        raise ConfigError("model.drop_path", model.drop_path, reason=reason, hint="omit it, or freeze fewer stages")


def _check_loss_scale(config: Config) -> None:
    for field, value in (("model.dtype", config.model.dtype), ("reduce.wire_dtype", config.reduce.wire_dtype)):
        if value == "float16" and config.optimizer.loss_scale == "none":
            hint = f"use --optimizer.loss-scale dynamic, or --{field.replace('_', '-')} bfloat16"
            raise ConfigError(field, value, reason="requires loss scaling", hint=hint)


def _check_schedule(config: Config) -> None:
    """The warm-up ends before the run, and a schedule that begins later ends with it."""
    schedule, epochs, first = config.schedule, config.epochs, config.schedule.from_epoch
    if first >= epochs:
        reason = f"the schedule must begin before the end of the run (epochs={epochs:g})"
        raise ConfigError("schedule.from_epoch", first, reason=reason, hint="use more --epochs")
    if schedule.name not in SCHEDULES.builtin:  # it reads neither a warm-up nor boundaries
        return
    if schedule.warmup_epochs >= epochs and not first:
        raise ConfigError("schedule.warmup_epochs", schedule.warmup_epochs, reason=f"must be less than epochs ({epochs:g})")
    reason = f"must be less than the {epochs - first:.4g} epochs of the schedule, from epoch {first:g} to {epochs:g}"
    if schedule.warmup_epochs >= epochs - first:
        hint = f"use --schedule.warmup-epochs {schedule.warmup_epochs * (1 - first / epochs):.4g}, or more --epochs"
        raise ConfigError("schedule.warmup_epochs", schedule.warmup_epochs, reason=reason, hint=hint)
    if first and schedule.boundaries and schedule.boundaries[-1] >= epochs - first:
        scaled = " ".join(f"{boundary * (1 - first / epochs):.4g}" for boundary in schedule.boundaries)
        hint = f"use --schedule.boundaries {scaled}, or more --epochs"
        raise ConfigError("schedule.boundaries", schedule.boundaries, reason=reason, hint=hint)


def _check_finetune(config: Config) -> None:
    """The weights are a local file. The parts of a ResNet are known: only they can be frozen. Frozen ones can be unfrozen."""
    check_local(config.finetune.weights, "finetune.weights")
    frozen = config.finetune.frozen_stages
    if config.model.name != RESNET and frozen:
        reason = f"not supported with model.name={config.model.name!r}"
        raise ConfigError("finetune.frozen_stages", frozen, reason=reason, hint="omit it")
    epoch = config.finetune.unfreeze_epoch
    if epoch is not None and not frozen:
        hint = "use --finetune.frozen-stages, or omit it"
        raise ConfigError("finetune.unfreeze_epoch", epoch, reason="nothing is frozen", hint=hint)


def _check_source(config: Config) -> None:
    """The source has the directory, splits and classes that it needs."""
    data, source = config.data, SOURCES[config.data.source]
    if source.layout and data.directory is None:
        reason = f"required with data.source={data.source!r}"
        raise ConfigError("data.directory", None, reason=reason, hint=f"use --data.directory {source.layout}")
    for field, split, allowed in (
        ("data.train_split", data.train_split, source.train_split),
        ("data.eval_split", data.eval_split, source.eval_split),
    ):
        if allowed is not None and split is not None and split not in allowed:
            raise one_of(field, split, allowed)
    disjoint = source.disjoint.get(data.eval_split or "", data.train_split)
    if data.train_split != disjoint:
        reason = f"the {data.eval_split} split is part of the training split {data.train_split}"
        raise ConfigError("data.eval_split", data.eval_split, reason=reason, hint=f"use --data.train-split {disjoint}")
    check_classes(config, source.classes)


def check_classes(config: Config, classes: int | None, source: str | None = None) -> None:
    """Raise ConfigError if the data set has another number of classes than the model.

    classes: its own, None if unknown. source: of the data, if it is not `data.source`.
    """
    source = source or config.data.source
    if classes is not None and config.model.classes not in (None, classes):
        reason = f"data.source={source!r} has {plural(classes, 'class')}"
        hint = f"omit it, or use {classes}"
        if not SOURCES[source].own_images:
            hint += " (data sets given in Python: --data.source given)"
        raise ConfigError("model.classes", config.model.classes, reason=reason, hint=hint)


RELATIONS = (
    _check_phases,
    _check_worker_batches,
    _check_augmentation,
    _check_policies,
    check_targets,
    check_class_weights,
    check_stop,
    _check_task,
    _check_blocks,
    _check_loss_scale,
    _check_schedule,
    _check_finetune,
    _check_source,
)


def check_names(config: Config) -> None:
    """Raise ConfigError if a name in a config, such as its model's, is neither built in nor registered."""
    for table in REGISTRIES:
        table.check(attrgetter(table.field)(config))
    metrics.check(config.deciding_metric)
    if config.reduce.update == "sharded" and (reason := replicated_reason(config)):
        raise ConfigError("reduce.update", "sharded", reason=reason, hint="omit it, or use replicated")


def replicated_reason(config: Config) -> str | None:
    """Why the update of a config cannot be sharded, or None if it can."""
    strategy, optimizer = config.reduce.strategy, config.optimizer.name
    if not STRATEGIES[strategy].scatters:
        able = ", ".join(name for name, each in STRATEGIES.items() if each.scatters)
        return f"reduce.strategy={strategy!r} does not begin with a reduce-scatter and end with an all-gather; {able} does"
    if not OPTIMIZERS[optimizer].shards:
        return f"optimizer.name={optimizer!r} is not registered as elementwise"
    return None
