"""Exceptions, exit codes, where an exception comes from, and helpers that turn values and errors into one printable line."""

import contextlib
import difflib
import enum
import errno
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from typing import IO

EXIT_FAILURE, EXIT_CONFIG, EXIT_STOPPED = 1, 2, 75  # EXIT_STOPPED: stopped by a signal; the same command resumes

# An error is located in the code that calls these.
LIBRARIES = {"jax", "jaxlib", "flax", "jaxdp", "contextlib", "functools"}
SIMILAR = 0.7  # least similarity of a suggestion, as difflib measures it


class OneLine:
    """Mixin for exceptions whose message is sufficient: notebooks and the command line print it without a traceback.

    exit_code: exit code of a command that fails with the exception. `_render_traceback_` is IPython's hook for exceptions that
    render themselves.
    """

    exit_code = EXIT_FAILURE

    def __str__(self) -> str:
        """The message, safe to print: Python's tracebacks show it."""
        return printable_lines(super().__str__())

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {in_notebook(str(self))}"]


def in_notebook(text: str) -> str:
    """A message with the argument of `jaxdp.train` in place of the flag that starts a new run."""
    return text.replace("--resume never", 'resume="never"')


class _NoValue(enum.Enum):  # whose member stays the same when pickled
    NO_VALUE = enum.auto()

    def __repr__(self) -> str:
        return self.name


NO_VALUE = _NoValue.NO_VALUE


class ConfigError(OneLine, ValueError):
    """An invalid configuration, formatted in one line as `FIELD=VALUE: REASON; HINT`.

    field: config field, flag or file that is invalid. value: its value; NO_VALUE if the error is not about a value.
    reason: why the value is invalid. hint: how to fix it; "" for none.
    """

    exit_code = EXIT_CONFIG

    def __init__(self, field: str, value: object = NO_VALUE, *, reason: str, hint: str = "") -> None:
        self.field, self.value, self.reason, self.hint = field, value, reason, hint
        name = field if value is NO_VALUE else f"{field}={value!r}"
        super().__init__(f"{name}: {reason}" + (f"; {hint}" if hint else ""))

    def __reduce__(self) -> tuple:
        return partial(type(self), reason=self.reason, hint=self.hint), (self.field, self.value)


@contextlib.contextmanager
def registered_function(field: str, name: str, *, hint: str, what: str = "the registered function failed") -> Iterator[None]:
    """Raise an exception of a function that a user has registered as a ConfigError; one that it has raised itself stays."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(field, name, reason=f"{what}: {type(error).__name__}: {first_line(error)}", hint=hint) from error


class Unusable(Exception):
    """Why a file of weights or a module cannot be used, and a hint; the caller adds its name in a ConfigError."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


class StorageError(OneLine, OSError):
    """A request to object storage, or a read of an image, that failed.

    `strerror`: why, in one line. permanent: whether repeating it cannot help.
    """

    def __init__(self, reason: str, url: str, *, permanent: bool = False) -> None:
        super().__init__(errno.EIO, reason, url)
        self.permanent = permanent

    def __str__(self) -> str:
        return printable_lines(f"{self.filename}: {self.strerror}")


class TrainingError(OneLine, RuntimeError):
    """A failure during a run, in one line: what happened, at which step, and how to fix it.

    says_how_to_continue: whether the message names the checkpoint from which to continue.
    """

    says_how_to_continue = False


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """`word` itself, else the first choice that begins with it, else the most similar one, or None. Case is ignored."""
    word, by_lower = word.lower(), {choice.lower(): choice for choice in choices}
    same, longer = [word] * (word in by_lower), [choice for choice in by_lower if word and choice.startswith(word)]
    found = same or longer or difflib.get_close_matches(word, by_lower, 1, SIMILAR)
    return by_lower[found[0]] if found else None


def suggest(word: str, choices: Iterable[object]) -> str:
    """A hint for a misspelled word: the most similar choice, if any, and all choices."""
    names = [str(choice) for choice in choices]
    near = nearest(word, names)
    return (f"did you mean {near}? " if near else "") + f"choose from {', '.join(names)}"


def one_of(field: str, value: object, choices: Iterable[object]) -> ConfigError:
    """The error for a value that must be one of `choices`."""
    return ConfigError(field, value, reason="invalid choice", hint=suggest(str(value), choices))


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """The first line of an error's message, safe to print; if it is empty, `otherwise` or the error's type."""
    return printable_lines((str(error).strip().splitlines() or [otherwise or type(error).__name__])[0])


def kind_of(thing: object) -> str:
    """What an object is, in a few words: "the function build", "the class Net", "an instance of Net", "None"."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    if inspect.isroutine(thing):
        return f"the function {thing.__name__}"
    return "None" if thing is None else f"an instance of {type(thing).__name__}"


def plural(number: float, noun: str, spec: str = "") -> str:
    """A number with its noun: "1 device", "2 devices", "3 classes". spec: format of the number."""
    text = format(number, spec)
    if text == "1":
        return f"{text} {noun}"
    return f"{text} {noun}{'es' if noun.endswith(('s', 'sh', 'tch', 'x')) else 's'}"


def printable(text: object, limit: int = 200) -> str:
    """Untrusted text (host names, file names, messages) as one line of at most `limit` characters that is safe to print.

    Control characters, line breaks, invisible format characters such as bidirectional overrides, and undecodable bytes
    (surrogates) become backslash escapes. Longer text is truncated and ends in "...".
    """
    text = str(text)
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: max(0, limit - 3)]}..."[:limit]


def printable_lines(text: object) -> str:
    """`printable` for messages that quote untrusted text: keeps line breaks and does not truncate."""
    lines = str(text).split("\n")
    return "\n".join(line if line.isprintable() else printable(line, sys.maxsize) for line in lines)


def print_safe(text: object, file: IO[str] | None = None) -> None:
    """Print text of any origin as `printable_lines`, on stdout or another stream: what all of jaxdp prints with."""
    print(printable_lines(text) + "\n", end="", file=file, flush=True)


def not_imported(error: BaseException) -> str | None:
    """The package that is missing or that failed while being imported; None for any other error."""
    missing = error.name if isinstance(error, ImportError) else None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    being_imported = [frame.f_globals.get("__name__") for frame in reversed(frames)]  # innermost first
    packages = [name.split(".")[0] for name in (missing, *being_imported) if name]
    return next((name for name in packages if name != "jaxdp"), None)


def place_in_user_code(error: BaseException) -> str:
    """ " at FILE:LINE", the innermost place in a traceback that is neither jaxdp's nor of `LIBRARIES`; "" if there is none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if frame.f_globals.get("__name__", "").split(".")[0] not in LIBRARIES]
    return f" at {os.path.basename(own[-1].f_code.co_filename)}:{own[-1].f_lineno}" if own else ""
