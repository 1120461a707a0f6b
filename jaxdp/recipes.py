"""Recipes: runs by name or by file, with flags laid over them."""

import contextlib
import dataclasses
import importlib.util
import re
import sys
import traceback
from pathlib import Path

import jaxdp.config
from jaxdp.config import Config, ConfigError
from jaxdp.errors import first_line
from jaxdp.flags import nearest, parse
from jaxdp.validation import from_json, validate


def config_directories() -> list[Path]:
    """Where a recipe's name is looked up: ./configs, a checkout's configs, an installed package's."""
    package = Path(__file__).parent
    return [Path("configs"), package.parent / "configs", package / "configs"]


def apply_flags(config: Config, flags: list[str], program: str = "jaxdp") -> Config:
    """`config` with command-line flags such as ["--batch.0.global-batch", "64"] applied."""
    return parse(type(config), flags, program, config)


def find_config(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix in (".py", ".json"):
        if path.is_file():
            return path
        raise ConfigError(f"--config: {name_or_path!r} is not allowed; there is no such file")
    known = {}
    for directory in config_directories():
        for file in sorted(directory.glob("*.py")):
            known.setdefault(file.stem, file)
    if name_or_path in known:
        return known[name_or_path]
    near = nearest(name_or_path, known)
    hint = f"did you mean {near}?" if near else f"known are {', '.join(sorted(known))}, or a .py or .json file"
    raise ConfigError(f"--config: {name_or_path!r} is not allowed; there is no such recipe; {hint}")


def load_config(path_or_name: str, overrides=()) -> Config:
    """A recipe by its name in configs/, or by the path of a .py file with `config()` or of a saved .json.

    overrides: command-line flags, for example ["--epochs", "3", "--batch.0.global-batch", "64"].
    Raises ConfigError for a missing file, an unknown field, a wrong type or a value out of range.
    """
    path = find_config(str(path_or_name))
    try:
        if path.suffix == ".json":
            config = _read_json(path)
        else:
            config = validate(_run_recipe(path))
        if overrides:
            config = validate(apply_flags(config, list(overrides)))
    except OSError as error:
        raise ConfigError(f"--config: {str(path)!r} is not allowed; {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config: {str(path)!r} is not allowed; it is no text in UTF-8") from None
    return config


def register_from(recipe: str | None) -> None:
    """Run a recipe's file for what it registers; None: there is none. Raises ConfigError for one that does not run."""
    if recipe is not None:
        load_config(recipe)


def _read_json(path: Path) -> Config:
    try:
        return validate(from_json(path.read_text()))
    except ConfigError as error:
        raise ConfigError(f"--config: {str(path)!r} is not allowed; {error}") from None


def _run_recipe(path: Path) -> Config:
    spec = importlib.util.spec_from_file_location(f"jaxdp_recipe_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[spec.name] = module  # where dataclasses and the like look their module up
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout may be one JSON document
            spec.loader.exec_module(module)
            if not callable(getattr(module, "config", None)):
                raise ConfigError(f"--config: {str(path)!r} is not allowed; a recipe defines config() -> jaxdp.Config")
            return module.config()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {first_line(error)}{_meant(error)}"
        raise ConfigError(f"--config: {str(path)!r} is not allowed; it does not run{_where(path, error)}: {reason}") from error
    finally:
        sys.dont_write_bytecode = writes
        del sys.modules[spec.name]


def _where(path: Path, error: BaseException) -> str:
    """The line of the recipe at which an error came up, the innermost."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""


def _meant(error: BaseException) -> str:
    """The nearest field, where a part of a Config was given one that it does not have."""
    found = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    part = found and getattr(jaxdp.config, found[1], None)
    if not dataclasses.is_dataclass(part):
        return ""
    known = [field.name for field in dataclasses.fields(part)]
    near = nearest(found[2], known)
    return f"; did you mean {near}?" if near else f"; known are {', '.join(known)}"
