"""Validation of configurations, conversion from and to JSON, and what differs between two of them."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jaxdp.choices import AUGMENTATIONS, AUTO_AUGMENTS, LOSSES, MIXES, MODELS, OPTIMIZERS, SOURCES, STOP_METRICS
from jaxdp.config import BELOW_ONE, SMALLEST, Config, Section
from jaxdp.errors import ConfigError, suggest
from jaxdp.files import check_no_password, expand_user
from jaxdp.registry import Choices
from jaxdp.relations import RELATIONS, check_names, unusable_fields
from jaxdp.schedules import MOMENTUM_RULES, SCHEDULES

TABLES: tuple[Choices, ...] = (
    OPTIMIZERS,
    MOMENTUM_RULES,
    SCHEDULES,
    LOSSES,
    AUGMENTATIONS,
    AUTO_AUGMENTS,
    MIXES,
    SOURCES,
    STOP_METRICS,
)
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
            part = part[0] if isinstance(name, int) else getattr(part, name)
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
    flat_old, flat_new = (
        flatten(dataclasses.asdict(config)) | {"model.batch_norm": config.model.resolved_batch_norm} for config in (old, new)
    )
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


def _is_scaled(name: str, values: tuple[Any, Any], *, ratio: float) -> bool:
    """Whether a field has changed as `scale_schedule` changes it with the number of epochs."""
    if ratio == 1 or not re.fullmatch(r"batch\.\d+\.until_epoch|schedule\.(warmup_epochs|boundaries)", name):
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
