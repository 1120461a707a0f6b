"""Help of the command line: the everyday flags with a list of groups, the flags of one group, or all flags."""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import cast, get_args

from jaxdp.errors import ConfigError, print_safe, suggest
from jaxdp.flag_table import ALL, GENERAL, Flag, Flags
from jaxdp.foreign_flags import COUNTERPARTS
from jaxdp.registry import OneOf

NARROWEST, WIDEST = 40, 100  # columns of wrapped text
GENERAL_TEXT = "Options of the command; name, seed and length of the run"


def rows(texts: dict[str, str], *, below: bool = False) -> str:
    """Names with their descriptions, wrapped to the width of the terminal; below the names if these are wide."""
    width, column = _width(), 3 + max([11, *map(len, texts)])
    below = below or column > width / 2
    indent = (6 if below else column) * " "
    lines = []
    for name, text in texts.items():
        first, *rest = _wrap(text, width - len(indent)) or [""]
        lines += [f"  {name}", f"{indent}{first}"] if below else [f"  {name:<{column - 2}}{first}"]
        lines += [f"{indent}{line}" for line in rest]
    return "\n".join(lines)


def asks_for_help(arguments: Iterable[str]) -> bool:
    """Whether a command line contains -h or --help."""
    return any(re.fullmatch(r"-h|--help(=.*)?", word) for word in arguments)


def show(options: type, flags: Flags, *, program: str, topic: str, everyday: Sequence[str]) -> None:
    """Print help and exit. options: class of the command's options.

    topic: a group, `all`, or "" for an overview: the flags of the options class itself, those named in `everyday`, and the
    groups. Options without groups are always shown in full. Raises ConfigError for an unknown group.
    """
    topic = topic.replace("_", "-")
    if flags.groups and topic not in (*flags.groups, ALL, ""):
        counterpart = COUNTERPARTS.get(topic)
        field = counterpart.flag if counterpart else f".{topic}"
        group = next((flag.group for name, flag in flags.named.items() if name.endswith(field)), topic)
        raise ConfigError(f"--help {topic}", reason="no such group of options", hint=suggest(group, [*flags.groups, ALL]))
    if flags.groups and not topic:
        print_safe(_overview(options, flags, program=program, everyday=everyday))
    elif flags.groups and topic != ALL:
        print_safe(f"usage: {program} [OPTIONS]\n\n{_group(flags, topic)}")
    else:
        arguments = "".join(f" {flag.value_name}" for flag in flags.positional)
        groups = [_group(flags, name) for name in flags.groups] or [f"Options:\n{_full_rows(flags.named.values())}"]
        if flags.positional:
            groups = [f"Arguments:\n{_full_rows(flags.positional)}", *groups]
        print_safe("\n\n".join([f"usage: {program} [OPTIONS]{arguments}", description(options), *groups]))
    sys.exit()


def _group(flags: Flags, group: str) -> str:
    text = "\n".join(_wrap(f"{group}: {_group_texts(flags)[group]}.", _width()))
    return f"{text}\n{_full_rows(flag for flag in flags.named.values() if flag.group == group)}"


def _full_rows(flags: Iterable[Flag]) -> str:
    """Every flag with its values, its whole help and its default. A flag and its negation share a row."""
    fields: dict[str, list[Flag]] = {}
    for flag in flags:
        fields.setdefault(flag.spelling, []).append(flag)
    texts = {}
    for first, *others in fields.values():
        names = ", ".join(flag.name for flag in (first, *others))
        values = f"{{{','.join(first.choices)}}}" if first.choices and not first.metavar else first.value_name
        is_off = first.switch and not others
        default = " (required)" if first.required else "" if is_off else _default_text(first)
        texts[f"{names} {values}".rstrip() if names.startswith("-") else values] = help_text(first) + default
    return rows(texts, below=True)


def description(options: type) -> str:
    """The docstring of an options class, wrapped to the width of the terminal."""
    text, _, examples = (inspect.getdoc(options) or "").partition("\n\nExamples:\n")
    width = _width()
    paragraphs = ("\n".join(_wrap(paragraph, width - 2)) for paragraph in text.split("\n\n"))
    shown = textwrap.indent("\n\n".join(paragraphs), "  ")
    wrapped = [(" \\\n" + 6 * " ").join(_wrap(line, width - 8)) for line in examples.splitlines()]
    return "\n".join([f"{shown}\n\nExamples:", *(f"  {line}" for line in wrapped)]) if examples else shown


def _overview(options: type, flags: Flags, *, program: str, everyday: Sequence[str]) -> str:
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


def _group_texts(flags: Flags) -> dict[str, str]:
    """A phrase on every group, from the docstring of its class."""
    texts = {name: _first_clause(inspect.getdoc(owner) or "") for name, owner in flags.groups.items()}
    return texts | {GENERAL: GENERAL_TEXT}


@functools.cache
def docstrings(options: type) -> dict[str, str]:
    """The docstrings of the fields of a class, in one line each."""
    found = {}
    for owner in [owner for owner in reversed(options.__mro__) if dataclasses.is_dataclass(owner)]:  # a field may be inherited
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        for field, below in itertools.pairwise(cast(ast.ClassDef, definition).body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def help_text(flag: Flag) -> str:
    """The help of a flag: the docstring of its field, or the text of its type, and the names in its table."""
    from typing_extensions import Doc

    marks = get_args(flag.field.type)
    text = docstrings(flag.owner).get(flag.field.name) or next((m.documentation for m in marks if isinstance(m, Doc)), "")
    return ". ".join([text, *(mark.table.help for mark in marks if isinstance(mark, OneOf))])


def purpose(flag: Flag) -> str:
    """The first clause of a flag's help."""
    return _first_clause(help_text(flag))


def _short_text(flag: Flag) -> str:
    choices = f": {', '.join(flag.choices)}" if flag.choices else ""
    return purpose(flag) + choices + ("" if flag.switch else _default_text(flag))


def _default_text(flag: Flag) -> str:
    """The default of a flag; "" if there is none, or if it is None or empty, whose meaning is in the text."""
    values = flag.default if isinstance(flag.default, tuple) else () if flag.default is None else (flag.default,)
    return f" (default: {' '.join(map(str, values))})" if values else ""


def _first_clause(text: str) -> str:
    return re.split(r"(?<=[\w)])\.(?:\s|$)|; ", " ".join(text.split()))[0]


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def _wrap(text: str, width: int) -> list[str]:
    """Lines of a text, broken only at spaces so that commands and flags can be copied."""
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)
