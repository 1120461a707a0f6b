"""The proof that a run which is stopped and goes on is, bit by bit, the one that was not."""

import json
import tempfile
from pathlib import Path

import jaxdp
from jaxdp.config import Checkpoint, Compile, Config, Data, Evaluation, Logging, Mesh, Model, Optimizer, Phase, Schedule
from jaxdp.doctor.gradients import flat
from jaxdp.doctor.proof import Proof, largest_difference, proven
from jaxdp.training.console import Quiet
from jaxdp.training.metrics import LOG, TIMING, read_log
from jaxdp.training.restored import restored
from jaxdp.training.stop import Signals, Stopped

STEPS, STOP_AT = 6, 3


def short_run(devices: int, cpu_devices: int | None, compile: Compile) -> Config:
    """Two epochs of three steps on made-up images, with every random part of a run."""
    images = 4 * devices
    return Config(
        name="verify",
        epochs=2.0,
        data=Data(source="synthetic", image_size=16, augmentation="paper", train_examples=3 * images, eval_examples=images),
        model=Model(depth=18, width=4, stem="small", classes=6),
        batch=(Phase(global_batch=images),),
        optimizer=Optimizer(label_smoothing=0.1),
        schedule=Schedule(learning_rate=2.0, warmup_epochs=1.0),
        mesh=Mesh(cpu_devices=cpu_devices),
        evaluation=Evaluation(every_epochs=None),
        checkpoint=Checkpoint(every_epochs=None),
        logging=Logging(every_steps=1, tensorboard=False),
        compile=compile,
    )


class AskToStop(Quiet):
    """Asks a run to stop after a step, as SIGTERM does."""

    def __init__(self, signals: Signals):
        self.signals = signals

    def step(self, record):
        if record["step"] == STOP_AT:
            self.signals.asked = "SIGTERM"


def _told(workdir: Path, config: Config) -> tuple:
    """(arrays of the last state, log and result without what tells of time)."""
    result = json.loads((workdir / "result.json").read_text())
    records = [*read_log(workdir / LOG), result]
    facts = [{name: value for name, value in one.items() if name not in (*TIMING, "workdir")} for one in records]
    return flat(restored(workdir, config=config)[0]), facts


def _apart(config: Config) -> float:
    with tempfile.TemporaryDirectory() as folder:
        whole, halted = Path(folder, "whole"), Path(folder, "stopped")
        jaxdp.train(config, whole, signals=Signals(), cluster="none")  # whose handlers are not entered: Ctrl-C ends the proofs
        signals = Signals()
        try:
            jaxdp.train(config, halted, screen=AskToStop(signals), signals=signals, cluster="none")
        except Stopped:
            pass
        else:
            raise RuntimeError("the run could not be stopped in the middle")
        result = jaxdp.train(config, halted, signals=Signals(), cluster="none")
        if (result.sessions, result.steps) != (2, STEPS):
            raise RuntimeError(f"{result.steps} steps in {result.sessions} sessions, where {STEPS} in 2 were asked for")
        (arrays, facts), (others, others_facts) = _told(whole, config), _told(halted, config)
        return largest_difference(arrays, others) if facts == others_facts else float("inf")


def proof(devices: int, cpu_devices: int | None, compile: Compile) -> Proof:
    config = short_run(devices, cpu_devices, compile)
    compared = f"{STEPS} steps, and the same stopped after {STOP_AT} and continued"
    return proven("exact resume", compared, 0.0, lambda: _apart(config))
