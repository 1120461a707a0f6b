"""The command line: `jaxdp train` and `jaxdp plan`; train.py is `jaxdp train`."""

import argparse
import dataclasses
import difflib
import json
import os
import sys
import time
from typing import Annotated, Literal

STARTED = time.monotonic()
COMMANDS = {
    "train": "train a model as a recipe says",
    "plan": "print what a run will do, without running it",
    "report": "print what a finished or running run has reached",
}
EXIT_CONFIG, EXIT_FAILURE = 2, 1


def main(arguments=None) -> None:
    """`jaxdp COMMAND ...`. Exits with 0 when done, 2 for a wrong command line or configuration, 1 for anything else."""
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
    from jaxdp.training.guard import TrainingError

    try:
        {"train": _train, "plan": _plan, "report": _report}[command](arguments, program)
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    except KeyboardInterrupt:
        print("jaxdp: interrupted; what was logged is in the working directory", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(EXIT_FAILURE)  # a compilation in a thread would hold up the end for as long as it takes
    except BrokenPipeError:  # the reader of stdout has gone, as in `jaxdp plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILURE)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror}", EXIT_FAILURE)
    except TrainingError as error:
        _fail(str(error), EXIT_FAILURE)


def _train(arguments, program):
    import tyro

    from jaxdp.config import Config
    from jaxdp.validation import validate

    recipe = _load(arguments, default="digits")

    @dataclasses.dataclass(frozen=True)
    class Train:
        """Train a model. Without arguments: ResNet-50 on handwritten digits, configs/digits.py.

        Examples:
          python train.py --workdir runs/first
          jaxdp train --config digits --epochs 2 --batch.0.until-epoch 1 --model.depth 18
          jaxdp train --config runs/first/config.json --workdir runs/again
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        config: str = "digits"
        """a recipe's name in configs/, a .py file with config(), or a saved config.json"""
        workdir: str | None = None
        """where everything is written; default: runs/NAME"""
        resume: Literal["auto", "never"] = "auto"
        """never: a new directory beside one that holds a run"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print the result as one JSON document on stdout, everything else on stderr"""

    chosen = tyro.cli(Train, args=arguments, prog=program)
    config = validate(chosen.run)
    from jaxdp.training.console import Screen
    from jaxdp.training.loop import train
    from jaxdp.training.metrics import to_json

    screen = Screen(sys.stderr if chosen.json else sys.stdout)
    result = train(config, chosen.workdir, chosen.resume, screen, started=STARTED)
    if chosen.json:
        print(to_json(dataclasses.asdict(result), indent=2))


def _plan(arguments, program):
    import tyro

    from jaxdp.config import Config
    from jaxdp.validation import validate

    recipe = _load(arguments, default="digits")

    @dataclasses.dataclass(frozen=True)
    class PlanRun:
        """Print phases, steps, hyperparameters, parameters, multiply-adds and gradient bytes of a run.

        Examples:
          jaxdp plan
          jaxdp plan --config digits --devices 8 --json
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        config: str = "digits"
        """a recipe's name in configs/, a .py file with config(), or a saved config.json"""
        devices: int | None = None
        """plan for this many devices; default: those of this machine"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print the plan as one JSON document"""

    chosen = tyro.cli(PlanRun, args=arguments, prog=program)
    config = validate(chosen.run)
    import jaxdp
    from jaxdp.parallel import distributed
    from jaxdp.planning import as_dict, model_summary, summary_table

    plan = jaxdp.plan(config, chosen.devices)
    summary = model_summary(config)
    if chosen.json:
        print(json.dumps(as_dict(plan, summary), indent=2))
    else:
        from jaxdp.training.console import Screen

        given = chosen.devices is not None
        described = f"{chosen.devices}, as given" if given else distributed.describe(distributed.start(config.mesh))
        Screen().table(summary_table(plan, described, summary))


def _report(arguments, program):
    import tyro

    @dataclasses.dataclass(frozen=True)
    class Report:
        """Print a run's accuracy, and for ImageNet its epochs to 75.9 % beside MLPerf's reference for the same batch.

        Examples:
          jaxdp report runs/digits
          jaxdp report runs/first runs/second --json
        """

        workdir: tyro.conf.Positional[tuple[str, ...]]
        """directories of runs"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document: a list with an object for every run"""

    chosen = tyro.cli(Report, args=arguments, prog=program)
    from jaxdp.config import ConfigError
    from jaxdp.report import as_text, report

    if not chosen.workdir:
        raise ConfigError("workdir: () is not allowed; give at least one run's directory")
    told = [report(workdir) for workdir in chosen.workdir]
    print(json.dumps(told, indent=2) if chosen.json else "\n".join(as_text(one) for one in told))


def _load(arguments, default):
    """The recipe that --config names, before the other flags are laid over it."""
    from jaxdp.recipes import load_config

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", default=default)
    try:
        known, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        return load_config(default)  # --config without a value: the full parser says so
    return load_config(known.config)


def _help() -> str:
    rows = "\n".join(f"  {name:<8} {what}" for name, what in COMMANDS.items())
    return (
        "usage: jaxdp COMMAND [options]\n\nSynchronous data-parallel training of image classifiers on a 2-D device mesh.\n\n"
        f"commands:\n{rows}\n\n`jaxdp COMMAND --help` lists every option. Example: jaxdp train --config digits --seed 1"
    )


def _fail(message: str, code: int) -> None:
    print(f"jaxdp: {message}", file=sys.stderr)
    sys.exit(code)
