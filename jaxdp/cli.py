"""The command line: `jaxdp train` and `jaxdp plan`; train.py is `jaxdp train`."""

import dataclasses
import difflib
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

from jaxdp.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_STOPPED

STARTED = time.monotonic()
COMMANDS = {
    "train": "train a model as a recipe says",
    "plan": "print what a run will do, without running it",
    "evaluate": "count a checkpoint's right answers on the held-out images",
    "checkpoints": "list the checkpoints of a run, each checked",
    "export": "write a checkpoint's weights as a safetensors file",
    "bench": "measure this machine: allreduce, input, scaling, step",
    "data": "prepare a data set of tensorflow-datasets",
    "launch": "start the processes of a run on this machine, and end them together",
    "report": "print what a finished or running run has reached",
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
        {
            "train": _train,
            "plan": _plan,
            "evaluate": _evaluate,
            "checkpoints": _checkpoints,
            "export": _export,
            "bench": _bench,
            "data": _data,
            "launch": _launch,
            "report": _report,
        }[command](arguments, program)
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


def _train(arguments, program):
    from jaxdp.training.stop import Signals, StopAsked, Stopped

    with Signals() as signals:  # before all else: a signal may come at any time
        try:
            _train_until_stopped(signals, arguments, program)
        except (Stopped, StopAsked) as stopped:
            from jaxdp.parallel import distributed

            team = distributed.joined()
            if team.first:
                before = f"stopped by {signals.asked} before the first step; the same command begins again"
                print(f"jaxdp: {stopped if isinstance(stopped, Stopped) else before}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            team.close(last=True)
            os._exit(EXIT_STOPPED)  # a compilation in a thread would hold up the end for as long as it takes


def _train_until_stopped(signals, arguments, program):
    import tyro

    from jaxdp.arguments import load
    from jaxdp.config import Config
    from jaxdp.validation import validate

    recipe = load(arguments, default="digits")

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
        resume: str = "auto"
        """auto: go on from the newest checkpoint in the working directory; never: a new directory beside one that holds a run;
        PATH: go on from another run's newest checkpoint, or from the one named, in a directory of its own"""
        accept_changes: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """go on although the configuration is not the one with which the run was begun"""
        cluster: str = "auto"
        """whose variables tell of the other processes of this run: auto, none, jax, kubeflow, torchrun, openmpi or slurm"""
        coordinator: str | None = None
        """HOST:PORT at which rank 0 is to listen, with --processes and --rank: in place of a launcher's variables"""
        processes: int | None = None
        """of the run, on all hosts"""
        rank: int | None = None
        """of this process, from 0"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print the result as one JSON document on stdout, everything else on stderr"""

    chosen = tyro.cli(Train, args=arguments, prog=program)
    config = validate(chosen.run)
    from jaxdp.parallel import distributed
    from jaxdp.training.console import Screen
    from jaxdp.training.metrics import to_json
    from jaxdp.training.session import train

    answers = _stdout_for_the_document() if chosen.json else None
    given = {name: getattr(chosen, name) for name in ("coordinator", "processes", "rank")}
    team = distributed.join(chosen.cluster, config.guard, signals.look_alone, **given)
    screen = Screen(sys.stderr if chosen.json else sys.stdout)
    asked = {"accept_changes": chosen.accept_changes, "started": STARTED, "signals": signals}
    result = train(config, chosen.workdir, chosen.resume, screen, **asked)
    if chosen.json and team.first:
        print(to_json(dataclasses.asdict(result), indent=2), file=answers, flush=True)
    if team.processes > 1:
        sys.stdout.flush()
        team.close(last=True)
        os._exit(0)  # JAX's own good-bye waits for minutes where a process is late


def _stdout_for_the_document():
    """What was stdout; from here on libraries that write there, as gloo does, write to stderr."""
    try:
        number, errors = sys.stdout.fileno(), sys.stderr.fileno()
    except OSError:  # captured, in a notebook or a test
        return sys.stdout
    document = os.fdopen(os.dup(number), "w")
    os.dup2(errors, number)
    return document


def _evaluate(arguments, program):
    import tyro

    from jaxdp.arguments import given
    from jaxdp.config import Config
    from jaxdp.training.workdir import run_config

    recipe = run_config(given(arguments, "--workdir", "runs/digits"))

    @dataclasses.dataclass(frozen=True)
    class Evaluate:
        """Count the right answers of a checkpoint on all held-out images, on this machine's devices.

        Examples:
          jaxdp evaluate --workdir runs/digits
          jaxdp evaluate --workdir runs/digits --checkpoint best --json
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        workdir: str = "runs/digits"
        """of the run"""
        checkpoint: str = "newest"
        """newest, best (by accuracy), or the samples of one, as `jaxdp checkpoints` lists them"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document on stdout"""

    chosen = tyro.cli(Evaluate, args=arguments, prog=program)
    from jaxdp.training.restored import evaluate

    told = evaluate(chosen.run, chosen.workdir, chosen.checkpoint)
    if chosen.json:
        print(json.dumps(told, indent=2))
        return
    print(
        f"accuracy {100 * told['eval_accuracy']:.2f} %  (top-5 {100 * told['eval_top5']:.2f} %, "
        f"{told['eval_examples']} held-out images)  loss {told['eval_loss']:.4f}  "
        f"of {told['checkpoint']}, epoch {told['epoch']:.2f}"
    )


def _checkpoints(arguments, program):
    import tyro

    @dataclasses.dataclass(frozen=True)
    class Checkpoints:
        """List the checkpoints of a run, the oldest first; every byte of each is read and checked.

        Examples:
          jaxdp checkpoints --workdir runs/digits
        """

        workdir: str = "runs/digits"
        """of the run"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document on stdout: a list with an object for every checkpoint"""

    chosen = tyro.cli(Checkpoints, args=arguments, prog=program)
    from jaxdp.training.restored import listed

    rows = listed(chosen.workdir)
    if chosen.json:
        print(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    from jaxdp.training.console import Screen

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("samples", "epoch", "steps", "accuracy", "size"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for row in rows:
        known = row["epoch"] is not None
        numbers = (f"{row['epoch']:.2f}", f"{row['steps']:,}") if known else ("", "")
        accuracy = "" if row["accuracy"] is None else f"{100 * row['accuracy']:.2f} %"
        size = f"{row['bytes'] / 1e6:,.1f} MB" if known else ""
        table.add_row(str(row["samples"]), *numbers, accuracy, size, (row["damage"] or "sound").replace(f"{row['path']}/", ""))
    screen = Screen()
    screen.table(table) if rows else screen.say(f"{chosen.workdir} holds no checkpoint")


def _export(arguments, program):
    import tyro

    @dataclasses.dataclass(frozen=True)
    class Export:
        """Write the weights and statistics that evaluation uses, named by their paths in the tree.

        Examples:
          jaxdp export --workdir runs/digits --checkpoint best --output digits.safetensors
        """

        output: str
        """the file to write, which ends in .safetensors"""
        workdir: str = "runs/digits"
        """of the run"""
        checkpoint: str = "newest"
        """newest, best (by accuracy), or the samples of one"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document on stdout"""

    chosen = tyro.cli(Export, args=arguments, prog=program)
    from jaxdp.training.restored import export

    told = export(chosen.workdir, chosen.output, chosen.checkpoint)
    text = f"{told['tensors']} tensors, {told['bytes']:,} bytes, of {told['checkpoint']} in {told['output']}"
    print(json.dumps(told, indent=2) if chosen.json else text)


def _launch(arguments, program):
    import tyro

    @dataclasses.dataclass(frozen=True)
    class Launch:
        """Start the processes of one run on this machine: each line they print is shown behind its rank, and when one fails all
        are ended.

        Examples:
          jaxdp launch --processes 2 -- train.py --mesh.cpu-devices 4
          jaxdp launch --processes 8 --restarts 3 -- train.py --config imagenet_goyal_256
        """

        processes: int
        """how many; GPUs are dealt out evenly among them"""
        restarts: int = 0
        """how often to start again after a failure; a run goes on from its last checkpoint"""

    own, command = arguments, []
    if "--" in arguments:
        place = arguments.index("--")
        own, command = arguments[:place], arguments[place + 1 :]
    chosen = tyro.cli(Launch, args=own, prog=program)
    from jaxdp.launch import launch

    sys.exit(launch(command, chosen.processes, chosen.restarts))


def _plan(arguments, program):
    import tyro

    from jaxdp.arguments import load
    from jaxdp.config import Config
    from jaxdp.validation import validate

    recipe = load(arguments, default="digits")

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
    """(dict, things to show) of --wire: an account for phases that send the same."""
    if not chosen.wire:
        return None
    from jaxdp.config import ConfigError
    from jaxdp.parallel import wire
    from jaxdp.training.programs import wire_accounts

    if config.reduce.strategy == "auto":
        raise ConfigError("reduce.strategy: 'auto' is not allowed with --wire; it is chosen by measuring; give one by name")
    accounts = wire_accounts(plan)
    return [wire.as_dict(one) for one in accounts], [wire.table(one) for one in accounts]


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
        Path(chosen.picture).parent.mkdir(parents=True, exist_ok=True)
        prediction.draw(told, chosen.picture)
        shown.append(f"picture in {chosen.picture}")
    return told, shown


def _compiled(chosen, config, plan, summary):
    from jaxdp.config import ConfigError

    if chosen.compile_for is None:
        if chosen.phase:
            raise ConfigError(f"--phase: {chosen.phase} is not allowed without --compile-for")
        return None
    from jaxdp import aot

    devices = _devices_of(chosen)
    if devices is None:
        raise ConfigError("--compile-for: give --hosts and --gpus-per-host with it, for example --hosts 1 --gpus-per-host 8")
    compiled = aot.compile_for(plan, chosen.phase, chosen.compile_for, chosen.hosts, devices // chosen.hosts)
    return aot.as_dict(compiled), [aot.table(compiled)]


def _bench(arguments, program):
    from jaxdp.bench.commands import bench

    bench(arguments, program)


def _data(arguments, program):
    import tyro

    from jaxdp.config import ConfigError

    @dataclasses.dataclass(frozen=True)
    class Prepare:
        """Download a data set and prepare it as array_record, which training reads without TensorFlow (extra prepare).

        Examples:
          jaxdp data prepare imagenette
          jaxdp data prepare imagenet2012 --directory ~/tensorflow_datasets --manual-directory ~/downloads
        """

        name: tyro.conf.Positional[str]
        """of the data set, with its config and version where they matter: name/config:version"""
        directory: str | None = None
        """where prepared data sets are kept; default: ~/tensorflow_datasets"""
        manual_directory: str | None = None
        """where archives lie that cannot be downloaded, as ImageNet's"""

    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: {program} prepare NAME [options]; `{program} prepare --help` lists the options")
        return
    if not arguments or arguments[0] != "prepare":
        raise ConfigError(f"data: {arguments[0] if arguments else ''!r} is not allowed; give prepare")
    chosen = tyro.cli(Prepare, args=arguments[1:], prog=f"{program} prepare")
    from jaxdp.data.prepared import prepare

    print(prepare(chosen.name, chosen.directory, chosen.manual_directory))


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
