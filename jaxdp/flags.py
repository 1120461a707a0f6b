"""Parsing of command lines into dataclasses, with the first error in one line that names the nearest flag."""

import dataclasses
import inspect
import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from jaxdp.errors import ConfigError, nearest, one_of, plural
from jaxdp.files import RUNS, check_local, check_no_password, is_run, known_recipes
from jaxdp.flag_help import ALL, GENERAL, asks_for_help, purpose, show
from jaxdp.foreign_flags import COUNTERPARTS, MEANT_IN, NO_COUNTERPART, Counterpart
from jaxdp.registry import OneOf

Options = TypeVar("Options")
WORKDIR = "--workdir"
TAKE_URLS = (
    "--coordinator",
    "--logging.mlflow",
    WORKDIR,
    "WORKDIR",
    "--resume",
    "--data.directory",
)  # the first two are no paths
UNEXPECTED = "unexpected argument"
ANY = "a value"  # what a flag of type STR expects
NUMBERS = {int: "an integer", float: "a number"}


def flag_value(arguments: list[str], flag: str) -> str | None:
    """The value of a flag on an unparsed command line, the last if it is repeated; None if it is absent or has no value."""
    value = None
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        name, equals, after = word.partition("=")
        if name.replace("_", "-") == flag.replace("_", "-"):
            value = after if equals else None if _is_flag(following) else following
    return value


def parse(
    options: type[Options],
    arguments: Iterable[str],
    program: str,
    *,
    default: Options | None = None,
    everyday: Sequence[str] = (),
) -> Options:
    """An instance of the dataclass `options` from a command line. default: values of omitted flags. everyday: flags of config
    fields that `--help` shows.

    Raises ConfigError for an unknown flag, a missing value, or a value of the wrong type. `--help` prints help and exits.
    """
    flags = Flags.of(options, default)
    topic, found = read(flags, list(arguments), program)
    if topic is not None:
        show(options, default, flags, program=program, topic=topic, everyday=everyday)
    values = {flag.path: flag.default or () for flag in flags.positional if flag.repeated}
    values |= {flag.path: flag.value(words) for flag, words in found}
    if default is None:
        own = [path for path in values if len(path) == 1]  # those that are required are among them
        default = options(**{str(path[0]): values.pop(path) for path in own})
    for path, value in values.items():
        default = _with_value(default, path, value)
    return default


def _with_value(part: Any, path: Sequence[Any], value: Any) -> Any:
    """A dataclass, or a tuple of dataclasses, with another value at a path of fields and indices."""
    if not path:
        return value
    first, *rest = path
    if isinstance(part, tuple):
        return tuple(_with_value(item, rest, value) if index == first else item for index, item in enumerate(part))
    return dataclasses.replace(part, **{first: _with_value(getattr(part, first), rest, value)})


@dataclasses.dataclass
class Flag:
    """A flag or positional argument.

    types: types and literal choices of its value. field: the field that it sets, of the dataclass `owner`, and path: from the
    options to it. default: value of the field if omitted. group: group of the flag in the help. spelling: the flag that sets
    the field; differs from the name for --no-NAME. metavar: its values in words. repeated: takes any number of values. switch:
    takes none.
    """

    name: str
    types: tuple
    field: dataclasses.Field
    owner: type
    default: Any
    group: str
    spelling: str
    path: tuple[str | int, ...]
    metavar: str = ""
    repeated: bool = False
    switch: bool = False
    required: bool = False

    @property
    def choices(self) -> list[str]:
        return [str(choice) for choice in self.types if not isinstance(choice, type)]

    @property
    def value_name(self) -> str:
        """The type of the flag's value in the help: STR, INT; "" for a switch."""
        if self.metavar:
            return self.metavar
        kinds = [kind if isinstance(kind, type) else type(kind) for kind in self.types if kind is not NoneType]
        return "|".join(dict.fromkeys(kind.__name__.upper() for kind in kinds))

    def check(self, value: str) -> None:
        """Raise ConfigError for a value of the wrong type. Ranges are checked with the config."""
        check_no_password(value, self.name)
        if self.name not in TAKE_URLS:
            check_local(value, self.name)  # most flags would create a local directory of that name
        if str in self.types or value in self.choices or (NoneType in self.types and value == "None"):
            return
        for kind in NUMBERS.keys() & set(self.types):
            try:
                kind(value)
                return
            except ValueError:
                pass
        if self.choices and not NUMBERS.keys() & set(self.types):
            raise one_of(self.name, value, self.choices)
        raise ConfigError(self.name, value, reason=f"expected {self.expected}")

    def value(self, words: list[str]) -> Any:
        """The value of the field for checked words."""
        if self.switch:
            return self.name == self.spelling
        values = [self._value(word) for word in words]
        is_alone = len(words) == 1 and words[0] in self.choices and bool(NUMBERS.keys() & set(self.types))  # not a tuple
        return values[0] if is_alone or not self.repeated else tuple(values)

    def _value(self, word: str) -> Any:
        if NoneType in self.types and word == "None":
            return None
        if word in self.choices:
            return next(choice for choice in self.types if str(choice) == word)
        return next((kind(word) for kind in NUMBERS if kind in self.types), word)

    @property
    def expected(self) -> str:
        """What the flag's value must be."""
        if self.metavar:
            return self.metavar
        numbers = [NUMBERS[kind] for kind in self.types if kind in NUMBERS]
        none = ["None"] * (NoneType in self.types and bool(numbers))
        return " or ".join([", ".join(self.choices)] * bool(self.choices) + numbers + none) or ANY


class Flags:
    """The flags of a command by name, its positional arguments, and its groups of flags with their dataclasses.

    A group is a dataclass in the options, or in the config in the options; `general` has the other flags. A command without
    such a dataclass has no groups.
    """

    def __init__(self) -> None:
        self.named: dict[str, Flag] = {}
        self.positional: list[Flag] = []
        self.groups: dict[str, type] = {}

    @classmethod
    def of(cls, options: type, default: Any = None) -> "Flags":
        """The flags that tyro derives from a dataclass. default: values, which decide the number of phases, for example."""
        flags = cls()
        flags._add(options, default, "", group=GENERAL, path=())
        if flags.groups:
            flags.groups = {GENERAL: options} | flags.groups
        return flags

    def help_command(self, program: str) -> str:
        """The command that lists all flags."""
        return f"{program} --help {ALL}" if self.groups else f"{program} --help"

    def _add(self, options: Any, value: Any, prefix: str, *, group: str, path: tuple[str | int, ...]) -> None:
        import tyro

        for field in sorted(dataclasses.fields(options), key=lambda field: bool(field.kw_only)):
            default, required = _default(field, value)
            own_path = (*path, field.name)
            annotation, marks = _without_marks(field.type)
            name = "" if any(getattr(mark, "name", None) == "" for mark in marks) else field.name.replace("_", "-")
            inner = f"{prefix}{name}." if name else prefix
            section = field.name.replace("_", "-")
            if dataclasses.is_dataclass(annotation):
                if any(dataclasses.is_dataclass(_without_marks(each.type)[0]) for each in dataclasses.fields(annotation)):
                    section = group  # the config, which contains the sections
                else:
                    self.groups[section] = cast(type, annotation)
                self._add(annotation, default, inner, group=section, path=own_path)
                continue
            if isinstance(default, tuple) and default and dataclasses.is_dataclass(default[0]):
                self.groups[section] = type(default[0])
                for index, item in enumerate(default):
                    self._add(type(item), item, f"{inner}{index}.", group=section, path=(*own_path, index))
                continue
            spelling = f"--{prefix}{name}"
            metavar = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), "")
            flag = Flag(spelling, (), field, options, default, group, spelling, own_path, metavar)
            if annotation is bool:
                negatable = tyro.conf.FlagCreatePairsOff not in marks
                for shown in (name, f"no-{name}")[: 1 + negatable]:
                    self.named[f"--{prefix}{shown}"] = dataclasses.replace(flag, name=f"--{prefix}{shown}", switch=True)
                continue
            flag.types, flag.repeated = _value_types(field.type)
            flag.required = required and not flag.repeated
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
        names = next((tuple(mark.table) for mark in arguments[1:] if isinstance(mark, OneOf)), None)
        return (names, False) if names else _value_types(arguments[0])
    if origin in (Union, UnionType):
        parts = [_value_types(part) for part in arguments]
        return tuple(kind for kinds, _ in parts for kind in kinds), any(repeated for _, repeated in parts)
    if origin is Literal:
        return arguments, False
    if origin is tuple:
        return _value_types(arguments[0])[0], True
    return (annotation,), False


def read(flags: Flags, arguments: list[str], program: str) -> tuple[str | None, list[tuple[Flag, list[str]]]]:
    """(topic, flags and positional arguments with their words). Raises ConfigError for the first word that cannot be parsed.

    topic: if --help precedes an error the word after --help, or "" if there is none; otherwise None.
    """
    found, positional, rest = dict[tuple, tuple[Flag, list[str]]](), iter(flags.positional), list(arguments)
    argument = next(positional, None)
    while rest:
        word = rest.pop(0)
        if asks_for_help([word]):
            return word.partition("=")[2] or next((following for following in rest[:1] if not _is_flag(following)), ""), []
        if not _is_flag(word):
            if WORKDIR in flags.named and is_run(word):
                raise ConfigError(repr(word), reason="is a run", hint=f"give it with {WORKDIR} {word}")
            if argument is None:
                missing = [flag.name for flag in flags.named.values() if flag.required and not flag_value(arguments, flag.name)]
                meant = f"{missing[0]} {word}" if missing else _meant_by(word, flags)
                hint = f"did you mean {meant}?" if meant else f"`{flags.help_command(program)}` lists all flags"
                raise ConfigError(repr(word), reason=UNEXPECTED, hint=hint)
            argument.check(word)
            found.setdefault(argument.path, (argument, []))[1].append(word)
            argument = argument if argument.repeated else next(positional, None)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        flag = flags.named.get(name)
        if flag is None:
            raise _unknown_flags(flags, program, [word, *rest])
        if flag.switch:
            if equals:
                raise ConfigError(name, value, reason="takes no value")
            found[flag.path] = flag, []
            continue
        values = [value] if equals else []
        while not equals and rest and not _is_flag(rest[0]) and (flag.repeated or not values):
            values.append(rest.pop(0))
        if not values and not flag.repeated:
            expected = f"expected {flag.expected}" if flag.expected != ANY else f"expected: {purpose(flag)}"
            raise ConfigError(name, reason="missing value", hint=expected)
        for value in values:
            flag.check(value)
        found[flag.path] = flag, values
    for flag in (*flags.named.values(), *flags.positional):
        if flag.required and flag.path not in found:
            example = re.search(rf"{flag.name} \S+", inspect.getdoc(flag.owner) or "")
            see = f"for example {example[0]}" if example else f"see `{program} --help`"
            raise ConfigError(flag.name, reason="required", hint=_runs_hint() if flag.name == WORKDIR else see)
    return None, list(found.values())


def _meant_by(word: str, flags: Flags) -> str | None:
    """The flags with which a command takes a recipe, a folder of images or a file to write; None for another word."""
    for flag, suffix in (("--output", ".safetensors"), ("--card", ".md")):
        if flag in flags.named and word.endswith(suffix):
            return f"{flag} {shlex.quote(word)}"
    if "--config" in flags.named and (word in known_recipes() or word.endswith((".py", ".json"))):
        return f"--config {shlex.quote(word)}"
    is_folder = "--data.directory" in flags.named and Path(word).is_dir()
    return f"--data.source folder --data.directory {shlex.quote(word)}" if is_folder else None


def _runs_hint() -> str:
    """How to give a run, with those in the folder of runs."""
    runs = sorted(str(path) for path in Path(RUNS).glob("*") if is_run(path))
    if not runs:
        return f"give the directory of a run; ./{RUNS} holds none"
    return f"give the directory of a run, for example {WORKDIR} {runs[0]}; ./{RUNS} holds {', '.join(runs)}"


def _is_flag(word: str) -> bool:
    """Whether a word starts like a flag and is not a negative number."""
    return re.match(r"--|-[^\d.]", word) is not None


def _is_valid(flags: Flags, words: list[str]) -> bool:
    """Whether the flags in `words` exist and have values of their types."""
    try:
        read(flags, [*words, "--help"], "")  # which ends it before required flags
    except ConfigError:
        return False
    return True


def _unknown_flags(flags: Flags, program: str, words: list[str]) -> ConfigError:
    """The error for all unknown flags among `words`, the first of which is one."""
    errors = []
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if _is_flag(word) and name not in flags.named and not asks_for_help([word]):
            errors.append(_unknown(flags, program, name=name, following=[value] if equals else words[index + 1 :]))
    first, *others = errors
    return ConfigError(first.field, reason=first.reason, hint="; ".join([first.hint, *map(str, others)]))


def _unknown(flags: Flags, program: str, *, name: str, following: list[str]) -> ConfigError:
    """The error for an unknown flag, with its counterpart or the most similar flag. following: the words after it."""
    error = partial(ConfigError, name, reason="unknown flag")
    word = name.removeprefix("--")
    joined = re.sub(r"\.(\d+\.)?", "-", word)  # model.ema as model-ema
    foreign = _counterparts(flags, program)
    fields = _Fields(flags, word)

    def counterpart_error(known: str) -> ConfigError:
        counterpart = foreign[known]
        values = list(itertools.takewhile(lambda word: not _is_flag(word), following))
        values = values if flags.named[counterpart.flag].repeated else values[:1]
        return error(hint=counterpart.hint(values, program, lambda words: _is_valid(flags, words)))

    def similar_error(near: str) -> ConfigError:
        every = phases > 1 and not phase and near.startswith("--batch.")
        return error(hint=f"did you mean {near}{' (every phase has its own)' if every else ''}?")

    phases = sum(re.fullmatch(r"--batch\.\d+\.global-batch", flag) is not None for flag in flags.named)
    phase = re.match(r"--batch\.(\d+)\.", name)
    if phase and 0 < phases <= int(phase[1]):
        hint = "add phases in a recipe file, as batch=(Phase(...), Phase(...)) in configs/digits.py"
        return ConfigError(name, reason=f"the recipe has only {plural(phases, 'phase')}", hint=hint)
    if fields.same and "." in word:
        return similar_error(fields.same)
    for known in (joined, fields.last):
        if known in foreign:
            return counterpart_error(known)
        if known in flags.groups:
            return error(hint=f"its fields are {', '.join(flag for flag in flags.named if flags.named[flag].group == known)}")
        if known == word and any(argument.name == word.upper() for argument in flags.positional):
            return error(hint=f"give it as an argument: {' '.join([program, *following[:1]])}")
        if flags.groups and known in NO_COUNTERPART and known not in fields.by_last_part:
            return error(hint=NO_COUNTERPART[known])
    if near := fields.same or fields.nearest():
        return similar_error(near)
    if "." not in word and (similar := _nearest_word(word, [*foreign, *fields.by_last_part])):
        return counterpart_error(similar) if similar in foreign else similar_error(fields.by_last_part[similar])
    return error(hint=f"`{flags.help_command(program)}` lists all flags")


def _counterparts(flags: Flags, program: str) -> dict[str, Counterpart]:
    """The names of other trainers' flags that have a counterpart in a command."""
    meant = MEANT_IN.get(program, {})
    found = {name: COUNTERPARTS[meant.get(name, name)] for name in COUNTERPARTS}
    return {name: counterpart for name, counterpart in found.items() if counterpart.flag in flags.named}


def _nearest_word(word: str, words: Iterable[str]) -> str | None:
    """The most similar of words that begin with the same letter: short words of other letters resemble many."""
    return nearest(word, [each for each in words if each[:1] == word[:1]])


class _Fields:
    """What the flags of a command have in common with `word`, an unknown one without --.

    A flag with a section is compared part by part: its section with the sections, its field with the fields of the nearest one.
    last: the last part of the word. by_last_part: the first flag with each last part. same: the flag of the same field in the
    nearest section, or of a word without section the flag with this last part; None if there is none.
    """

    def __init__(self, flags: Flags, word: str) -> None:
        self.word, self.named = word, list(flags.named)
        section, *index, self.last = word.split(".") if "." in word else ("", word)
        self.by_last_part = {_last(flag): flag for flag in reversed(self.named)}
        self.section: dict[str, str] = {}
        if section:
            parts = {flag: flag.removeprefix("--").split(".") for flag in reversed(self.named) if "." in flag}
            near = nearest(section, dict.fromkeys(first for first, *_ in parts.values()))
            inside = {flag: rest for flag, (first, *rest) in parts.items() if first == near}
            self.section = {rest[-1]: flag for flag, rest in inside.items() if not index or rest[:-1] in (index, [])}
        self.same = (self.section if section else self.by_last_part).get(self.last)

    def nearest(self) -> str | None:
        """The most similar flag with as many parts, or the only flag whose last part is the word's; None if there is none."""
        if "." not in self.word:
            return nearest(f"--{self.word}", [*(flag for flag in self.named if "." not in flag), "--help"])
        field = nearest(self.last, self.section)
        same = [flag for flag in self.named if _last(flag) == self.last]
        return self.section[field] if field else same[0] if len(same) == 1 else None


def _last(flag: str) -> str:
    return flag.rpartition(".")[2].removeprefix("--")
