"""The table of a command's flags: one for each field of its options, a dataclass of values and sections."""

import contextlib
import dataclasses
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin

from jaxdp.errors import ConfigError, one_of
from jaxdp.files import check_local
from jaxdp.registry import OneOf

GENERAL, ALL = "general", "all"  # groups of help
WORKDIR = "--workdir"
TAKE_URLS = (
    "--coordinator",
    "--logging.mlflow",
    WORKDIR,
    "WORKDIR",
    "--resume",
    "--data.directory",
)  # the first two are no paths
ANY = "a value"  # what a flag of type STR expects
NUMBERS = {int: "an integer", float: "a number"}


FieldPath = tuple[str | int, ...]  # of a field in the options, through the sections around it


class Arg(NamedTuple):
    """Annotation of a field: how it is spelled on a command line.

    metavar: its values as text. is_prefix: whether the flags of its fields, if it is a section, begin with its name.
    positional: without a flag. negatable: whether a bool also has a flag --no-NAME.
    """

    metavar: str = ""
    is_prefix: bool = True
    positional: bool = False
    negatable: bool = True


@dataclasses.dataclass
class Flag:
    """A flag or positional argument.

    types: types and literal choices of its value. path, field: of what it sets, in the dataclass `owner`. default: value of
    the field if omitted. group: group of the flag in the help. spelling: the flag that sets the field; differs from the name
    for --no-NAME. metavar: its values as text. repeated: takes any number of values. alone: values that replace all values
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
        if self.name not in TAKE_URLS:
            check_local(value, self.name)  # most flags would create a local directory of that name
        if NoneType in self.types and value == "None":
            return None
        for choice in self.types:
            if not isinstance(choice, type) and str(choice) == value:
                return choice
        if str in self.types:
            return value
        for parse in filter(None, map(_from_text, self.types)):
            return parse(value, self.name)
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
            default, required = default_of(field, value)
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
            kind = type(default[0]) if isinstance(default, tuple) and default else None
            if kind and dataclasses.is_dataclass(kind) and not _from_text(kind):
                self.groups[section] = kind
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


def default_of(field: dataclasses.Field, value: Any) -> tuple[Any, bool]:
    """(default value of a field, whether it is required)."""
    if value is not None:
        return getattr(value, field.name), False
    if field.default is not dataclasses.MISSING:
        return field.default, False
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory(), False
    return (), True  # of any number of values; any other is given


def _from_text(kind: Any) -> Callable[[str, str], Any] | None:
    """The method with which a section is one value of a flag, such as `jaxdp.config.Group`; None for other types."""
    return getattr(kind, "from_text", None)


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
