"""The command line against the flags that there are: what is wrong in one line, with the nearest flag or what may be given."""

import dataclasses
import difflib
import inspect
import shutil
import textwrap
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from jaxdp.errors import ConfigError

NARROWEST, WIDEST = 40, 100  # columns of running text
NUMBERS = {int: "a whole number", float: "a number"}
ELSEWHERE = {  # what other trainers call a flag, where it is not the end of its name here
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


def nearest(word: str, known) -> str | None:
    """The one of `known` that is most like a word, if any is."""
    return next(iter(difflib.get_close_matches(word, known, 1)), None)


def one_of(what: str, word: str, known) -> ConfigError:
    """The error for a word that must be one of those known."""
    known = [str(one) for one in known]
    near = nearest(word, known)
    hint = f"did you mean {near}? " if near else ""
    return ConfigError(f"{what}: {word!r} is not allowed; {hint}give {', '.join(known)}")


def rows(told: dict[str, str]) -> str:
    """Names and what they are, folded to the terminal's width."""
    width, indent = _width(), 14 * " "
    folded = (indent + f"\n{indent}".join(_folded(what, width - len(indent))) for what in told.values())
    return "\n".join(f"  {name:<11} {what.lstrip()}" for name, what in zip(told, folded, strict=True))


def asks_for_help(arguments) -> bool:
    return bool({"-h", "--help"} & set(arguments))


def parse(kind: type, arguments, program: str, default=None):
    """The dataclass `kind` filled from a command line. default: a value of it, where its own defaults are not meant.

    Raises ConfigError for a flag that is not known, which names the nearest, for a value that is missing, and for one that is
    no number or none of the choices. `--help` is printed, and exits.
    """
    import tyro

    if not asks_for_help(arguments):
        check(Flags.of(kind, default), list(arguments), program)
    given = {} if default is None else {"default": default}
    return tyro.cli(kind, args=arguments, prog=program, description=description(kind), **given)


def description(kind: type) -> str:
    """The docstring of a command as wide as the terminal, with its examples, which tyro would leave out.

    Indented, since tyro joins lines that begin with a letter.
    """
    text, _, examples = inspect.getdoc(kind).partition("\n\nExamples:\n")
    width = _width()
    filled = ("\n".join(_folded(part, width - 2)) for part in text.split("\n\n"))
    shown = textwrap.indent("\n\n".join(filled), "  ")
    folded = [(" \\\n" + 6 * " ").join(_folded(line, width - 8)) for line in examples.splitlines()]
    return "\n".join([f"{shown}\n\nExamples:", *(f"  {line}" for line in folded)]) if examples else shown


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def _folded(text: str, width: int) -> list[str]:
    """The lines of a text, broken between words alone, so that commands and flags can be copied."""
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


@dataclasses.dataclass
class Flag:
    """words: what a value may be: {type or choice}; several: any number of values; switch: none at all."""

    name: str
    words: tuple
    several: bool = False
    switch: bool = False
    required: bool = False

    @property
    def choices(self) -> list[str]:
        return [str(one) for one in self.words if not isinstance(one, type)]

    def check(self, value: str) -> None:
        """Raise ConfigError for a value that this flag cannot have. Ranges are for the configuration to check."""
        if str in self.words or value in self.choices or (NoneType in self.words and value == "None"):
            return
        for kind in NUMBERS.keys() & set(self.words):
            try:
                kind(value)
                return
            except ValueError:
                pass
        if self.choices:
            raise one_of(self.name, value, self.choices)
        raise ConfigError(f"{self.name}: {value!r} is not allowed; give {self.in_words}")

    @property
    def in_words(self) -> str:
        """What may stand behind it."""
        kinds = [NUMBERS[one] for one in self.words if one in NUMBERS]
        nothing = ["None"] * (NoneType in self.words and bool(kinds))
        return " or ".join([", ".join(self.choices)] * bool(self.choices) + kinds + nothing) or "one"


class Flags:
    """The flags of a command: by name, and those that stand without one."""

    def __init__(self):
        self.named: dict[str, Flag] = {}
        self.positional: list[Flag] = []

    @classmethod
    def of(cls, kind: type, default=None) -> "Flags":
        found = cls()
        found._add(kind, default, "")
        return found

    def _add(self, kind: type, value, prefix: str) -> None:
        import tyro

        for field in dataclasses.fields(kind):
            held, required = _default(field, value)
            annotation, marks = field.type, ()
            if get_origin(annotation) is Annotated:
                annotation, *marks = get_args(annotation)
            name = "" if any(getattr(mark, "name", None) == "" for mark in marks) else field.name.replace("_", "-")
            inner = f"{prefix}{name}." if name else prefix
            if dataclasses.is_dataclass(annotation):
                self._add(annotation, held, inner)
            elif isinstance(held, tuple) and held and dataclasses.is_dataclass(held[0]):
                for index, one in enumerate(held):
                    self._add(type(one), one, f"{inner}{index}.")
            elif annotation is bool:
                both = tyro.conf.FlagCreatePairsOff not in marks
                for spelled in (name, f"no-{name}")[: 1 + both]:
                    self.named[f"--{prefix}{spelled}"] = Flag(f"--{prefix}{spelled}", (), switch=True)
            else:
                words, several = _words(annotation)
                flag = Flag(f"--{prefix}{name}", words, several, required=required and not several)
                if tyro.conf.Positional in marks:
                    self.positional.append(dataclasses.replace(flag, name=name.upper()))
                else:
                    self.named[flag.name] = flag


def _default(field, value) -> tuple[Any, bool]:
    """(what a field holds unless it is given, whether it must be given)."""
    if value is not None:
        return getattr(value, field.name), False
    if field.default is not dataclasses.MISSING:
        return field.default, False
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory(), False
    return None, True


def _words(annotation) -> tuple[tuple, bool]:
    """(types and choices that a value may be, whether there may be several)."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(inside[0])
    if origin in (Union, UnionType):
        parts = [_words(one) for one in inside]
        return tuple(word for words, _ in parts for word in words), any(several for _, several in parts)
    if origin is Literal:
        return inside, False
    if origin is tuple:
        return _words(inside[0])[0], True
    return (annotation,), False


def check(flags: Flags, arguments: list[str], program: str) -> None:
    """Raise ConfigError, one line, for the first thing that cannot be parsed."""
    seen, places, rest = set(), iter(flags.positional), list(arguments)
    place = next(places, None)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            if place is None:
                raise ConfigError(f"{word!r} is not allowed there: no flag takes it; `{program} --help` lists them")
            place.check(word)
            seen.add(place.name)
            place = place if place.several else next(places, None)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        flag = flags.named.get(name)
        if flag is None:
            raise _unknown(name, flags, program)
        seen.add(name)
        if flag.switch:
            if equals:
                raise ConfigError(f"{name}: {value!r} is not allowed; it takes no value; give {name} alone, or leave it out")
            continue
        values = [value] if equals else []
        while not equals and rest and not _is_flag(rest[0]) and (flag.several or not values):
            values.append(rest.pop(0))
        if not values and not flag.several:
            raise ConfigError(f"{name}: its value is missing; give {flag.in_words}")
        for one in values:
            flag.check(one)
    for flag in (*flags.named.values(), *flags.positional):
        if flag.required and flag.name not in seen:
            raise ConfigError(f"{flag.name}: is missing; `{program} --help` says what to give")


def _is_flag(word: str) -> bool:
    """A word that begins as a flag does, and is no negative number."""
    return word.startswith("--") or (len(word) > 1 and word[0] == "-" and not word[1].isdigit() and word[1] != ".")


def _unknown(name: str, flags: Flags, program: str) -> ConfigError:
    """The nearest by the whole name, or by the last part alone: --depth for --model.depth."""
    last = {one.rpartition(".")[2].removeprefix("--"): one for one in reversed(flags.named)}
    word = name.removeprefix("--")
    meant = ELSEWHERE.get(word)
    near = (
        last.get(word)
        or (meant if meant in flags.named else None)
        or nearest(name, [*flags.named, "--help"])
        or last.get(nearest(word, last))
    )
    return ConfigError(f"{name}: unknown flag; " + (f"did you mean {near}?" if near else f"`{program} --help` lists all"))
