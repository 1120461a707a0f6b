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
          jaxdp plan --config imagenet_sony_exp2 --devices 8 --json
          jaxdp plan --config imagenet_sony_exp2 --devices 3456 --wire --network 5e-6,10e9
          jaxdp plan --config imagenet_sony_exp1 --compile-for h200 --hosts 256 --gpus-per-host 8
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        config: str = "digits"
        """a recipe's name in configs/, a .py file with config(), or a saved config.json"""
        devices: int | None = None
        """plan for this many devices; default: hosts x gpus-per-host, else those of this machine"""
        hosts: int = 1
        """hosts over which the devices are spread evenly: the rows of the mesh"""
        gpus_per_host: int | None = None
        """plan for hosts x gpus-per-host devices"""
        wire: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print what a step sends: each kind of collective with axis, dtype, bytes and count"""
        network: str | None = None
        """latency,bandwidth in seconds and bytes a second, as 5e-6,10e9: predict step time and efficiency by strategy"""
        images_per_second: float | None = None
        """images/s that one device computes alone, for --network; default: from the paper's V100, by multiply-adds"""
        picture: str | None = None
        """with --network: draw efficiency against devices, up to 16,384, into this PNG"""
        compile_for: str | None = None
        """a100, h100 or h200: compile the step with XLA's GPU compiler, no GPU needed (extra cuda13)"""
        phase: int = 0
        """the phase to compile"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print the plan as one JSON document"""

    chosen = tyro.cli(PlanRun, args=arguments, prog=program)
    config = validate(chosen.run)
    if chosen.compile_for is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a GPU at hand is not touched
    import jaxdp
    from jaxdp.parallel import distributed
    from jaxdp.planning import as_dict, model_summary, summary_table

    devices = _devices_of(chosen)
    plan = jaxdp.plan(config, devices, chosen.hosts)
    summary = model_summary(config)
    told, shown = as_dict(plan, summary), []
    if not chosen.json:
        given = f"{devices}, as given" if devices else distributed.describe(distributed.start(config.mesh))
        shown.append(summary_table(plan, given, summary))
    for name, section in (("wire", _wire), ("network", _network), ("compiled", _compiled)):
        part = section(chosen, config, plan, summary)
        if part is not None:
            told[name], more = part
            shown += more
    if chosen.json:
        print(json.dumps(told, indent=2))
        return
    from jaxdp.training.console import Screen

    screen = Screen()
    for number, one in enumerate(shown):
        if number:
            screen.say("")
        (screen.say if isinstance(one, str) else screen.table)(one)


def _devices_of(chosen) -> int | None:
    """The number of devices that the command line asks for, checked against the hosts; None: those of this machine."""
    from jaxdp.config import ConfigError

    for name in ("devices", "hosts", "gpus_per_host"):
        value = getattr(chosen, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is not allowed; give 1 or more")
    devices = chosen.devices
    if chosen.gpus_per_host is not None:
        if devices not in (None, chosen.hosts * chosen.gpus_per_host):
            raise ConfigError(
                f"--devices: {devices} is not allowed with --hosts {chosen.hosts} --gpus-per-host {chosen.gpus_per_host}; "
                "leave one of them out"
            )
        return chosen.hosts * chosen.gpus_per_host
    if chosen.hosts > 1 and devices is None:
        raise ConfigError(f"--hosts: {chosen.hosts} is not allowed alone; give --gpus-per-host or --devices")
    if devices is not None and devices % chosen.hosts:
        raise ConfigError(f"--hosts: {chosen.hosts} is not allowed; it must divide the {devices} devices")
    return devices


def _wire(chosen, config, plan, summary):
    """(dict, things to show) of --wire: an account for each phase that sends something else than the one before it."""
    if not chosen.wire:
        return None
    from jaxdp.config import ConfigError
    from jaxdp.parallel import wire
    from jaxdp.training.programs import wire_account

    if config.reduce.strategy == "auto":
        raise ConfigError("reduce.strategy: 'auto' is not allowed with --wire; it is chosen by measuring; give one by name")
    accounts = {}
    for phase in plan.phases:
        accounts.setdefault((phase.vertical, phase.horizontal), wire_account(config, phase))
    return [wire.as_dict(one) for one in accounts.values()], [wire.table(one) for one in accounts.values()]


def _network(chosen, config, plan, summary):
    from jaxdp.config import ConfigError

    if chosen.network is None:
        for name in ("picture", "images_per_second"):
            if getattr(chosen, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: {getattr(chosen, name)!r} is not allowed without --network")
        return None
    from jaxdp import prediction
    from jaxdp.parallel.cost_model import parse_network

    rate = chosen.images_per_second
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--images-per-second: {rate} is not allowed; give a number above 0")
    told = prediction.predict(plan, summary, *parse_network(chosen.network), rate)
    shown = [*prediction.tables(told), *prediction.remarks(told)]
    if chosen.picture is not None:
        if not chosen.picture.endswith(".png"):
            raise ConfigError(f"--picture: {chosen.picture!r} is not allowed; give a file that ends in .png")
        prediction.draw(told, chosen.picture)
        shown.append(f"picture in {chosen.picture}")
    return told, shown


def _compiled(chosen, config, plan, summary):
    from jaxdp.config import ConfigError

    if chosen.compile_for is None:
        return None
    from jaxdp import aot

    devices = _devices_of(chosen)
    if devices is None:
        raise ConfigError("--compile-for: give --hosts and --gpus-per-host with it, for example --hosts 1 --gpus-per-host 8")
    compiled = aot.compile_for(plan, chosen.phase, chosen.compile_for, chosen.hosts, devices // chosen.hosts)
    return aot.as_dict(compiled), [aot.table(compiled)]


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
