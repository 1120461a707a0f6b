"""The command line: finds the command, turns its known errors into one line and an exit code."""

import os
import sys
from contextlib import contextmanager
from importlib import import_module

from jaxdp import commands
from jaxdp.errors import EXIT_CONFIG, EXIT_FAILURE, ConfigError, OneLine, first_line, not_imported
from jaxdp.flags import nearest, rows

COMMANDS = {
    "train": "train a model as a recipe says",
    "plan": "print what a run will do, without running it",
    "evaluate": "count a checkpoint's right answers on the held-out images",
    "predict": "name the likeliest classes of images",
    "checkpoints": "list the checkpoints of a run, each checked",
    "export": "write a checkpoint's weights as a safetensors file",
    "import": "turn torchvision's or timm's weights into a file of jaxdp's own",
    "bench": "measure this machine: allreduce, input, scaling, step",
    "data": "prepare a data set of tensorflow-datasets",
    "launch": "start the processes of a run on this machine",
    "report": "tell what runs have reached, on a page with curves",
    "doctor": "check this machine for a run; --verify: prove that it trains",
}


def main(arguments=None) -> None:
    """`jaxdp COMMAND ...`. Exits with 0 when done, 2 for a wrong command line or configuration, 75 where
    a run was asked to stop and saved, 1 for anything else."""
    with _errors_in_one_line():
        _main(sys.argv[1:] if arguments is None else list(arguments))


def run(command: str, arguments: list[str], program: str) -> None:
    """One command, its known errors turned into one line on stderr and an exit code."""
    with _errors_in_one_line():
        _run(command, arguments, program)


def _main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(), flush=True)
        sys.exit(0 if arguments else EXIT_CONFIG)
    command, rest = arguments[0], arguments[1:]
    if command == "--version":
        return _version()
    if command not in COMMANDS:
        near = nearest(command, COMMANDS)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {command!r}; {hint}")
    _run(command, rest, f"jaxdp {command}")


def _run(command: str, arguments: list[str], program: str) -> None:
    if arguments == ["--version"]:
        return _version()
    if os.environ.get("TERM") == "dumb" or not _prints_boxes(sys.stdout):
        os.environ.setdefault("PYTHON_TYRO_UTF8_BOXES", "False")  # read by tyro when it is imported
    try:
        import_module(f"{commands.__name__}.{command}").run(arguments, program)
    except Exception as error:
        if command != "doctor" or not_imported(error) is None:
            raise
        from jaxdp.doctor import bare

        bare.show("--json" in arguments)
        sys.exit(EXIT_FAILURE)


@contextmanager
def _errors_in_one_line():
    _open_streams()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # while what goes wrong can still be told
    except KeyboardInterrupt:
        print("jaxdp: interrupted", file=sys.stderr, flush=True)
        _flush()
        os._exit(EXIT_FAILURE)  # a compilation in a thread would hold up the end for as long as it takes
    except BrokenPipeError:  # the reader of stdout has gone, as in `jaxdp plan | head`, or a launcher that was killed
        _leave(EXIT_FAILURE)
    except Exception as error:
        if (line := _line_of(error)) is None:
            raise
        print(f"jaxdp: {line}", file=sys.stderr, flush=True)
        _leave(error.exit_code if isinstance(error, OneLine) else EXIT_FAILURE)


def _line_of(error: Exception) -> str | None:
    """What is told of an error instead of its traceback; None where that is needed."""
    if isinstance(error, OneLine):
        return str(error)
    if isinstance(error, OSError) and (error.filename or error.errno is not None):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if package := not_imported(error):
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"{package} cannot be imported ({reason}); `jaxdp doctor` says what of jaxdp's packages is missing or broken"
    return None


def _open_streams() -> None:
    """Streams that were closed, as by `jaxdp plan >&-`, lead nowhere; a file opened later would be taken for them."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))


def _flush() -> None:
    """Write what stdout holds back; where nothing can be written, let it go, or Python would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version() -> None:
    from jaxdp import __version__

    print(f"jaxdp {__version__}", flush=True)


def _prints_boxes(stream) -> bool:
    try:
        "\u256d\u2500".encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _help() -> str:
    return (
        "usage: jaxdp COMMAND [options]\n       jaxdp --version\n\n"
        "Synchronous data-parallel training of image classifiers on a 2-D device mesh.\n\n"
        f"commands:\n{rows(COMMANDS)}\n\n`jaxdp COMMAND --help` lists every option.\n\n"
        "Examples:\n  jaxdp train --config digits --seed 1\n  jaxdp plan --config imagenet_sony_exp2 --devices 64\n"
        "  jaxdp doctor"
    )


def _leave(code: int) -> None:
    _flush()
    distributed = sys.modules.get("jaxdp.parallel.distributed")
    if distributed and distributed.joined().processes > 1:
        os._exit(code)  # the others have been told; JAX would wait for them
    sys.exit(code)
