"""Entry point of the command line: finds the command and turns known errors into one line and an exit code."""

import io
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, NoReturn

from jaxdp import cli
from jaxdp.distributed.signal_handler import exits_when_signaled
from jaxdp.errors import EXIT_CONFIG, EXIT_FAILURE, OneLine, first_line, not_imported, one_of, print_safe, printable
from jaxdp.files import check_no_password, expand_user, is_url
from jaxdp.flag_help import rows

COMMANDS = {
    "train": "Train a model",
    "plan": "Print the plan of a run without running it",
    "evaluate": "Evaluate a checkpoint on the held-out images",
    "predict": "Predict the classes of images",
    "checkpoints": "List and verify the checkpoints of a run",
    "export": "Write the weights of a checkpoint, its network for serving, or a model card",
    "import": "Convert weights of torchvision or timm to a file for --finetune.weights",
    "bench": "Measure this machine: allreduce, input, lr, scaling, step",
    "data": "Prepare a data set of tensorflow-datasets",
    "launch": "Start several processes of a run on this machine",
    "report": "Summarize runs on a page with curves",
    "watch": "Serve a page on localhost that shows runs while they train",
    "doctor": "Check this machine for a run; --verify: check that it trains correctly",
}
STDOUT = "stdout"
LIMITS = {
    "address space {:,} bytes (ulimit -v)": resource.RLIMIT_AS,
    "{:,} threads (ulimit -u)": resource.RLIMIT_NPROC,
}
RESUMABLE = ("train", "launch")  # commands that stop signals end with 75


def main(arguments: list[str] | None = None) -> None:
    """`jaxdp COMMAND ...`. Exits with 0 on success, 2 for an invalid command line or configuration, 75 for a run that a
    signal stopped and that can be resumed, 1 for any other error."""
    with _errors_in_one_line():
        words = _with_help_last(sys.argv[1:] if arguments is None else list(arguments))
        if words == ["--version"]:
            _version()
        if words[0] not in COMMANDS:
            check_no_password(words[0], "command")
            raise one_of("command", words[0], COMMANDS)
    run(words[0], words[1:], f"jaxdp {words[0]}")


def run(name: str, arguments: list[str], program: str) -> None:
    """Run one command; known errors become one line on stderr and an exit code."""
    with command(name, arguments) as words:
        import_module(f"{cli.__name__}.{name}").run(words, program)


@contextmanager
def command(name: str, arguments: list[str]) -> Iterator[list[str]]:
    """The words of a command's line. Known errors in the context become one line on stderr and an exit code."""
    with _errors_in_one_line():
        if arguments == ["--version"]:
            _version()
        words = _read_words(arguments)
        with exits_when_signaled() if name in RESUMABLE else nullcontext():
            yield words


def _with_help_last(words: list[str]) -> list[str]:
    """`help COMMAND` as `COMMAND --help`. Prints the help on all commands, and exits, if no command is given."""
    if not words or words[0] in ("-h", "--help") or words == ["help"]:
        print_safe(_help())
        sys.exit(0 if words else EXIT_CONFIG)
    return [*words[1:], "--help"] if words[0] == "help" else words


def _read_words(arguments: list[str]) -> list[str]:
    """The words with ~ replaced by the home directory, also after --FLAG=, where shells leave it.

    Raises ConfigError for a URL with a password, also where none is expected, because other errors would show it.
    """
    words, before = [], ""
    for word in arguments:
        name, equals, value = ("", "", word) if is_url(word) or "=" not in word else word.partition("=")
        field = name or (before if before.startswith("--") and "=" not in before else "path")
        check_no_password(value, field)
        words.append(name + equals + expand_user(value, field) if name.startswith("--") else expand_user(word, field))
        before = word
    return words


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    _open_streams()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # report an error of writing like any other
    except KeyboardInterrupt:
        print_safe("jaxdp: interrupted", sys.stderr)
        _flush()
        os._exit(EXIT_FAILURE)  # without waiting for compilations in threads
    except Exception as error:
        if isinstance(error, BrokenPipeError) and error.filename == STDOUT:  # `jaxdp plan | head`: end as git does
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.raise_signal(signal.SIGPIPE)
        if (line := _line_of(error)) is None:
            raise
        print_safe(f"jaxdp: {line}", sys.stderr)
        _leave(error.exit_code if isinstance(error, OneLine) else EXIT_FAILURE)


def _line_of(error: Exception) -> str | None:
    """The line that replaces the traceback of an error; None for unexpected errors, which keep it."""
    if isinstance(error, OneLine):
        return str(error)
    if isinstance(error, OSError) and (error.filename or error.errno is not None):
        return f"{printable(error.filename, 4096)}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return _out_of_memory(error)
    if package := not_imported(error):
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"{package} cannot be imported ({reason}); install jaxdp again, or see `pip check`"
    return None


def _out_of_memory(error: Exception) -> str:
    """One line for an error from lack of memory or threads, with the limits of this process."""
    reason = first_line(error) if str(error) else "out of memory"
    values = {text: resource.getrlimit(limit)[0] for text, limit in LIMITS.items()}
    limits = [text.format(value) for text, value in values.items() if value != resource.RLIM_INFINITY]
    return f"{reason}; limits: {', '.join(limits) or 'the memory of the machine or its cgroup'}"


class Output(io.FileIO):
    """The descriptor of stdout, whose errors name it, or of stderr, which drops output without a reader."""

    def __init__(self, descriptor: int, stream: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.stream = stream

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if self.stream != STDOUT:
                return len(data)
            raise OSError(error.errno, error.strerror, STDOUT) from None


def _open_streams() -> None:
    """Replace closed streams (`jaxdp plan >&-`) by /dev/null; otherwise the next opened file would take their descriptor."""
    for name in ("stdin", STDOUT, "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
        elif name != "stdin" and stream is getattr(sys, f"__{name}__"):  # not captured
            stream.flush()
            output: Any = Output(stream.fileno(), name)
            output = output if stream.write_through else io.BufferedWriter(output)
            errors = "backslashreplace" if stream.errors == "strict" else stream.errors  # of characters that a terminal lacks
            form = {"encoding": stream.encoding, "errors": errors}
            buffering = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(output, **form, **buffering))


def _flush() -> None:
    """Flush stdout; if that fails, redirect it to /dev/null, because Python flushes again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version() -> NoReturn:
    from jaxdp import __version__

    print_safe(f"jaxdp {__version__}")
    sys.exit()


def _help() -> str:
    return (
        "usage: jaxdp COMMAND [options]\n       jaxdp --version\n\n"
        "Synchronous data-parallel training of image classifiers on a 2-D device mesh.\n\n"
        f"commands:\n{rows(COMMANDS)}\n\n`jaxdp COMMAND --help` lists its options.\n\n"
        "Examples:\n  jaxdp train --config digits --seed 1\n  jaxdp plan --config imagenet_sony_exp2 --devices 64\n"
        "  jaxdp doctor"
    )


def _leave(code: int) -> None:
    _flush()
    distributed = sys.modules.get("jaxdp.distributed.runtime")
    if distributed and distributed.current_group().num_processes > 1:
        os._exit(code)  # the other processes are informed; JAX would wait for them
    sys.exit(code)
