"""The command line: finds the command, turns its known errors into one line and an exit code."""

import difflib
import os
import sys
from importlib import import_module

from jaxdp import commands
from jaxdp.errors import EXIT_CONFIG, EXIT_FAILURE

COMMANDS = {
    "train": "train a model as a recipe says",
    "plan": "print what a run will do, without running it",
    "evaluate": "count a checkpoint's right answers on the held-out images",
    "checkpoints": "list the checkpoints of a run, each checked",
    "export": "write a checkpoint's weights as a safetensors file",
    "bench": "measure this machine: allreduce, input, scaling, step",
    "data": "prepare a data set of tensorflow-datasets",
    "launch": "start the processes of a run on this machine, and end them together",
    "report": "print what runs have reached, and make a page of their curves, times and classes",
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
        from jaxdp import __version__

        print(f"jaxdp {__version__}")
        return
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(COMMANDS)}"
        _fail(f"unknown command {command!r}; {hint}", EXIT_CONFIG)
    run(command, rest, f"jaxdp {command}")


def run(command: str, arguments: list[str], program: str) -> None:
    """One command, its known errors turned into one line on stderr and an exit code."""
    from jaxdp.config import ConfigError
    from jaxdp.data.loader import DataError
    from jaxdp.training.guard import TrainingError

    try:
        import_module(f"{commands.__name__}.{command}").run(arguments, program)
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    except KeyboardInterrupt:
        print("jaxdp: interrupted; what was logged is in the working directory", file=sys.stderr, flush=True)
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


def _help() -> str:
    rows = "\n".join(f"  {name:<11} {what}" for name, what in COMMANDS.items())
    return (
        "usage: jaxdp COMMAND [options]\n\nSynchronous data-parallel training of image classifiers on a 2-D device mesh.\n\n"
        f"commands:\n{rows}\n\n`jaxdp COMMAND --help` lists every option. Example: jaxdp train --config digits --seed 1"
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
