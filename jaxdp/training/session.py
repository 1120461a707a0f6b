"""One session of a run: everything is checked, the directory claimed, and the loop set going from where the run stands."""

import dataclasses
import time
from contextlib import nullcontext
from pathlib import Path

from jaxdp.config import Config, ConfigError
from jaxdp.parallel import distributed
from jaxdp.planning import summary_table
from jaxdp.training import checkpoint
from jaxdp.training import workdir as directories
from jaxdp.training.console import Quiet
from jaxdp.training.loop import Prepared, Run
from jaxdp.training.result import TrainResult, read_result, show_result
from jaxdp.training.stop import Signals
from jaxdp.validation import validate


def train(
    config: Config,
    workdir=None,
    resume="auto",
    screen=None,
    started=None,
    datasets=None,
    accept_changes=False,
    signals: Signals | None = None,
) -> TrainResult:
    """Train as `config` says, into `workdir` (default runs/NAME), going on from its newest sound checkpoint if it has one.

    A finished run there is returned as it is. resume: "auto"; "never" for a new directory beside one that holds a run; or the
    path of another run's directory or checkpoint to go on from. accept_changes: of a config that is not the run's own.
    started: `time.monotonic()` at the start of the command, for the times reported. datasets: (training, evaluation), objects
    with `__len__` and `__getitem__` -> (uint8 pixels or encoded bytes, label), in place of the config's source. signals:
    entered already, where the command line has done so.

    Raises ConfigError where the run cannot be begun, or does not fit into memory, TrainingError where it cannot go on, and
    Stopped where it was asked to stop (SIGTERM, SIGINT) and saved.
    """
    started = time.monotonic() if started is None else started
    screen = screen or Quiet()
    if datasets is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, source="given"))
    config = validate(config)
    path = Path("runs") / config.name if workdir is None else Path(workdir)
    if workdir == "":
        raise ConfigError("--workdir: '' is not allowed; give a directory")
    origin = None if resume in ("auto", "never") else _origin(Path(resume), path)
    if resume == "never":
        path = directories.next_free(path)
    with nullcontext(signals) if signals else Signals(leave=_interrupt) as signals:
        prepared = Prepared.of(config, datasets)
        with directories.claimed(path):
            finished, remarks = directories.settle(path, config, accept_changes)
            if finished is not None:
                result = read_result(path, finished)
                for remark in [f"{path} holds this run, finished; for a new one: --resume never", *remarks]:
                    screen.say(remark)
                show_result(screen, result)
                return result
            screen.table(summary_table(prepared.plan, distributed.describe(prepared.devices), prepared.model_summary))
            for remark in [*remarks, *prepared.datasets.remarks]:
                screen.say(remark)
            result = Run(prepared, path, screen, started, signals, origin, accept_changes).to_the_end()
            show_result(screen, result)
            return result


def _interrupt():
    raise KeyboardInterrupt


def _origin(given: Path, workdir: Path) -> checkpoint.Sealed:
    """The checkpoint that --resume PATH names: PATH itself, or the newest in PATH/checkpoints."""
    refused = f"--resume: {str(given)!r} is not allowed"
    if given.resolve() == workdir.resolve() or workdir.resolve() in given.resolve().parents:
        raise ConfigError(f"{refused}; it belongs to this run's own directory; give a new --workdir to go on from it")
    try:
        found = checkpoint.read_seal(given) if (given / checkpoint.SEAL).exists() else None
    except checkpoint.Damaged as error:
        raise ConfigError(f"{refused}; {error}; give another checkpoint") from None
    found = found or checkpoint.newest_good(given / directories.CHECKPOINTS)
    if found is None:
        raise ConfigError(f"{refused}; it holds no checkpoint; give auto, never, a run's directory or one of its checkpoints")
    return found
