"""Parsing of command lines into dataclasses: every field is a flag, and an error is one line that names the nearest flag."""

import dataclasses
import inspect
import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from jaxdp.errors import ConfigError, nearest, plural
from jaxdp.files import RUNS, is_run, known_recipes
from jaxdp.flag_help import asks_for_help, purpose, show
from jaxdp.flag_table import ANY, WORKDIR, FieldPath, Flags, default_of
from jaxdp.flag_table import Arg as Arg
from jaxdp.foreign_flags import COUNTERPARTS, NO_COUNTERPART, NO_COUNTERPART_IN, Counterpart

Options = TypeVar("Options")
UNEXPECTED = "unexpected argument"


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
        value, _ = default_of(field, default)
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
    if len(own) != 1 and flags.groups and (advice := NO_COUNTERPART.get(joined) or NO_COUNTERPART.get(last)):
        return error(hint=advice)
    near = own[0] if len(own) == 1 else nearest(name, [*flags.named, "--help"])
    return error(hint=f"did you mean {near}?" if near else f"`{flags.help_command(program)}` lists all flags")


def _counterparts(flags: Flags) -> dict[str, Counterpart]:
    trains = "--resume" in flags.named  # which only the commands that train take
    return {name: each for name, each in COUNTERPARTS.items() if each.flag in flags.named and (trains or not each.trains)}


def _last(flag: str) -> str:
    return flag.rpartition(".")[2].removeprefix("--")
