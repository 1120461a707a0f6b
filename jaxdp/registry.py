"""Tables of named choices: the built-in ones, and those that users register.

Config types, validation, `--help`, plan output and tests follow from the table of a field. The fields that a choice reads are
a dataclass, which `Choices.read` names.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import Any, Literal, TypeVar

from jaxdp.errors import ConfigError, suggest

NAME_PATTERN = r"[a-z][a-z0-9_]*"


@dataclass(frozen=True)
class Choice:
    """One value of a config field.

    help: noun phrase for `--help`. implementation: returns what implements it, and may import it then (see `LazyModule`): the
    tables need no JAX, and a run loads no code of other choices. like: the choice whose fields of the config it reads; "" if
    `jaxdp.config` names a record of its own fields, or it has none.
    """

    help: str
    _: KW_ONLY
    implementation: Callable[[], Any] | None = None
    like: str = ""


class LazyModule:
    """A module that is imported when one of its names is used: `lambda: losses.softmax` in a table imports nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


@dataclass(frozen=True, eq=False)
class OneOf:
    """Annotation of a field whose value is a name in a table."""

    table: "Choices"

    def __get_pydantic_core_schema__(self, _: Any, handler: Any) -> Any:
        return handler.generate_schema(Literal[tuple(self.table)])


Entry = TypeVar("Entry", bound=Choice)


class Choices(Mapping[str, Entry]):
    """The choices of one config field, by name.

    An entry tells a config, its help and a plan about a choice, without JAX, and names its implementation. A user adds both
    with `register`.

    field: the config field, such as `optimizer.name`. other: entry for names that are not in the table; None if there are no
    others. other_reads: the built-in choice that reads the same fields as such a name; None: they read all; "": none of those
    in `readers`. function: the public function with which users register, such as `register_optimizer`; "" if there is none.
    readers: SECTION.FIELD -> names of the choices that read it, of fields that not all names read.
    """

    def __init__(
        self,
        field: str,
        entries: Mapping[str, Entry],
        *,
        other: Entry | None = None,
        other_reads: str | None = None,
        function: str = "",
    ) -> None:
        self.field, self.function = field, function
        self.entries, self.builtin = dict(entries), tuple(entries)
        self.implementations: dict[str, Callable[[], Any] | None] = {
            name: entry.implementation for name, entry in entries.items()
        }
        self.other, self.other_reads = other, other_reads
        self.readers: dict[str, tuple[str, ...]] = {}

    def __getitem__(self, name: str) -> Entry:
        """The entry of a name. Raises KeyError for an unknown one."""
        if self.other is not None:
            return self.entries.get(name, self.other)
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    @property
    def registered(self) -> list[str]:
        """Names of the user's entries."""
        return [name for name in self.entries if name not in self.builtin]

    def register(self, name: str, entry: Entry, implementation: Any) -> None:
        """Add or replace an entry of the user's. Raises ConfigError for an invalid name, or the name of a built-in entry."""
        if not (isinstance(name, str) and re.fullmatch(NAME_PATTERN, name)):
            raise ConfigError("name", name, reason="must consist of lower-case letters, digits and _, and start with a letter")
        if name in self.builtin:
            raise ConfigError("name", name, reason="reserved", hint=f"choose a name other than {', '.join(self.builtin)}")
        self.entries[name], self.implementations[name] = entry, lambda: implementation

    def remove(self, name: str) -> None:
        """Forget an entry of the user's."""
        del self.entries[name], self.implementations[name]

    def implementation(self, name: str) -> Any:
        """The implementation of an entry. Raises ConfigError for an unknown name."""
        self.check(name)
        implementation = self.implementations[name]
        return None if implementation is None else implementation()

    def check(self, name: str) -> None:
        """Raise ConfigError for a value of the field that is neither built in nor registered."""
        if name in self.entries:
            return
        hint = suggest(name, self.entries)
        if self.function:
            call = f"jaxdp.{self.function}({name!r}, ...)"
            hint += f", or register it with {call} in Python, or give the recipe that registers it with --config"
        raise ConfigError(self.field, name, reason="unknown name", hint=hint)

    @property
    def help(self) -> str:
        """Names with their help texts, for `--help`."""
        texts = [f"{name}: {entry.help}" if entry.help else name for name, entry in self.entries.items()]
        return "; ".join([*texts, self.other.help] if self.other else texts)

    def read(self, section: str, **records: type) -> None:
        """Name the fields of a section that the choices read: the fields of the choice's record (a dataclass), or of the
        choice that its entry names with `like`.

        Raises TypeError for an unknown choice, and for one that `like` names but that has no record.
        """
        likes = {entry.like for entry in self.entries.values() if entry.like}
        if unknown := sorted((records.keys() - self.entries) | (likes - records.keys())):
            raise TypeError(f"{self.field} has no {', '.join(unknown)}")
        record_of = {name: records.get(entry.like or name) for name, entry in self.entries.items()}
        read = {name: [part.name for part in dataclasses.fields(record)] for name, record in record_of.items() if record}
        for field in dict.fromkeys(field for names in read.values() for field in names):
            readers = tuple(name for name in self.builtin if field in read.get(name, ()))
            by_all = readers == self.builtin and self.other_reads != ""
            if not by_all and f"{section}.{field}" != self.field:
                self.readers[f"{section}.{field}"] = readers

    def read_fields(self, name: str) -> list[str]:
        """The fields SECTION.FIELD that the choice `name` reads and another choice ignores."""
        reader = name if name in self.builtin else self.other_reads
        return [field for field, names in self.readers.items() if reader is None or reader in names]

    def ignored_fields(self, name: str) -> list[str]:
        """The fields SECTION.FIELD that the choice `name` ignores and another choice reads, sorted."""
        return sorted(self.readers.keys() - self.read_fields(name))
