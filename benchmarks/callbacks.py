"""Cost of a run around its step: the default callbacks and the loop, against the compiled step with the loader alone.

    python benchmarks/callbacks.py [--pairs 25] [--steps 2000]

A perceptron of two layers, batch 32, on one CPU device, where computing and the host share the cores: the difference is an
upper bound of what a run on accelerators needs. The digits are in memory: threads that generate or decode images in Python
would hold the interpreter's lock for longer than the loop. A run with the default callbacks alternates with the same steps
alone, in one process; its time is that of the steps after the first ones. Both times drift by more than they differ, so there
are many short pairs: the result is the median of their differences. Writes benchmarks/results/callbacks.json and prints a
table.
"""

import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import flax.linen as nn
import jax
from common import arguments, markdown, write

import jaxdp
from jaxdp.bench.environment import provenance
from jaxdp.config import Checkpoint, Config, Data, Evaluation, Mesh, Model, Optimizer, Phase, Schedule
from jaxdp.loggers.console import Quiet
from jaxdp.run_records import LOG, scan_log
from jaxdp.session.job import Job
from jaxdp.session.train import train_job
from jaxdp.setup.prepare import make_compiler, prepare
from jaxdp.training import request_flags
from jaxdp.training.run import open_batches
from jaxdp.training.state import create_state
from jaxdp.validation import validate
from jaxdp.xla.jax_options import jaxdp_jax_config

BATCH, EXAMPLES = 32, 1437  # the training images of the digits
WARM_UP = 1000  # steps, during which the evaluation program is compiled as well


class Perceptron(nn.Module):
    """Two layers."""

    classes: int

    @nn.compact
    def __call__(self, images):
        return nn.Dense(self.classes)(nn.relu(nn.Dense(64)(images.reshape(len(images), -1))))


def config_of(steps):
    """`steps` steps with the default callbacks; evaluated and saved at the end only."""
    jaxdp.register_model("perceptron", Perceptron)
    return validate(
        Config(
            epochs=steps * BATCH / EXAMPLES,
            data=Data(source="digits", image_size=8, augmentation="none"),
            model=Model(name="perceptron", classes=10),
            batch=(Phase(BATCH),),
            optimizer=Optimizer(name="sgd"),
            schedule=Schedule(learning_rate=0.01, warmup_epochs=0.0),
            mesh=Mesh(cpu_devices=1),
            evaluation=Evaluation(every_epochs=None),
            checkpoint=Checkpoint(every_epochs=None),
        )
    )


def time_run(config):
    """Seconds of a step, by the run's own log: a callback that measures costs 30 us itself, as one of the user's."""
    with tempfile.TemporaryDirectory() as folder:
        train_job(Job(config, Path(folder) / "run", screen=Quiet()))
        steps = [record for record in scan_log(Path(folder) / "run" / LOG)[0] if "learning_rate" in record]
    first, last = next(record for record in steps if record["step"] == WARM_UP), steps[-1]
    return (last["wall_seconds"] - first["wall_seconds"]) / (last["step"] - WARM_UP)


@jaxdp_jax_config()
def time_steps(config):
    plan, devices, datasets = prepare(config)
    phase, compiler = plan.phases[0], make_compiler(plan, devices, datasets)
    step, mesh = compiler.prepare_train(phase).result(), compiler.mesh(phase)
    state, rates = create_state(plan.config, compiler.model, mesh), compiler.hyperparameters(phase, 0.01)
    no_request = request_flags.none(mesh)
    with closing(open_batches(compiler, datasets, phase)) as batches:
        count = 0
        while (batch := batches.next()) is not None:
            state, _ = step(state, batch | no_request, rates)
            count += 1
            if count == WARM_UP:
                jax.block_until_ready(state)
                began = time.perf_counter()
        jax.block_until_ready(state)
        seconds = (time.perf_counter() - began) / (count - WARM_UP)
    compiler.close()
    return seconds


def table(record):
    times = record["microseconds"]
    low, high = times["quartiles"]
    row = *(f"{times[name]:.0f} us" for name in ("step alone", "step of a run", "difference")), f"{low:.0f} to {high:.0f} us"
    text = f"Medians of {len(record['pairs'])} pairs of {record['steps']:,} steps."
    return markdown(("step and loader alone", "step of a run", "difference", "quartiles"), [row], text)


def main():
    given = arguments(__doc__, pairs=25, steps=2000)
    config = config_of(given.steps)
    time_steps(config), time_run(config)
    pairs = []
    for number in range(given.pairs):
        order = (time_steps, time_run) if number % 2 else (time_run, time_steps)
        times = {function.__name__: 1e6 * function(config) for function in order}
        pairs.append((times["time_steps"], times["time_run"]))
        print(f"steps alone {pairs[-1][0]:7.1f} us, run {pairs[-1][1]:7.1f} us", flush=True)
    alone, run = (statistics.median(column) for column in zip(*pairs, strict=True))
    low, difference, high = statistics.quantiles((run - alone for alone, run in pairs), n=4)
    record = {
        "microseconds": {"step alone": alone, "step of a run": run, "difference": difference, "quartiles": [low, high]},
        "pairs": pairs,
        "steps": given.steps,
        "provenance": provenance(),
    }
    write("callbacks", record, table)


if __name__ == "__main__":
    main()
