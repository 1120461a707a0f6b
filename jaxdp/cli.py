"""The command line: finds the command, turns its known errors into one line and an exit code."""

import os
import sys
from importlib import import_module

from jaxdp import commands
from jaxdp.errors import EXIT_CONFIG, EXIT_FAILURE

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
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        sys.exit(0 if arguments else EXIT_CONFIG)
    command, rest = arguments[0], arguments[1:]
    if command == "--version":
        return _version()
    if command not in COMMANDS:
        from jaxdp.flags import nearest

        near = nearest(command, COMMANDS)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(COMMANDS)}"
        _fail(f"unknown command {command!r}; {hint}", EXIT_CONFIG)
    run(command, rest, f"jaxdp {command}")


def run(command: str, arguments: list[str], program: str) -> None:
    """One command, its known errors turned into one line on stderr and an exit code."""
    if arguments == ["--version"]:
        return _version()
    from jaxdp.config import ConfigError
    from jaxdp.data.loader import DataError
    from jaxdp.training.guard import TrainingError

    if os.environ.get("TERM") == "dumb" or not _prints_boxes(sys.stdout):
        os.environ.setdefault("PYTHON_TYRO_UTF8_BOXES", "False")  # read by tyro when it is imported
    try:
        import_module(f"{commands.__name__}.{command}").run(arguments, program)
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    except KeyboardInterrupt:
        print("jaxdp: interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(EXIT_FAILURE)  # a compilation in a thread would hold up the end for as long as it takes
    except BrokenPipeError:  # the reader of stdout has gone, as in `jaxdp plan | head`, or a launcher that was killed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(EXIT_FAILURE)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror}", EXIT_FAILURE)
    except (TrainingError, DataError) as error:
        _fail(str(error), EXIT_FAILURE)


def _version() -> None:
    from jaxdp import __version__

    print(f"jaxdp {__version__}")


def _prints_boxes(stream) -> bool:
    try:
        "\u256d\u2500".encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _help() -> str:
    from jaxdp.flags import rows

    return (
        "usage: jaxdp COMMAND [options]\n       jaxdp --version\n\n"
        "Synchronous data-parallel training of image classifiers on a 2-D device mesh.\n\n"
        f"commands:\n{rows(COMMANDS)}\n\n`jaxdp COMMAND --help` lists every option.\n\n"
        "Examples:\n  jaxdp train --config digits --seed 1\n  jaxdp plan --config imagenet_sony_exp2 --devices 64\n"
        "  jaxdp doctor"
    )


def _fail(message: str, code: int) -> None:
    print(f"jaxdp: {message}", file=sys.stderr, flush=True)
    _leave(code)


def _leave(code: int) -> None:
    from jaxdp.parallel import distributed

    if distributed.joined().processes > 1:
        sys.stdout.flush()
        os._exit(code)  # the others have been told; JAX would wait for them
    sys.exit(code)
