"""`jaxdp.train` and `jaxdp train`: the story of `train.py`, for programs that import it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdp import session
from jaxdp.config import Config
from jaxdp.session.job import Job
from jaxdp.training.callback import Callback
from jaxdp.training.result import TrainResult


def train(
    config: Config,
    workdir: str | Path | None = None,
    *,
    resume: str | Path = "auto",
    accept_changes: bool = False,
    schedule_from_now: bool = False,
    datasets: tuple[Any, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    initial_params: Any = None,
) -> TrainResult:
    """Train `config` in `workdir` and return the result; resume from the newest valid checkpoint if the directory has one.

    A finished run in the directory is not repeated: its result is returned.

    config: what to train. workdir: the run directory, or a URL in object storage (default: runs/NAME). resume: "auto" resumes
    the run in the directory; "never" starts a new run, in NAME-2, NAME-3, ... if the directory holds one. The path or URL of a
    checkpoint or of another run continues from it in this directory. accept_changes: resume although the configuration or the
    data differ from the checkpoint's. schedule_from_now: begin the learning-rate schedule anew at the checkpoint, for the
    remaining epochs. The run stores the checkpoint's epoch as `schedule.from_epoch`. datasets: (training, evaluation) in place
    of the config's source, or (training, None) with `data.holdout`. Each is a pair of arrays (images uint8 [N, H, W] or [N, H,
    W, 1 or 3], labels [N]) or an object with `__len__` and `__getitem__` -> (uint8 pixels or encoded bytes, label). The object
    needs `classes`, a number or a list of names, unless `config.model.classes` is set. Fields that only the config's source
    uses are reset. callbacks: objects of subclasses of `jaxdp.Callback`. initial_params: arrays {"params": ..., "batch_stats":
    ...} from which the run starts in place of `finetune.weights`, such as the result of `jaxdp.load_params`.

    Shows the run in the notebook's cell, else on stdout. Error messages name flags of the command line: `--resume never` is
    here the argument resume="never".

    Raises ConfigError if the run cannot start or does not fit into memory, and OSError if object storage does not answer at the
    start. Raises TrainingError if the run cannot continue, and Stopped after a stop signal (SIGTERM, SIGINT, ...), when the run
    is saved; a program that does not catch Stopped exits with code 75. If another process of the run fails, this process prints
    which one and exits.
    """
    job = Job(
        config,
        workdir,
        resume=resume,
        accept_changes=accept_changes,
        schedule_from_now=schedule_from_now,
        datasets=datasets,
        callbacks=callbacks,
        initial_params=initial_params,
    )
    return train_job(job)


def train_job(job: "session.Job") -> "session.TrainResult":
    """Train a job to its end, from its newest checkpoint if there is one; of a finished run, return the result."""
    with session.join_processes(job) as joined, session.open_origin(joined) as origin:
        prepared = session.prepare(joined, origin)  # JAX's devices, the data, the plan
        with session.open_directory(joined, prepared) as directory:
            if directory.result is not None:
                return directory.result
            with session.open_run(joined, prepared, directory) as run:  # the model, checkpoints, callbacks
                session.restore_or_initialize(run, prepared.start)
                session.begin(run)
                for phase in run.plan.phases:
                    if run.progress.samples < phase.end and not run.progress.ends_now:
                        train_phase(run, phase)
                return session.finish(run)  # evaluates and saves; the context writes result.json


def train_phase(run: "session.Run", phase: "session.PlannedPhase") -> None:
    """Take the remaining steps of a phase; each has the same global batch, on the same mesh."""
    with session.open_phase(run, phase) as (step, batches):  # the compiled step, and images loaded in the background
        batch = session.next_batch(run, batches)
        while batch is not None and not run.progress.ends_now:
            session.begin_step(run, batch)  # callbacks, requested saves, stop signals
            session.start_step(run, step, batch)  # returns before the devices have computed it
            batch = session.next_batch(run, batches)
            session.complete_steps(run, keep=1)  # the metrics of the step before
            if run.progress.evaluates_now:
                session.evaluate_now(run)
