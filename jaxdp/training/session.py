"""One session of a run: everything is checked, the directory claimed, and the loop set going from where the run stands."""

import dataclasses
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import jax

from jaxdp.config import Config, ConfigError
from jaxdp.errors import EXIT_CONFIG, EXIT_FAILURE, first_line
from jaxdp.parallel import distributed
from jaxdp.parallel.cluster import alone_in_a_larger_job
from jaxdp.planning import summary_table
from jaxdp.training import agreement, finetuning, seal
from jaxdp.training import workdir as directories
from jaxdp.training.console import Quiet, Screen
from jaxdp.training.guard import TrainingError
from jaxdp.training.loop import Run
from jaxdp.training.metrics import guarded
from jaxdp.training.notebook import screen_here
from jaxdp.training.prepared import Prepared
from jaxdp.training.result import TrainResult, read_result, show_result
from jaxdp.training.stop import Signals, StopAsked, Stopped, StoppedAtOnce
from jaxdp.validation import changes, from_dict, validate


def train(
    config: Config,
    workdir=None,
    resume="auto",
    screen: Screen | Quiet | bool | None = None,
    started=None,
    datasets=None,
    accept_changes=False,
    signals: Signals | None = None,
    cluster: str = "auto",
    writers=(),
) -> TrainResult:
    """Train as `config` says, into `workdir` (default runs/NAME), going on from its newest sound checkpoint if it has one.

    A finished run there is returned as it is, where its data are these. resume: "auto"; "never" for a new directory beside one
    that holds a run; or the path of another run's directory or checkpoint to go on from. accept_changes: of a config that is
    not the run's own. screen: where the run is shown; None: inline in a notebook, nowhere in a program; False: nowhere.
    started: `time.monotonic()` at the start of the command, for the times reported. datasets: (training, evaluation), objects
    with `__len__` and `__getitem__` -> (uint8 pixels or encoded bytes, label), in place of the config's source. signals:
    entered already, where the command line has done so. cluster: whose variables tell of the other processes of the run: auto,
    none, or a launcher's name (see `jaxdp.parallel.cluster`). writers: objects with `write(record)` and `close()` that get
    every record, on the first process (see docs/watching.md); one that raises is warned of and left alone, and the run goes on.

    Messages name the command line's flags, which are arguments here: `--resume never` is resume="never", `--workdir DIR`
    workdir="DIR", `--accept-changes` accept_changes=True, and others are fields of the config.

    Raises ConfigError where the run cannot be begun, or does not fit into memory, TrainingError where it cannot go on, and
    Stopped where it was asked to stop (SIGTERM, SIGINT) and saved. Where another process of the run fails, this one says so and
    exits.
    """
    started = time.monotonic() if started is None else started
    screen = screen_here() if screen is None else screen or Quiet()
    if datasets is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, source="given"))
    config, writers = validate(config), guarded(writers)
    path = Path("runs") / config.name if workdir is None else Path(workdir)
    if workdir == "":
        raise ConfigError("--workdir: '' is not allowed; give a directory")
    with nullcontext(signals) if signals else Signals(leave=partial(_interrupt, screen.again)) as signals:
        signals.team = team = distributed.join(cluster, config.guard, signals.look_alone)
        if team.failed:
            raise TrainingError(
                "the processes of this run have failed before, and cannot train together any more; start them anew"
            )
        team.before_exit, team.look, team.advice = screen.end, signals.look_waiting, f"{screen.again} begins again"
        try:
            screen = screen if team.first else Quiet()
            return _train(config, path, resume, screen, started, datasets, accept_changes, signals, writers)
        except Stopped:
            raise
        except StopAsked:
            told = f"stopped by {signals.asked} before the first step"
            raise Stopped(f"{told}; {screen.again} goes on from the last checkpoint, if there is one") from None
        except BaseException as error:
            broken = isinstance(error, jax.errors.JaxRuntimeError)
            reason = first_line(error) + (distributed.of_gloo(error) if broken else "")
            team.fail(reason, EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILURE, broken)
            raise
        finally:
            screen.end()


def _train(config, path: Path, resume, screen, started, datasets, accept_changes, signals: Signals, writers) -> TrainResult:
    team = signals.team
    origin = None if resume in ("auto", "never") else _origin(Path(resume), path)
    kept = team.share("weights", _kept_digest(config, path, resume, origin) if team.first else None)
    config, weights = signals.run(finetuning.opened, config, kept)
    agreement.check(team, lambda: agreement.facts(config, resume, accept_changes))
    if origin is not None:
        _check_same(origin, config, accept_changes)
    if resume == "never":
        path = Path(team.share("directory", str(directories.next_free(path))))
    found = origin or next(seal.all_sealed(path / directories.CHECKPOINTS), None) if team.first else None
    begun = team.share("begun", found and found.told.get("per_worker_batch"))
    prepared = Prepared.of(config, datasets, team, begun, signals.run)
    agreement.check(team, lambda: prepared.data_facts)
    with directories.claimed(path) if team.first else nullcontext():
        finished, remarks = team.share("settled", directories.settle(path, config, accept_changes) if team.first else None)
        agreement.check_directory(team, path)
        if finetuning.is_gone(config, weights):
            remarks.append(finetuning.without_its_file(config))
        if finished is not None:
            if found is not None and origin is None:
                prepared.check_fits(found, accept_changes)
            result = read_result(path, finished)
            for remark in [f"{path} holds this run, finished; for a new one: --resume never", *remarks]:
                screen.say(remark)
            show_result(screen, result)
            return result
        screen.table(summary_table(prepared.plan, distributed.describe(prepared.devices, team), prepared.model_summary))
        for remark in [*remarks, *_remarks(prepared, team)]:
            screen.say(remark)
        result = Run(prepared, path, screen, started, signals, origin, accept_changes, weights, writers).to_the_end()
        show_result(screen, result)
        with suppress(StopAsked):  # all is done and saved
            team.exchange("the others to be done", None)
        return result


def _remarks(prepared: Prepared, team) -> list[str]:
    """What people should know before a run."""
    remarks = [*prepared.datasets.remarks]
    if remark := alone_in_a_larger_job():
        remarks.append(remark)
    asked = prepared.config.mesh
    uneven = distributed.hosts_with_equally_many(team) < len(set(team.host_numbers))
    if uneven and not (asked.vertical or asked.horizontal):
        remarks.append(
            "the hosts do not have equally many processes: rows of the mesh are no hosts, and horizontal rings cross them; "
            "start equally many on each, or give mesh.vertical and mesh.horizontal"
        )
    if not prepared.as_begun:
        remarks.append(
            "these devices cannot keep the per-worker batch with which the run was begun: batch normalisation's groups are "
            "others from here on; the order of the data, the learning rate and the batches are the same"
        )
    return remarks


def _interrupt(again: str):
    raise StoppedAtOnce(f"stopped at once by a second signal; {again} goes on from the last checkpoint, if there is one")


def _kept_digest(config: Config, path: Path, resume, origin: seal.Sealed | None) -> str | None:
    """What the run to go on with keeps of the weights from which it was begun; None for a new one."""
    if config.finetune.weights is None or resume == "never":
        return None
    try:
        return finetuning.kept_digest(config, from_dict(origin.told["config"]) if origin else directories.run_config(path))
    except ConfigError:  # there is no run, or `settle` says what is wrong with it
        return None


def _origin(given: Path, workdir: Path) -> seal.Sealed:
    """The checkpoint that --resume PATH names: PATH itself, or the newest sound one in PATH/checkpoints."""
    refused = f"--resume: {str(given)!r} is not allowed"
    if given.resolve() == workdir.resolve() or workdir.resolve() in given.resolve().parents:
        raise ConfigError(f"{refused}; it belongs to this run's own directory; give a new --workdir to go on from it")
    try:
        found = seal.read(given) if (given / seal.SEAL).exists() else None
    except seal.Damaged as error:
        raise ConfigError(f"{refused}; {error}; give another checkpoint") from None
    found = found or seal.newest_good(given / directories.CHECKPOINTS)
    if found is None:
        raise ConfigError(
            f"{refused}; it holds no sound checkpoint; give auto, never, a run's directory or one of its checkpoints"
        )
    return found


def _check_same(origin: seal.Sealed, config: Config, accept_changes: bool) -> None:
    """Raise ConfigError where a checkpoint is of a different run, unless that is accepted."""
    if (difference := changes(from_dict(origin.told["config"]), config)) and not accept_changes:
        raise ConfigError(
            f"--resume: {str(origin.path)!r} is not allowed; it is of a different run ({'; '.join(difference)}); give "
            "--accept-changes to go on with them"
        )
