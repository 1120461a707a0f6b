"""Recipes: configurations by name or file, with command-line flags applied."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import jaxdp.config
from jaxdp.choices import AUGMENTATIONS, SOURCES
from jaxdp.config import Config
from jaxdp.errors import ConfigError, first_line, print_safe, suggest
from jaxdp.files import check_local, expand_user, known_recipes, read_text
from jaxdp.flags import flag_value, parse
from jaxdp.schedules import SCHEDULES
from jaxdp.validation import TABLES, from_json, unusable_fields, validate, with_choices, with_fields

_shows_notes = ContextVar("shows_notes", default=True)
# Variables of the launchers that `jaxdp.distributed.launchers` knows: number of processes -> rank
RANKS = {
    "JAX_NUM_PROCESSES": ("JAX_PROCESS_INDEX", "JAX_PROCESS_ID"),
    "NUM_PROCESSES": ("PROCESS_ID",),
    "WORLD_SIZE": ("RANK",),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK",),
    "SLURM_STEP_NUM_TASKS": ("SLURM_PROCID",),
    "TPU_WORKER_ID": ("TPU_WORKER_ID", "MEGASCALE_SLICE_ID"),
}


def apply_flags(config: Config, flags: list[str]) -> Config:
    """`config` with command-line flags such as ["--batch.0.global-batch", "64"] applied."""
    return parse(type(config), flags, "jaxdp train", default=config)


def find_config(name_or_path: str) -> Path:
    """The file of a recipe. Raises ConfigError if there is none."""
    check_local(name_or_path, "--config")
    path = Path(expand_user(name_or_path, "--config"))
    if path.suffix in (".py", ".json"):
        if path.is_file():
            return path
        raise ConfigError("--config", str(path), reason="file not found")
    known = known_recipes()
    if name_or_path in known:
        return known[name_or_path]
    hint = f"{suggest(name_or_path, sorted(known))}, or use the path of a .py or .json file"
    raise ConfigError("--config", name_or_path, reason="unknown recipe", hint=hint)


def load_config(path_or_name: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The validated config of a recipe: a name in configs/, or the path of a .py file with `config()` or of a saved .json file.

    overrides: command-line flags, for example ["--epochs", "3", "--batch.0.global-batch", "64"]. If a flag chooses another
    optimizer, schedule, augmentation, source or the like, fields that it cannot use return to defaults. Another number of
    epochs scales the recipe's phase ends, warm-up and schedule boundaries, as one line on stderr of rank 0 says;
    `--no-scale-schedule` keeps them.
    Raises ConfigError for a missing file, an unknown field, a wrong type or a value out of range.
    """
    if isinstance(overrides, str):
        raise ConfigError("overrides", overrides, reason="must be a list of flags", hint=f"give {overrides.split()}")
    config, flags = _load(str(path_or_name)).config, [*map(str, overrides)]
    if flags:
        recipe = adapt(config, flags)
        config = validate(apply_flags(recipe.config, flags))
        if recipe.note and _shows_notes.get() and is_rank0():
            print_safe(recipe.note, sys.stderr)
    return config


def _load(path_or_name: str) -> "Recipe":
    """The validated config of a recipe, and its callbacks. Raises ConfigError for a file that cannot be read."""
    path = find_config(path_or_name)
    try:
        if path.suffix == ".json":
            return Recipe(_read_json(path))
        config, callbacks = _run_recipe(path)
        return Recipe(validate(config), callbacks=callbacks)
    except OSError as error:
        raise ConfigError("--config", str(path), reason=error.strerror or "cannot be read") from None
    except UnicodeDecodeError:
        raise ConfigError("--config", str(path), reason="not UTF-8 text") from None


def is_rank0(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the first of its launcher, or the only one."""
    ranks = next((ranks for count, ranks in RANKS.items() if count in environment), ())
    return all(environment.get(rank, "0") == "0" for rank in ranks)


DIGITS_WARNING = "warning: without --config, images become 32x32 and are augmented as digits; --config pictures is for your own"


class Recipe(NamedTuple):
    """A recipe adapted to flags that are yet to be applied.

    note: which fields the flags have reset or scaled, after a warning of images that the default recipe does not fit; "" for
    nothing. callbacks: returns the callbacks that the recipe's file gives its runs. Raises ConfigError if the file's function
    fails.
    """

    config: Config
    note: str = ""
    callbacks: Callable[[], Any] = tuple


def load_recipe(arguments: list[str], default: str, *, notes: bool = False) -> Recipe:
    """The recipe that --config names on a command line. The other flags can be applied to it.

    notes: whether a recipe file that calls `load_config` prints its notes.
    """
    chosen = flag_value(arguments, "--config")  # the parser reports a missing value
    name, source = chosen or default, flag_value(arguments, f"--{SOURCES.field}")
    own_images = source is not None and SOURCES[source].own_images
    shown = _shows_notes.set(notes and flag_value(arguments, "--rank") in (None, "0"))
    try:
        loaded = _load(name)
        recipe = adapt(loaded.config, arguments)._replace(callbacks=loaded.callbacks)
        return recipe if chosen or not own_images else recipe._replace(note=f"{DIGITS_WARNING}\n{recipe.note}".rstrip())
    finally:
        _shows_notes.reset(shown)


def adapt(config: Config, flags: list[str]) -> Recipe:
    """The config with fields that fit the choices and the number of epochs in `flags`; flags for those fields still apply.

    This allows `--optimizer.name sgd` with a recipe that sets a trust coefficient. A flag that sets an ignored field itself is
    still rejected by `validate`.
    """
    chosen = choices_in(flags)
    sources = {field: name for field, name in chosen.items() if field in (SOURCES.field, AUGMENTATIONS.field)}
    unusable = unusable_fields(with_fields(config, sources)) if sources else {}
    reset = with_choices(config, chosen)
    scaled = scale_schedule(reset, flags)
    before, after = reset.schedule, scaled.schedule
    parts = {
        "phases": scaled.batch != reset.batch,
        "warm-up": after.warmup_epochs != before.warmup_epochs,
        "learning-rate steps": after.boundaries != before.boundaries,
        "unfreezing": scaled.finetune != reset.finetune,
    }
    notes = [f"the recipe's {field} is reset: {reason}" for field, reason in unusable.items()]
    optimizer = flag_value(flags, "--optimizer.name") or config.optimizer.name
    if optimizer != config.optimizer.name and flag_value(flags, "--schedule.learning-rate") is None:
        rate = f"the recipe's learning rate {before.learning_rate:g} is for {config.optimizer.name}"
        notes += [f"{rate}; for {optimizer} set --schedule.learning-rate (`jaxdp bench lr` suggests one)"]
    if not (changed := ", ".join(part for part, differs in parts.items() if differs)):
        return Recipe(scaled, "\n".join(notes))
    epochs = f"from {config.epochs:g} epochs to {float(flag_value(flags, '--epochs') or config.epochs):g}"
    notes += [f"the recipe's schedule is scaled {epochs}: {changed} (--no-scale-schedule keeps it)"]
    return Recipe(scaled, "\n".join(notes))


def choices_in(flags: list[str]) -> dict[str, str]:
    """The named choices that flags make, by config field. The parser reports unknown names."""
    given = ((table, flag_value(flags, f"--{table.field}")) for table in TABLES)
    return {table.field: name for table, name in given if name is not None and (name in table or table.other)}


def reset_for_network(config: Config, flags: list[str]) -> Config:
    """`config` with the choices that flags make, for a network that exists, whose number of classes stays."""
    return with_fields(with_choices(config, choices_in(flags)), {"model.classes": config.model.classes})


def scale_schedule(config: Config, flags: list[str]) -> Config:
    """`config` with phase ends, warm-up, boundaries and `unfreeze_epoch` scaled if `flags` change the number of epochs.

    `--no-scale-schedule` and scale_schedule=False keep them, and so does a flag that sets one of them.
    """
    keep = "--no-scale-schedule" in flags or not (config.scale_schedule or "--scale-schedule" in flags)
    try:
        ratio = float(flag_value(flags, "--epochs") or config.epochs) / config.epochs
    except ValueError:  # the parser reports it
        return config
    if keep or not 0 < ratio < math.inf:
        return config

    ignored = SCHEDULES.ignored_fields(config.schedule.name)

    def scaled(field: str, epochs: Any) -> Any:
        if flag_value(flags, f"--{field}") is not None or epochs is None or field in ignored:
            return epochs
        return tuple(epoch * ratio for epoch in epochs) if isinstance(epochs, tuple) else epochs * ratio

    batch = tuple(
        dataclasses.replace(phase, until_epoch=scaled(f"batch.{index}.until_epoch", phase.until_epoch))
        for index, phase in enumerate(config.batch)
    )
    schedule = dataclasses.replace(
        config.schedule,
        warmup_epochs=scaled("schedule.warmup_epochs", config.schedule.warmup_epochs),
        boundaries=scaled("schedule.boundaries", config.schedule.boundaries),
    )
    epoch = scaled("finetune.unfreeze_epoch", config.finetune.unfreeze_epoch)
    finetune = dataclasses.replace(config.finetune, unfreeze_epoch=epoch)
    return dataclasses.replace(config, batch=batch, schedule=schedule, finetune=finetune)


def register_from(recipe: str | None) -> None:
    """Run a recipe's file for what it registers, such as models; None: do nothing. Raises ConfigError if it fails."""
    if recipe is not None:
        load_recipe([], recipe)


def _read_json(path: Path) -> Config:
    try:
        return validate(from_json(read_text(path)))
    except ConfigError as error:
        raise ConfigError("--config", str(path), reason=str(error)) from None


def _run_recipe(path: Path) -> tuple[Config, Callable[[], Any]]:
    """What `config()` of a recipe's file returns, and its `callbacks` function."""
    spec = importlib.util.spec_from_file_location(f"jaxdp_recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[spec.name] = module  # dataclasses, for example, look their module up there
    folder = str(path.resolve().parent)
    sys.path.append(folder)  # it may import the files beside it
    try:
        with _errors_of(path):
            spec.loader.exec_module(module)
            if not callable(getattr(module, "config", None)):
                raise ConfigError("--config", str(path), reason="a recipe must define config() -> jaxdp.Config")
            return module.config(), _errors_of(path)(getattr(module, "callbacks", tuple))
    finally:
        sys.dont_write_bytecode = writes
        sys.path.remove(folder)
        del sys.modules[spec.name]


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turn an error of a recipe's file into a ConfigError; what it prints goes to stderr: stdout may be one JSON document."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        message, hint = first_line(error), _field_hint(error)
        if hint:
            message = message.partition(". Did you mean")[0]  # Python's hint, since 3.13
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
        reason = f"failed{f' (line {lines[-1]})' if lines else ''}: {type(error).__name__}: {message}"
        raise ConfigError("--config", str(path), reason=reason, hint=hint) from error


def _field_hint(error: BaseException) -> str:
    """A hint for an unknown field of a section of Config; "" for other errors."""
    match = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    section = match and getattr(jaxdp.config, match[1], None)
    if not match or not isinstance(section, type) or not dataclasses.is_dataclass(section):
        return ""
    return suggest(match[2], [field.name for field in dataclasses.fields(section)])
