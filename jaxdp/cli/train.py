"""`jaxdp train`, also train.py: train a model."""

import contextlib
import dataclasses
import faulthandler
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from jaxdp.cli import STARTED, main
from jaxdp.errors import EXIT_STOPPED, print_safe

if TYPE_CHECKING:
    from jaxdp.distributed.signal_handler import SignalHandler
    from jaxdp.session.job import Job
    from jaxdp.training.result import TrainResult


class TrainCommand:
    """A training command. job: what to train. result: set by the caller, and printed with --json."""

    def __init__(self, job: "Job") -> None:
        self.job = job
        self.result: TrainResult | None = None


def run(arguments: list[str], program: str) -> None:
    with _command(arguments, program) as train:
        from jaxdp.session.train import train_job

        train.result = train_job(train.job)


@contextlib.contextmanager
def command(arguments: list[str], program: str) -> Iterator[TrainCommand]:
    """The command of a script: `python SCRIPT FLAGS` is then `jaxdp train FLAGS`, also in its errors and exit codes."""
    with main.command("train", arguments) as words, _command(words, program) as train:
        yield train


@contextlib.contextmanager
def _command(arguments: list[str], program: str) -> Iterator[TrainCommand]:
    from jaxdp.distributed.signal_handler import SignalHandler, Stopped, StopTraining, stopped_before_training
    from jaxdp.distributed.watchdog import watch

    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError):  # stderr has no descriptor if it is captured
            faulthandler.enable()  # prints the stack of a crash in native code
    with watch(), SignalHandler() as signals:  # first, because a signal can arrive at any time
        try:
            with _parsed(signals, arguments, program) as train:
                yield train
        except (Stopped, StopTraining) as stopped:
            from jaxdp.distributed import runtime

            signals.on_forced_signal = lambda: os._exit(EXIT_STOPPED)  # mpirun signals the rest once one exits
            group = runtime.current_group()
            if group.is_rank0:
                message = stopped if isinstance(stopped, Stopped) else stopped_before_training(signals.stop_reason)
                with contextlib.suppress(OSError):  # its reader may be gone, as with Ctrl-C of `jaxdp train 2>&1 | tee log`
                    print_safe(f"jaxdp: {message}", sys.stderr)
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            group.close()
            os._exit(EXIT_STOPPED)  # without waiting for compilations in threads


@contextlib.contextmanager
def _parsed(signals: "SignalHandler", arguments: list[str], program: str) -> Iterator[TrainCommand]:
    from jaxdp.cli.options import EVERYDAY, ConfigFields, Launch, LaunchFields, Switch, stdout_for_the_document
    from jaxdp.flags import Arg, parse
    from jaxdp.recipes import load_recipe
    from jaxdp.validation import validate

    recipe = load_recipe(arguments, default="digits", notes=True)

    @dataclasses.dataclass(frozen=True)
    class Train:
        """Train a model. Without arguments: ResNet-50 on handwritten digits, configs/digits.py.

        Examples:
          python train.py --workdir runs/first
          jaxdp train --config digits --epochs 4 --model.depth 18
          jaxdp train --config runs/first/config.json --workdir runs/again
        """

        run: ConfigFields = dataclasses.field(default_factory=lambda: recipe.config)
        config: str = "digits"
        """Recipe: a name in configs/, a .py file with config(), or a saved config.json"""
        workdir: str | None = None
        """Working directory for all output (None: runs/NAME)"""
        resume: Annotated[str, Arg("auto|never|PATH")] = "auto"
        """Checkpoint to resume from. auto: the newest in the working directory; never: none, in a new directory if there is a
        run; PATH: the newest of another run, or a checkpoint, in a new directory"""
        accept_changes: Switch = False
        """Resume with a changed configuration"""
        schedule_from_now: Switch = False
        """Begin the learning-rate schedule anew at the checkpoint, for the epochs that remain; with --accept-changes"""
        json: Switch = False
        """Result as one JSON document on stdout, all other output on stderr"""
        launch: LaunchFields = dataclasses.field(default_factory=Launch)

    options = parse(Train, arguments, program, everyday=EVERYDAY)
    config = validate(options.run)
    from jaxdp.distributed import runtime
    from jaxdp.loggers.console import Screen
    from jaxdp.run_records import to_json
    from jaxdp.session.job import Job

    document = stdout_for_the_document() if options.json else None
    train = TrainCommand(
        Job(
            config,
            options.workdir,
            resume=options.resume,
            accept_changes=options.accept_changes,
            schedule_from_now=options.schedule_from_now,
            callbacks=recipe.callbacks(),
            screen=Screen(sys.stderr if options.json else sys.stdout),
            started=STARTED,
            signals=signals,
            notes=[recipe.note] if recipe.note else [],
            **vars(options.launch),
        )
    )
    yield train
    group = runtime.current_group()
    if options.json and group.is_rank0 and train.result is not None:
        try:
            print_safe(to_json(train.result.to_dict(), indent=2), document)
        except OSError:
            group.close()  # the run has ended well: the other processes exit with 0
            raise
    runtime.exit_together(group)
