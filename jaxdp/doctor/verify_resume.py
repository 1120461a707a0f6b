"""Proof of resuming: a run that is stopped and resumed equals an uninterrupted run, bit by bit."""

import dataclasses
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxdp.checkpoint.manager import SAVING_THREAD
from jaxdp.config import Checkpoint, Config, Data, Evaluation, Logging, Mesh, Model, Phase, Reduce, Schedule
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.distributed.signal_handler import SignalHandler, Stopped
from jaxdp.doctor.proof import Proof, largest_difference, prove
from jaxdp.doctor.verify_gradients import named_arrays
from jaxdp.inference.load_run import load_run
from jaxdp.loggers.console import Screen
from jaxdp.run_records import LOG, TIMING, read_log
from jaxdp.session.job import Job
from jaxdp.session.train import train_job
from jaxdp.training.callback import Callback
from jaxdp.training.result import TrainResult
from jaxdp.training.run import Run

STEPS, STOP_AFTER = 6, 3
JOIN_SECONDS = 10.0


def short_run(config: Config, devices: int, cpu_devices: int | None) -> Config:
    """Two epochs of three steps on synthetic images, with every random part of a run.

    Of `config` are the optimizer, at its momentum, the compilation and a sharded update.
    """
    images, reduce = 4 * devices, config.reduce
    sharded = Reduce(strategy=reduce.strategy, update="sharded")
    return Config(
        name="verify",
        epochs=2.0,
        data=Data(source="synthetic", image_size=16, augmentation="paper", train_examples=3 * images, eval_examples=images),
        model=Model(depth=18, width=4, stem="small", classes=6),
        batch=(Phase(global_batch=images),),
        optimizer=dataclasses.replace(
            config.optimizer,
            momentum_rule="constant",
            loss="softmax",
            class_weights=(),
            target_threshold=None,
            loss_scale="none",
        ),
        schedule=Schedule(learning_rate=0.1, warmup_epochs=1.0),
        reduce=sharded if reduce.update == "sharded" else Reduce(),
        mesh=Mesh(cpu_devices=cpu_devices),
        evaluation=Evaluation(every_epochs=None),
        checkpoint=Checkpoint(every_epochs=None),
        logging=Logging(every_steps=1, tensorboard=False),
        compile=config.compile,
    )


class StopAfterStep(Callback):
    """Requests a stop after step `STOP_AFTER`, as SIGTERM does."""

    def after_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == STOP_AFTER and run.is_rank0:
            run.signals.request_stop("SIGTERM")


def _outcome(workdir: Path, config: Config) -> tuple[dict, list[dict]]:
    """(arrays of the last state, records of the log and the result without timings)."""
    records = [*read_log(workdir / LOG), json.loads((workdir / "result.json").read_text())]
    untimed = [{name: value for name, value in record.items() if name not in (*TIMING, "workdir")} for record in records]
    return named_arrays(load_run(workdir, config=config, whole=True).state), untimed


@contextmanager
def _temporary_directory(shared_dir: Path | None, group: ProcessGroup) -> Iterator[Path]:
    """A temporary directory inside `shared_dir` for all processes."""
    name = tempfile.mkdtemp(dir=shared_dir) if group.is_rank0 else None
    folder = Path(group.broadcast_object("the directory of the proof", name))
    try:
        yield folder
    finally:
        group.all_gather_object("the end of the proof", None)
        if group.is_rank0:
            for thread in threading.enumerate():
                if thread.name.startswith(SAVING_THREAD):  # an interrupted run may still write a checkpoint
                    thread.join(JOIN_SECONDS)
            shutil.rmtree(folder, ignore_errors=True)


def _train(config: Config, workdir: Path, callbacks: Sequence[Callback] = ()) -> TrainResult:
    """Train without output, and leave Ctrl-C to the doctor: the signal handler is not entered."""
    screen, signals = Screen(quiet=True), SignalHandler()
    return train_job(Job(config, workdir, callbacks=callbacks, screen=screen, signals=signals, cluster="none"))


def _difference(config: Config, shared_dir: Path | None, group: ProcessGroup) -> float:
    """Largest difference of the final states; infinity if logs or results differ."""
    with _temporary_directory(shared_dir, group) as folder:
        uninterrupted, resumed = folder / "uninterrupted", folder / "resumed"
        _train(config, uninterrupted)
        try:
            _train(config, resumed, [StopAfterStep()])
        except Stopped:
            pass
        else:
            raise RuntimeError(f"the run did not stop after step {STOP_AFTER}")
        result = _train(config, resumed)
        if (result.sessions, result.steps) != (2, STEPS):
            raise RuntimeError(f"{result.steps} steps in {result.sessions} sessions instead of {STEPS} in 2")
        (expected_arrays, expected_records), (arrays, records) = _outcome(uninterrupted, config), _outcome(resumed, config)
        return largest_difference(arrays, expected_arrays) if records == expected_records else float("inf")


def proof(
    config: Config,
    devices: int,
    cpu_devices: int | None,
    *,
    shared_dir: Path | None = None,
    group: ProcessGroup | None = None,
) -> Proof:
    """Check exact resume. devices: of all processes; all call this. cpu_devices: of one process; None: accelerators.

    shared_dir: a directory on a file system that all processes share.
    """
    group, short = group or ProcessGroup(), short_run(config, devices, cpu_devices)
    sharded = ", sharded update," if short.reduce.update == "sharded" else ""
    return prove(
        "exact resume",
        f"{STEPS} steps of {short.optimizer.name}{sharded} against {STOP_AFTER} steps, stop and resume",
        tolerance=0.0,
        difference=lambda: _difference(short, shared_dir, group),
        group=group,
    )
