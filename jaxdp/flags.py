"""Parsing of command lines with tyro, preceded by a check that reports the first error in one line with the nearest flag."""

import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from jaxdp.errors import ConfigError, nearest, one_of
from jaxdp.files import check_local

Options = TypeVar("Options")
ADDRESS = "--coordinator"  # not a path
NARROWEST, WIDEST = 40, 100  # columns of wrapped text
NUMBERS = {int: "an integer", float: "a number"}
ALIASES = {  # names of flags in other trainers
    "lr": "--schedule.learning-rate",
    "warmup": "--schedule.warmup-epochs",
    "batch": "--batch.0.global-batch",
    "batch-size": "--batch.0.global-batch",
    "wd": "--optimizer.weight-decay",
    "arch": "--model.depth",
    "num-classes": "--model.classes",
    "num-workers": "--data.threads",
    "workers": "--data.threads",
    "data-dir": "--data.directory",
    "data-path": "--data.directory",
    "output-dir": "--workdir",
    "num-epochs": "--epochs",
    "amp": "--model.dtype",
}


def rows(texts: dict[str, str]) -> str:
    """Names with their descriptions, wrapped to the width of the terminal."""
    width, indent = _width(), 14 * " "
    wrapped = (indent + f"\n{indent}".join(_wrap(text, width - len(indent))) for text in texts.values())
    return "\n".join(f"  {name:<11} {text.lstrip()}" for name, text in zip(texts, wrapped, strict=True))


def asks_for_help(arguments: Iterable[str]) -> bool:
    """Whether a command line contains -h or --help."""
    return bool({"-h", "--help"} & set(arguments))


def flag_value(arguments: list[str], flag: str) -> str | None:
    """The value of a flag on an unparsed command line, the last if it is repeated; None if it is absent or has no value."""
    value = None
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        name, equals, after = word.partition("=")
        if name.replace("_", "-") == flag.replace("_", "-"):
            value = after if equals else None if _is_flag(following) else following
    return value


def flag_for(field: str, value: object) -> str:
    """A config field and its value as a command-line flag."""
    name = field.replace("_", "-")
    if isinstance(value, bool):
        section, _, last = name.rpartition(".")
        return f"--{section}.{last if value else f'no-{last}'}"
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([f"--{name}", *map(str, values)])


def parse(options: type[Options], arguments: Iterable[str], program: str, *, default: Options | None = None) -> Options:
    """An instance of the dataclass `options` from a command line. default: values of omitted flags.

    Raises ConfigError for an unknown flag, a missing value, or a value of the wrong type. `--help` prints help and exits.
    """
    import tyro

    arguments = list(arguments)
    if check(Flags.of(options, default), arguments, program):
        arguments = ["--help"]
        _join_help_lines(options)
    omitted = tyro.MISSING_NONPROP if default is None else default
    return tyro.cli(options, args=arguments, prog=program, description=description(options), default=omitted)


def _join_help_lines(options: type) -> None:
    """Annotate the fields of an options class, and of those inside it, with their docstrings as one line for tyro to wrap.

    From a docstring tyro keeps the line breaks of the source. The process exits after the help, so the change does no harm.
    """
    import docstring_parser
    from typing_extensions import Doc

    texts = {field.arg_name: field.description for field in docstring_parser.parse_from_object(options).params}
    for field in dataclasses.fields(options):
        annotation, _ = _without_marks(field.type)
        for inner in (annotation, *get_args(annotation)):
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                _join_help_lines(inner)
        if text := texts.get(field.name):
            options.__annotations__[field.name] = Annotated[field.type, Doc(" ".join(text.split()))]


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


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def _wrap(text: str, width: int) -> list[str]:
    """Lines of a text, broken only at spaces so that commands and flags can be copied."""
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


@dataclasses.dataclass
class Flag:
    """A flag or positional argument. types: types and literal choices of its value. repeated: takes any number of values.
    switch: takes none."""

    name: str
    types: tuple
    repeated: bool = False
    switch: bool = False
    required: bool = False

    @property
    def choices(self) -> list[str]:
        return [str(choice) for choice in self.types if not isinstance(choice, type)]

    def check(self, value: str) -> None:
        """Raise ConfigError for a value of the wrong type. Ranges are checked with the config."""
        if self.name != ADDRESS:
            check_local(value, self.name)  # no flag takes a URL, and most would create a local directory of that name
        if str in self.types or value in self.choices or (NoneType in self.types and value == "None"):
            return
        for kind in NUMBERS.keys() & set(self.types):
            try:
                kind(value)
                return
            except ValueError:
                pass
        if self.choices:
            raise one_of(self.name, value, self.choices)
        raise ConfigError(self.name, value, reason=f"expected {self.expected}")

    @property
    def expected(self) -> str:
        """What the flag's value must be."""
        numbers = [NUMBERS[kind] for kind in self.types if kind in NUMBERS]
        none = ["None"] * (NoneType in self.types and bool(numbers))
        return " or ".join([", ".join(self.choices)] * bool(self.choices) + numbers + none) or "a value"


class Flags:
    """The flags of a command by name, and its positional arguments."""

    def __init__(self) -> None:
        self.named: dict[str, Flag] = {}
        self.positional: list[Flag] = []

    @classmethod
    def of(cls, options: type, default: Any = None) -> "Flags":
        """The flags that tyro derives from a dataclass. default: values, which decide the number of phases, for example."""
        flags = cls()
        flags._add(options, default, "")
        return flags

    def _add(self, options: Any, value: Any, prefix: str) -> None:
        import tyro

        for field in dataclasses.fields(options):
            default, required = _default(field, value)
            annotation, marks = _without_marks(field.type)
            name = "" if any(getattr(mark, "name", None) == "" for mark in marks) else field.name.replace("_", "-")
            inner = f"{prefix}{name}." if name else prefix
            if dataclasses.is_dataclass(annotation):
                self._add(annotation, default, inner)
            elif isinstance(default, tuple) and default and dataclasses.is_dataclass(default[0]):
                for index, item in enumerate(default):
                    self._add(type(item), item, f"{inner}{index}.")
            elif annotation is bool:
                negatable = tyro.conf.FlagCreatePairsOff not in marks
                for spelling in (name, f"no-{name}")[: 1 + negatable]:
                    self.named[f"--{prefix}{spelling}"] = Flag(f"--{prefix}{spelling}", (), switch=True)
            else:
                types, repeated = _value_types(annotation)
                flag = Flag(f"--{prefix}{name}", types, repeated, required=required and not repeated)
                if tyro.conf.Positional in marks:
                    self.positional.append(dataclasses.replace(flag, name=name.upper()))
                else:
                    self.named[flag.name] = flag


def _default(field: dataclasses.Field, value: Any) -> tuple[Any, bool]:
    """(default value of a field, whether it is required)."""
    if value is not None:
        return getattr(value, field.name), False
    if field.default is not dataclasses.MISSING:
        return field.default, False
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory(), False
    return None, True


def _without_marks(annotation: Any) -> tuple[Any, list]:
    """(type, metadata) of an annotation that may be Annotated."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return inner, marks
    return annotation, []


def _value_types(annotation: Any) -> tuple[tuple, bool]:
    """(types and literal choices of a value, whether any number of values is allowed)."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value_types(arguments[0])
    if origin in (Union, UnionType):
        parts = [_value_types(part) for part in arguments]
        return tuple(kind for kinds, _ in parts for kind in kinds), any(repeated for _, repeated in parts)
    if origin is Literal:
        return arguments, False
    if origin is tuple:
        return _value_types(arguments[0])[0], True
    return (annotation,), False


def check(flags: Flags, arguments: list[str], program: str) -> bool:
    """Raise ConfigError for the first word that cannot be parsed. Returns True if --help precedes it."""
    seen, positional, rest = set(), iter(flags.positional), list(arguments)
    argument = next(positional, None)
    while rest:
        word = rest.pop(0)
        if asks_for_help([word]):
            return True
        if not _is_flag(word):
            if argument is None:
                raise ConfigError(repr(word), reason="unexpected argument", hint=f"`{program} --help` lists all flags")
            argument.check(word)
            seen.add(argument.name)
            argument = argument if argument.repeated else next(positional, None)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        flag = flags.named.get(name)
        if flag is None:
            raise _unknown(name, flags, program)
        seen.add(name)
        if flag.switch:
            if equals:
                raise ConfigError(name, value, reason="takes no value")
            continue
        values = [value] if equals else []
        while not equals and rest and not _is_flag(rest[0]) and (flag.repeated or not values):
            values.append(rest.pop(0))
        if not values and not flag.repeated:
            raise ConfigError(name, reason="missing value", hint=f"expected {flag.expected}")
        for value in values:
            flag.check(value)
    for flag in (*flags.named.values(), *flags.positional):
        if flag.required and flag.name not in seen:
            raise ConfigError(flag.name, reason="required", hint=f"see `{program} --help`")
    return False


def _is_flag(word: str) -> bool:
    """Whether a word starts like a flag and is not a negative number."""
    return re.match(r"--|-[^\d.]", word) is not None


def _unknown(name: str, flags: Flags, program: str) -> ConfigError:
    """The error for an unknown flag, with the most similar one by its whole name or its last part (--depth: --model.depth)."""
    by_last_part = {flag.rpartition(".")[2].removeprefix("--"): flag for flag in reversed(flags.named)}
    word = name.removeprefix("--")
    alias = ALIASES.get(word)
    near = (
        by_last_part.get(word)
        or (alias if alias in flags.named else None)
        or nearest(name, [*flags.named, "--help"])
        or by_last_part.get(nearest(word, by_last_part) or "")
    )
    hint = f"did you mean {near}?" if near else f"`{program} --help` lists all flags"
    return ConfigError(name, reason="unknown flag", hint=hint)
