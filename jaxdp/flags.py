"""Parsing of command lines into dataclasses: every field is a flag, and an error is one line that names the nearest flag."""

import contextlib
import dataclasses
import inspect
import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

from jaxdp.errors import ConfigError, nearest, one_of, plural
from jaxdp.files import RUNS, check_local, check_no_password, is_run, known_recipes
from jaxdp.flag_help import ALL, GENERAL, asks_for_help, purpose, show
from jaxdp.foreign_flags import COUNTERPARTS, NO_COUNTERPART, NO_COUNTERPART_IN, Counterpart
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


FieldPath = tuple[str | int, ...]  # of a field in the options, through the sections around it


class Arg(NamedTuple):
    """Annotation of a field: how it is spelled on a command line.

    metavar: its values in words. is_prefix: whether the flags of its fields, if it is a section, begin with its name.
    positional: without a flag. negatable: whether a bool also has a flag --no-NAME.
    """

    metavar: str = ""
    is_prefix: bool = True
    positional: bool = False
    negatable: bool = True


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
    values, topic = read(flags, list(arguments), program)
    if topic is not None:
        show(options, flags, program=program, topic=topic, everyday=everyday)
    return _build(options, default, values)


def _build(options: type[Options], default: Options | None, values: dict[FieldPath, Any]) -> Options:
    """An instance of a dataclass. default: values of omitted fields. values: of fields, also of sections."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(cast(Any, options)):
        inner = {path[1:]: value for path, value in values.items() if path[0] == field.name}
        value, _ = _default(field, default)
        if () in inner:
            value = inner[()]
        elif inner and isinstance(value, tuple):
            value = tuple(
                _build(type(section), section, {path[1:]: each for path, each in inner.items() if path[0] == index})
                for index, section in enumerate(value)
            )
        elif inner:
            value = _build(type(value), value, inner)
        given[field.name] = value
    return options(**given)


@dataclasses.dataclass
class Flag:
    """A flag or positional argument.

    types: types and literal choices of its value. path, field: of what it sets, in the dataclass `owner`. default: value of
    the field if omitted. group: group of the flag in the help. spelling: the flag that sets the field; differs from the name
    for --no-NAME. metavar: its values in words. repeated: takes any number of values. alone: values that stand for all values
    of a repeated flag. switch: takes none.
    """

    name: str
    types: tuple
    path: FieldPath
    field: dataclasses.Field
    owner: type
    default: Any
    group: str
    spelling: str
    metavar: str = ""
    repeated: bool = False
    alone: tuple = ()
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

    def parse(self, words: list[str]) -> Any:
        """The value of the field. Raises ConfigError for a word of the wrong type. Ranges are checked with the config."""
        values = tuple(map(self._parse_word, words))
        if self.repeated:
            return values[0] if len(values) == 1 and values[0] in self.alone else values
        return values[0]

    def _parse_word(self, value: str) -> Any:
        check_no_password(value, self.name)
        if self.name not in TAKE_URLS:
            check_local(value, self.name)  # most flags would create a local directory of that name
        if NoneType in self.types and value == "None":
            return None
        for choice in self.types:
            if not isinstance(choice, type) and str(choice) == value:
                return choice
        if str in self.types:
            return value
        for kind in [kind for kind in NUMBERS if kind in self.types]:
            with contextlib.suppress(ValueError):
                return kind(value)
        if self.choices and not NUMBERS.keys() & set(self.types):
            raise one_of(self.name, value, self.choices)
        raise ConfigError(self.name, value, reason=f"expected {self.expected}")

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
        """The flags of a dataclass. default: values, which decide the number of phases, for example."""
        flags = cls()
        flags._add(options, default, "", path=(), group=GENERAL)
        if flags.groups:
            flags.groups = {GENERAL: options} | flags.groups
        return flags

    def help_command(self, program: str) -> str:
        """The command that lists all flags."""
        return f"{program} --help {ALL}" if self.groups else f"{program} --help"

    def _add(self, options: Any, value: Any, prefix: str, *, path: FieldPath, group: str) -> None:
        for field in sorted(dataclasses.fields(options), key=lambda field: bool(field.kw_only)):
            default, required = _default(field, value)
            annotation, marks = _without_marks(field.type)
            spelled = next((mark for mark in marks if isinstance(mark, Arg)), Arg())
            name, here = field.name.replace("_", "-"), (*path, field.name)
            inner = f"{prefix}{name}." if spelled.is_prefix else prefix
            section = name
            if dataclasses.is_dataclass(annotation):
                if any(dataclasses.is_dataclass(_without_marks(each.type)[0]) for each in dataclasses.fields(annotation)):
                    section = group  # the config, which contains the sections
                else:
                    self.groups[section] = cast(type, annotation)
                self._add(annotation, default, inner, path=here, group=section)
                continue
            if isinstance(default, tuple) and default and dataclasses.is_dataclass(default[0]):
                self.groups[section] = type(default[0])
                for index, item in enumerate(default):
                    self._add(type(item), item, f"{inner}{index}.", path=(*here, index), group=section)
                continue
            spelling = f"--{prefix}{name}"
            flag = Flag(spelling, (), here, field, options, default, group, spelling, spelled.metavar)
            if annotation is bool:
                for shown in (name, f"no-{name}")[: 1 + spelled.negatable]:
                    self.named[f"--{prefix}{shown}"] = dataclasses.replace(flag, name=f"--{prefix}{shown}", switch=True)
                continue
            flag.types, flag.repeated, flag.alone = _value_types(field.type)
            flag.required = required and not flag.repeated
            if spelled.positional:
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
    return (), True  # of any number of values; any other is given


def _without_marks(annotation: Any) -> tuple[Any, list]:
    """(type, metadata) of an annotation that may be Annotated."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return inner, marks
    return annotation, []


def _value_types(annotation: Any) -> tuple[tuple, bool, tuple]:
    """(types and literal choices of a value, whether any number of values is allowed, `Flag.alone`)."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        names = next((tuple(mark.table) for mark in arguments[1:] if isinstance(mark, OneOf)), None)
        return (names, False, ()) if names else _value_types(arguments[0])
    if origin in (Union, UnionType):
        parts = [_value_types(part) for part in arguments]
        alone = tuple(kind for kinds, several, _ in parts if not several for kind in kinds)
        return tuple(kind for kinds, _, _ in parts for kind in kinds), any(several for _, several, _ in parts), alone
    if origin is Literal:
        return arguments, False, ()
    if origin is tuple:
        return _value_types(arguments[0])[0], True, ()
    return (annotation,), False, ()


def read(flags: Flags, arguments: list[str], program: str) -> tuple[dict[FieldPath, Any], str | None]:
    """(values of the fields, the topic of --help: the word after it, "" without one; None without --help).

    Raises ConfigError for the first word that cannot be parsed before --help, and without it for a flag that is required.
    """
    values, rest = dict[FieldPath, Any](), list(arguments)
    words_of: dict[FieldPath, list[str]] = {}  # of positional arguments
    positional = iter(flags.positional)
    argument = next(positional, None)
    while rest:
        word = rest.pop(0)
        if asks_for_help([word]):
            topic = next((following for following in rest[:1] if not _is_flag(following)), "")
            return values, word.partition("=")[2] or topic
        if not _is_flag(word):
            if WORKDIR in flags.named and is_run(word):
                raise ConfigError(repr(word), reason="is a run", hint=f"give it with {WORKDIR} {word}")
            if argument is None:
                missing = [flag.name for flag in flags.named.values() if flag.required and not flag_value(arguments, flag.name)]
                meant = f"{missing[0]} {word}" if missing else _meant_by(word, flags)
                hint = f"did you mean {meant}?" if meant else f"`{flags.help_command(program)}` lists all flags"
                raise ConfigError(repr(word), reason=UNEXPECTED, hint=hint)
            words_of.setdefault(argument.path, []).append(word)
            values[argument.path] = argument.parse(words_of[argument.path])
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
            values[flag.path] = flag.name == flag.spelling
            continue
        words = [value] if equals else []
        while not equals and rest and not _is_flag(rest[0]) and (flag.repeated or not words):
            words.append(rest.pop(0))
        if not words and not flag.repeated:
            expected = f"expected {flag.expected}" if flag.expected != ANY else f"expected: {purpose(flag)}"
            raise ConfigError(name, reason="missing value", hint=expected)
        values[flag.path] = flag.parse(words)
    for flag in (*flags.named.values(), *flags.positional):
        if flag.required and flag.path not in values:
            example = re.search(rf"{flag.name} \S+", inspect.getdoc(flag.owner) or "")
            see = f"for example {example[0]}" if example else f"see `{program} --help`"
            raise ConfigError(flag.name, reason="required", hint=_runs_hint() if flag.name == WORKDIR else see)
    return values, None


def _meant_by(word: str, flags: Flags) -> str | None:
    """The flags with which a command takes a recipe or a folder of images; None for another word."""
    if "--config" in flags.named and (word in known_recipes() or word.endswith((".py", ".json"))):
        return f"--config {shlex.quote(word)}"
    is_folder = "--data.directory" in flags.named and Path(word).is_dir()
    return f"--data.source folder --data.directory {shlex.quote(word)}" if is_folder else None


def _runs_hint() -> str:
    runs = sorted(str(path) for path in Path(RUNS).glob("*") if is_run(path))
    return f"give the directory of a run; ./{RUNS} holds {', '.join(runs) or 'none'}"


def _is_flag(word: str) -> bool:
    """Whether a word starts like a flag and is not a negative number."""
    return re.match(r"--|-[^\d.]", word) is not None


def _is_valid(flags: Flags, words: list[str]) -> bool:
    """Whether the flags in `words` exist and have values of their types."""
    try:
        read(flags, [*words, "--help"], "")  # which ends before required flags
    except ConfigError:
        return False
    return True


def _unknown_flags(flags: Flags, program: str, words: list[str]) -> ConfigError:
    """The error for all unknown flags among `words`; the first word is one."""
    errors = []
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if _is_flag(word) and name not in flags.named and not asks_for_help([word]):
            errors.append(_unknown(flags, program, name=name, following=[value] if equals else words[index + 1 :]))
    first, *others = errors
    return ConfigError(first.field, reason=first.reason, hint="; ".join([first.hint, *map(str, others)]))


def _unknown(flags: Flags, program: str, *, name: str, following: list[str]) -> ConfigError:
    """The error for an unknown flag: what replaces it, if another trainer has it, or else the most similar flag.

    following: the words after it.
    """
    error, word = partial(ConfigError, name, reason="unknown flag"), name.removeprefix("--")
    joined, last = re.sub(r"\.(\d+\.)?", "-", word), _last(name)  # model.ema as model-ema
    phases = sum(re.fullmatch(r"--batch\.\d+\.global-batch", flag) is not None for flag in flags.named)
    phase = re.match(r"--batch\.(\d+)\.", name)
    if phase and 0 < phases <= int(phase[1]):
        hint = "add phases in a recipe file, as batch=(Phase(...), Phase(...)) in configs/digits.py"
        return ConfigError(name, reason=f"the recipe has only {plural(phases, 'phase')}", hint=hint)
    if any(argument.name == word.upper() for argument in flags.positional):
        return error(hint=f"give it as an argument: {' '.join([program, *following[:1]])}")
    explained, counterparts = NO_COUNTERPART_IN.get(program, {}), _counterparts(flags)
    if joined in explained:
        return error(hint=explained[joined])
    if counterpart := counterparts.get(joined) or counterparts.get(last):
        values = list(itertools.takewhile(lambda word: not _is_flag(word), following))
        values = values if flags.named[counterpart.flag].repeated else values[:1]
        return error(hint=counterpart.hint(values, program, lambda words: _is_valid(flags, words)))
    own = [flag for flag in flags.named if _last(flag) == last]
    if len(own) != 1 and flags.groups and joined in NO_COUNTERPART:
        return error(hint=NO_COUNTERPART[joined])
    near = own[0] if len(own) == 1 else nearest(name, [*flags.named, "--help"])
    return error(hint=f"did you mean {near}?" if near else f"`{flags.help_command(program)}` lists all flags")


def _counterparts(flags: Flags) -> dict[str, Counterpart]:
    trains = "--resume" in flags.named  # which only the commands that train take
    return {name: each for name, each in COUNTERPARTS.items() if each.flag in flags.named and (trains or not each.trains)}


def _last(flag: str) -> str:
    return flag.rpartition(".")[2].removeprefix("--")
