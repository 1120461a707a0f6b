"""`jaxdp train`, which is train.py."""

import dataclasses
import os
import sys
from typing import Annotated

from jaxdp.commands import STARTED
from jaxdp.errors import EXIT_STOPPED


def run(arguments, program):
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
    from jaxdp.flags import parse
    from jaxdp.validation import validate

    recipe = load(arguments, default="digits")

    @dataclasses.dataclass(frozen=True)
    class Train:
        """Train a model. Without arguments: ResNet-50 on handwritten digits, configs/digits.py.

        Examples:
          python train.py --workdir runs/first
          jaxdp train --config digits --epochs 4 --batch.0.until-epoch 2 --model.depth 18
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
        profile: str | None = None
        """FIRST,COUNT: short for --logging.profile"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print the result as one JSON document on stdout, everything else on stderr"""

    chosen = parse(Train, arguments, program)
    config = validate(_profiled(chosen.run, chosen.profile))
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


def _profiled(config, profile: str | None):
    """The config with what --profile says."""
    if profile is None:
        return config
    if config.logging.profile not in (None, profile):
        from jaxdp.config import ConfigError

        raise ConfigError(
            f"--profile: {profile!r} is not allowed with --logging.profile {config.logging.profile!r}, which it is short for; "
            "give one of them"
        )
    return dataclasses.replace(config, logging=dataclasses.replace(config.logging, profile=profile))


def _stdout_for_the_document():
    """What was stdout; from here on libraries that write there, as gloo does, write to stderr."""
    try:
        number, errors = sys.stdout.fileno(), sys.stderr.fileno()
    except OSError:  # captured, in a notebook or a test
        return sys.stdout
    document = os.fdopen(os.dup(number), "w")
    os.dup2(errors, number)
    return document
