"""Help of the command line: the everyday flags with a list of groups, the flags of one group, or all flags."""

import dataclasses
import functools
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args

from jaxdp.errors import ConfigError, suggest
from jaxdp.foreign_flags import COUNTERPARTS
from jaxdp.registry import OneOf

if TYPE_CHECKING:
    from jaxdp.flags import Flag, Flags

NARROWEST, WIDEST = 40, 100  # columns of wrapped text
GENERAL, ALL = "general", "all"
GENERAL_TEXT = "Options of the command; name, seed and length of the run"


def rows(texts: dict[str, str]) -> str:
    """Names with their descriptions, wrapped to the width of the terminal; below the names if these are wide."""
    width, column = _width(), 3 + max(11, *map(len, texts))
    below = column > width / 2
    indent = (6 if below else column) * " "
    lines = []
    for name, text in texts.items():
        first, *rest = _wrap(text, width - len(indent))
        lines += [f"  {name}", f"{indent}{first}"] if below else [f"  {name:<{column - 2}}{first}"]
        lines += [f"{indent}{line}" for line in rest]
    return "\n".join(lines)


def asks_for_help(arguments: Iterable[str]) -> bool:
    """Whether a command line contains -h or --help."""
    return any(re.fullmatch(r"-h|--help(=.*)?", word) for word in arguments)


def show(options: type, default: Any, flags: "Flags", *, program: str, topic: str, everyday: Sequence[str]) -> None:
    """Print help and exit. options: class of the command's options, with `default` as values.

    topic: a group, `all`, or "" for an overview: the flags of the options class itself, those named in `everyday`, and the
    groups. Options without groups are always shown in full. Raises ConfigError for an unknown group.
    """
    import tyro

    topic = topic.replace("_", "-")
    if flags.groups and topic not in (*flags.groups, ALL, ""):
        counterpart = COUNTERPARTS.get(topic)
        field = counterpart.flag if counterpart else f".{topic}"
        group = next((flag.group for name, flag in flags.named.items() if name.endswith(field)), topic)
        raise ConfigError(f"--help {topic}", reason="no such group of options", hint=suggest(group, [*flags.groups, ALL]))
    if flags.groups and not topic:
        print(_overview(options, flags, program=program, everyday=everyday))
        sys.exit()
    if flags.groups and topic != ALL:
        view = _view([flag for flag in flags.named.values() if flag.group == topic])
        tyro.cli(view, args=["--help"], prog=program, description=f"  {topic}: {_group_texts(flags)[topic]}.")
    _simplify(options, {(flag.owner, flag.field.name): flag for flag in (*flags.named.values(), *flags.positional)})
    omitted = tyro.MISSING_NONPROP if default is None else default
    tyro.cli(options, args=["--help"], prog=program, description=description(options), default=omitted)


def description(options: type) -> str:
    """The docstring of an options class, wrapped to the width of the terminal, including the examples that tyro omits.

    Text is indented because tyro joins lines that start with a letter.
    """
    text, _, examples = (inspect.getdoc(options) or "").partition("\n\nExamples:\n")
    width = _width()
    paragraphs = ("\n".join(_wrap(paragraph, width - 2)) for paragraph in text.split("\n\n"))
    shown = textwrap.indent("\n\n".join(paragraphs), "  ")
    wrapped = [(" \\\n" + 6 * " ").join(_wrap(line, width - 8)) for line in examples.splitlines()]
    return "\n".join([f"{shown}\n\nExamples:", *(f"  {line}" for line in wrapped)]) if examples else shown


def _overview(options: type, flags: "Flags", *, program: str, everyday: Sequence[str]) -> str:
    own = {flag.spelling: flags.named[flag.spelling] for flag in flags.named.values() if flag.owner is options}
    shown = [*own.values(), *(flags.named[name] for name in everyday if name in flags.named)]
    texts = {f"{flag.name} {flag.value_name}".rstrip(): _short_text(flag) for flag in shown}
    parts = [
        f"usage: {program} [OPTIONS]\n       {program} --help GROUP",
        description(options),
        f"{'Everyday options' if everyday else 'Options'}:\n{rows(texts)}",
        f"Groups of options (--help GROUP):\n{rows(_group_texts(flags) | {ALL: 'All options'})}",
    ]
    return "\n\n".join(parts)


def _group_texts(flags: "Flags") -> dict[str, str]:
    """A phrase on every group, from the docstring of its class."""
    texts = {name: _first_clause(inspect.getdoc(owner) or "") for name, owner in flags.groups.items()}
    return texts | {GENERAL: GENERAL_TEXT}


def _view(flags: list["Flag"]) -> type:
    """A dataclass with these flags as fields, whose names for tyro contain the section."""
    import tyro
    from typing_extensions import Doc

    fields: list[tuple[str, Any, Any]] = []
    for name, flag in {flag.spelling.removeprefix("--"): flag for flag in flags}.items():
        marks = (tyro.conf.arg(name=name, **_look(flag)), Doc(help_text(flag)))
        annotation = Annotated[flag.field.type, *marks]  # type: ignore[name-defined]
        fields.append((f"field_{len(fields)}", annotation, dataclasses.field(default=flag.default)))
    return dataclasses.make_dataclass("Options", fields)


def _look(flag: "Flag") -> dict[str, Any]:
    """How tyro shows the value of a flag: the names of a table, but not None or empty, whose meaning is in the text."""
    may_be_empty = NoneType in flag.types or flag.repeated
    if flag.required or not (may_be_empty or flag.choices):
        return {}
    look: dict[str, Any] = {}
    if may_be_empty:
        look["help_behavior_hint"] = lambda default: "" if default in ("None", "") else f"(default: {default})"
    if not flag.metavar and not flag.repeated:
        look["metavar"] = f"{{{','.join(flag.choices)}}}" if flag.choices else flag.value_name
    return look


def _simplify(options: type, flags: dict[tuple[type, str], "Flag"]) -> None:
    """Annotate the fields of an options class, and of those inside it, with their docstrings as one line for tyro to wrap.

    flags: by class and field. From a docstring tyro keeps the line breaks of the source. The process exits after the help, so
    the change does no harm.
    """
    import tyro
    from typing_extensions import Doc

    for field in dataclasses.fields(options):
        for inner in _types_in(field.type):
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                _simplify(inner, flags)
        if flag := flags.get((options, field.name)):
            look, text = _look(flag), help_text(flag) if field.name in docstrings(options) else ""
            marks = [tyro.conf.arg(**look)] * bool(look) + [Doc(text)] * bool(text)
            options.__annotations__[field.name] = Annotated[field.type, *marks] if marks else field.type


def _types_in(annotation: Any) -> list[Any]:
    """An annotation and the arguments inside it."""
    return [annotation, *(inner for argument in get_args(annotation) for inner in _types_in(argument))]


@functools.cache
def docstrings(options: type) -> dict[str, str]:
    """The docstrings of the fields of a class, in one line each."""
    import docstring_parser

    owners = [owner for owner in reversed(options.__mro__) if dataclasses.is_dataclass(owner)]  # a field may be inherited
    found = [param for owner in owners for param in docstring_parser.parse_from_object(owner).params]
    return {param.arg_name: " ".join(param.description.split()) for param in found if param.description}


def help_text(flag: "Flag") -> str:
    """The help of a flag: the docstring of its field, or the text of its type, and the names in its table."""
    from typing_extensions import Doc

    marks = get_args(flag.field.type)
    text = docstrings(flag.owner).get(flag.field.name) or next((m.documentation for m in marks if isinstance(m, Doc)), "")
    return ". ".join([text, *(mark.table.help for mark in marks if isinstance(mark, OneOf))])


def purpose(flag: "Flag") -> str:
    """The first clause of a flag's help."""
    return _first_clause(help_text(flag))


def _short_text(flag: "Flag") -> str:
    """The first clause of a flag's help, its choices and its default."""
    choices = f": {', '.join(flag.choices)}" if flag.choices else ""
    values = flag.default if isinstance(flag.default, tuple) else () if flag.default is None else (flag.default,)
    default = f" (default: {' '.join(map(str, values))})" if values and not flag.switch else ""
    return purpose(flag) + choices + default


def _first_clause(text: str) -> str:
    return re.split(r"(?<=\w)\.(?:\s|$)|; ", " ".join(text.split()))[0]


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def _wrap(text: str, width: int) -> list[str]:
    """Lines of a text, broken only at spaces so that commands and flags can be copied."""
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)
