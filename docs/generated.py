"""The text of the manual's generated pages, made from jaxdp's tables, annotations and docstrings."""

import dataclasses
import importlib
import inspect
import re
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest import mock

from typing_extensions import Doc

import jaxdp
from jaxdp import flag_help, flag_table, flags
from jaxdp import foreign_flags as foreign
from jaxdp.cli import bench, main
from jaxdp.config import Config, Group
from jaxdp.fields import Section
from jaxdp.registry import OneOf
from jaxdp.run_records import RECORD_FIELDS
from jaxdp.validation import RESUME_SAFE_FIELDS

ROOT = Path(__file__).parents[1]
TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", types.NoneType: "None"}
TYPES |= {Group: "group `PATTERN:rate=FACTOR,decay=FACTOR`, in Python `jaxdp.config.Group(pattern, rate, decay)`"}
LIMITS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}", "max_length": "at most {} characters"}
LIMITS |= {"pattern": "matching `{}`"}
SUBCOMMANDS = {"bench": [f"bench {name}" for name in bench.BENCHES], "data": ["data prepare"]}


# What pages and signatures name besides `jaxdp.__all__`. `strict` builds report missing names.
MODULE_NAMES = [
    "jaxdp.data.Loader",
    "jaxdp.data.batch_sources.ItemSource",
    "jaxdp.data.open_datasets",
    "jaxdp.losses.binary_cross_entropy",
    "jaxdp.losses.cross_entropy",
    "jaxdp.models.create",
    "jaxdp.models.ResNet",
    "jaxdp.network.Network",
    "jaxdp.optim.lamb",
    "jaxdp.optim.lars",
    "jaxdp.planning.Plan",
    "jaxdp.planning.PlannedPhase",
    "jaxdp.report.write",
    "jaxdp.schedules.learning_rate",
    "jaxdp.schedules.momentum",
    "jaxdp.training.run.Run",
    "jaxdp.training.state.TrainState",
]

# Config fields


def fields() -> str:
    """Every config field as a directive `confval`, by section."""
    parts = ["### The run\n", *(_field(Config, field, "") for field in dataclasses.fields(Config) if not _section(field)[0])]
    for field in dataclasses.fields(Config):
        section, prefix = _section(field)
        if section:
            members = [_field(section, member, prefix) for member in dataclasses.fields(section)]
            parts += [f"### {field.name}\n\n{inspect.getdoc(section)}\n", *members]
    return "\n".join(parts)


def field_names() -> list[str]:
    """The names that `fields` documents."""
    return re.findall(r"\{confval\} (\S+)", fields())


def _section(field: dataclasses.Field) -> tuple[type | None, str]:
    """(class, prefix of the names of its fields) of a field that is a section, or a tuple of sections; else None."""
    annotation: Any = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
    if dataclasses.is_dataclass(annotation):
        return annotation, f"{field.name}."
    item = (*get_args(annotation), None)[0]
    return (item, f"{field.name}.N.") if dataclasses.is_dataclass(item) else (None, "")


def _field(owner: type, field: dataclasses.Field, prefix: str) -> str:
    path = prefix + field.name
    safe = any(path == name or path.startswith(f"{name}.") for name in RESUME_SAFE_FIELDS)
    kept = "\n\nA run may resume with another value." if safe else ""
    lines = [f":type: {_type(field.type)}", f":default: `{field.default!r}`", "", _help(owner, field) + kept]
    return "\n".join([f"````{{confval}} {path}", *lines, "````\n"])


def _help(owner: type, field: dataclasses.Field) -> str:
    """The text below a field, or below its type, with the names of choices as a list."""
    text, tables = (
        flag_help.docstrings(owner).get(field.name),
        [mark.table for mark in get_args(field.type) if isinstance(mark, OneOf)],
    )
    if text and not tables:
        return f"{text}."
    head, _, names = (f"{text}. {tables[0].help}" if tables else _doc(field.type)).partition(". ")
    if not names:
        return f"{head}."
    entries = [re.sub(r"^([\w,. ]+?): ", r"`\1`: ", entry) for entry in names.split("; ")]
    return "\n".join([f"{head}.", "", *(f"- {entry}" for entry in entries)])


def _doc(annotation: Any) -> str:
    return next(mark.documentation for mark in get_args(annotation) if isinstance(mark, Doc))


def _type(annotation: Any, marks: tuple = ()) -> str:
    """The type of an annotation as text, with its range or its choices."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        names = [name for mark in arguments[1:] if isinstance(mark, OneOf) for name in mark.table]
        return " or ".join(f"`{name}`" for name in names) or _type(arguments[0], (*marks, *arguments[1:]))
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type, arguments))
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        return f"any number of values: {_type(arguments[0])}"
    return ", ".join([TYPES[annotation], *_limits(marks)])


def _limits(marks: Iterable[Any]) -> Iterator[str]:
    for limit in (limit for mark in marks for limit in getattr(mark, "metadata", ())):
        yield from (words.format(_number(getattr(limit, name))) for name, words in LIMITS.items() if hasattr(limit, name))


def _number(value: Any) -> str:
    if not isinstance(value, int):
        return str(value) if isinstance(value, str) else f"{value:g}".replace("e+", "e")
    power = value.bit_length() - 1
    return f"2^{power}" if power > 20 and value == 2**power else f"{value:,}"


def record_fields() -> str:
    """The table of the fields in metrics.jsonl."""
    rows = (f"| `{name}` | {meaning} |" for name, meaning in RECORD_FIELDS.items())
    return "\n".join(["| field | meaning |", "|---|---|", *rows])


# Commands


def commands() -> str:
    """Every command with its flags as directives `option`."""
    parts = []
    for name, text in main.COMMANDS.items():
        parts.append(f"### jaxdp {name}\n")
        if name in SUBCOMMANDS:
            parts.append(f"{text}.\n")
            parts += [f"#### jaxdp {inner}\n\n{_command(inner)}" for inner in SUBCOMMANDS[name]]
        else:
            parts.append(_command(name))
    return "\n".join(parts)


class _Parsed(Exception):
    """Carries the arguments of `flags.parse` out of a command."""


def options_of(command: str) -> type:
    """The dataclass from which a command parses its flags."""

    def stop(options: type, *_: Any, **__: Any) -> None:
        raise _Parsed(options)

    name, *arguments = command.split()
    module = importlib.import_module(f"jaxdp.cli.{name}")
    with mock.patch.object(flags, "parse", stop), mock.patch.object(module, "parse", stop, create=True):
        try:
            module.run([*arguments, "--help"], f"jaxdp {name}")
        except _Parsed as parsed:
            return parsed.args[0]
    raise AssertionError(f"jaxdp {command} does not parse its flags with jaxdp.flags.parse")


def own_flags(options: type) -> list[list[flag_table.Flag]]:
    """The positional arguments and flags of a command, without the flags of config fields; --NAME and --no-NAME together."""
    known, by_spelling = flag_table.Flags.of(options), {}
    for flag in [*known.positional, *known.named.values()]:
        if flag.owner is not Config and not issubclass(flag.owner, Section):
            by_spelling.setdefault(flag.spelling, []).append(flag)
    return list(by_spelling.values())


def _command(command: str) -> str:
    options = options_of(command)
    about, _, examples = (inspect.getdoc(options) or "").partition("\n\nExamples:\n")
    takes_fields = any(flag.owner is Config for flag in flag_table.Flags.of(options).named.values())
    parts = [
        f"{about}\n\n```bash\n{inspect.cleandoc(examples)}\n```\n",
        f"```{{program}} jaxdp {command}\n```\n",
        *map(_option, own_flags(options)),
        "Every [config field](#config-fields) is a flag, too.\n" if takes_fields else "",
    ]
    return "\n".join(parts)


def _option(pair: list[flag_table.Flag]) -> str:
    flag = pair[0]
    spelled = ", ".join(f"{each.name} {'' if each.name.isupper() else each.value_name}".strip() for each in pair)
    shown = flag.default not in (None, False, ()) and not flag.required
    default = f" Default: `{' '.join(map(str, flag.default)) if flag.repeated else flag.default}`." if shown else ""
    return f"````{{option}} {spelled}\n{flag_help.help_text(flag)}.{default}\n````\n"


# Python API


def api() -> str:
    """Directives of autodoc for the public names, and for those in `MODULE_NAMES`."""
    named = [(f"jaxdp.{name}", getattr(jaxdp, name)) for name in jaxdp.__all__]
    groups = {
        "Functions": [path for path, value in named if inspect.isfunction(value)],
        "Classes": [path for path, value in named if inspect.isclass(value) and not issubclass(value, Exception)],
        "Errors": [path for path, value in named if inspect.isclass(value) and issubclass(value, Exception)],
        "In modules": MODULE_NAMES,
    }
    parts = [f"## {heading}\n\n" + "\n".join(map(_autodoc, paths)) for heading, paths in groups.items()]
    return "\n".join(parts)


def _autodoc(path: str) -> str:
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    kind = (
        "exception"
        if inspect.isclass(value) and issubclass(value, Exception)
        else "class"
        if inspect.isclass(value)
        else "function"
    )
    return f"```{{eval-rst}}\n.. auto{kind}:: {path}\n```\n"


def list_parameters(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turn `name: text.` in a docstring, for names in the signature, into a definition list. An event handler of autodoc."""
    try:
        names = "|".join(map(re.escape, inspect.signature(value).parameters))
    except (TypeError, ValueError):
        return
    entry = re.compile(rf"(?:^|(?<=\. ))((?:{names})(?:, (?:{names}))*): ")
    parts = []
    for paragraph in re.sub(r"(?<=\.)\s(?=Raises |Returns )", "\n\n", "\n".join(lines)).split("\n\n"):
        before, *entries = entry.split(" ".join(paragraph.split())) if names else (paragraph,)
        parts.append(before if entries else paragraph)
        parts += [f"``{listed}``\n    {text}" for listed, text in zip(entries[::2], entries[1::2], strict=True)]
    lines[:] = "\n\n".join(parts).splitlines()


def link_to_section(app: Any, env: Any, node: Any, content: Any) -> Any:
    """The link from the type of a section of `Config` to its heading on the page of fields. An event handler of Sphinx."""
    from sphinx.util.nodes import make_refnode

    for field in dataclasses.fields(Config):
        section, _ = _section(field)
        if section and node.get("reftarget") in (f"{section.__module__}.{section.__name__}", section.__name__):
            return make_refnode(app.builder, node["refdoc"], "docs/reference", field.name.replace("_", "-"), content)
    return None


# Flags of other trainers


def foreign_flags() -> str:
    """The flags of other trainers, and what jaxdp has instead."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, counterpart in foreign.COUNTERPARTS.items():
        rows.setdefault((f"`{counterpart.form.format('N') or counterpart.spelled}`", counterpart.note), []).append(name)
    for name, advice in foreign.NO_COUNTERPART.items():
        rows.setdefault(("no", advice), []).append(name)
    lines = ["| flag there | flag here | note |", "|---|---|---|"]
    for (here, note), names in rows.items():
        there = ", ".join(f"`{name if name.startswith('-') else f'--{name}'}`" for name in names)
        lines.append(f"| {there} | {here} | {note} |")
    return "\n".join(lines)


# Recipe files


def recipe_files() -> str:
    """Every recipe with its source."""
    files = [*sorted(ROOT.glob("configs/*.py")), ROOT / "jaxdp/published.py"]
    return "\n".join(f"### {path.name}\n\n```python\n{path.read_text()}```\n" for path in files)


def link_to_recipe(link: re.Match) -> str:
    """A link to the source of a recipe on the site in place of one to its file in configs/ or to that directory."""
    anchor = f"{link[2]}py" if link[2] else "recipe-files"
    return f"]({link[1]}docs/recipes.md#{anchor})"
