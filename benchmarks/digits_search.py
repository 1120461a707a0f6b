"""Search for the hyperparameters of configs/digits.py on a validation split; the held-out digits are not used.

    python benchmarks/digits_search.py "" "--epochs 12" "--schedule.learning-rate 6" [--seeds 2 0] [--devices 4]

Each candidate is a list of changes to the previous recipe, `BEFORE` in digits_seeds.py; "" is that recipe. It trains on 1,149
images and is evaluated on the other 288 of the training set, after every epoch and at the end. The moving averages of batch
normalization do not affect training, so one run evaluates several decays. Adds to benchmarks/results/digits_search.json and
skips runs already there.
"""

import argparse
import json
import shlex
import sys
import time
from fcntl import LOCK_EX, flock
from pathlib import Path

import jax
import numpy as np
from digits_seeds import AS, BEFORE

import jaxdp
from jaxdp import models
from jaxdp.bench.environment import provenance
from jaxdp.data import prefetch
from jaxdp.data.sources import open_datasets
from jaxdp.planning import make_plan
from jaxdp.training import request_flags
from jaxdp.training.evaluation import evaluate
from jaxdp.training.state import create_state
from jaxdp.training.step_compiler import StepCompiler
from jaxdp.xla import options

ROOT = Path(__file__).parent.parent
SPLIT = AS["validation split"]
DECAYS, CURVE = (0.5, 0.7, 0.8, 0.9), "0.7"


def of(flags: list[str], seed: int):
    """A candidate's config; the batch statistics of each step are not averaged, so that one run evaluates several decays."""
    return jaxdp.load_config(
        "digits", [*BEFORE, *flags, *SPLIT, "--model.norm-momentum", "0", "--mesh.cpu-devices", "None", "--seed", str(seed)]
    )


@jax.jit
def averaged(statistics: dict, new) -> dict:
    """The moving averages of the batch statistics, by decay, after one more step."""
    return {
        decay: jax.tree.map(lambda old, value, d=float(decay): d * old + (1 - d) * value, statistics[decay], new)
        for decay in statistics
    }


def run(flags: list[str], seed: int) -> dict:
    """One run of a candidate: (accuracy, loss) on the validation images, by the decay of the batch statistics."""
    config = of(flags, seed)
    datasets = open_datasets(config)
    model = models.create(config.model)
    plan = make_plan(config, examples=len(datasets.train), devices=jax.device_count())
    programs = StepCompiler(
        plan, model, pixel_stats=(datasets.mean, datasets.std), evaluation_examples=len(datasets.evaluation)
    )
    steps = [programs.prepare_train(phase) for phase in plan.phases]
    last = plan.phases[-1]
    counting, mesh = programs.prepare_evaluation(last), programs.mesh(last)
    state = create_state(config, model, mesh)
    statistics = {str(decay): jax.tree.map(np.asarray, state.batch_stats) for decay in DECAYS}
    losses, curve = [], []

    def judged(decay) -> list:
        rows = programs.evaluation_rows(last)
        found = evaluate(counting.result(), state.params, statistics[decay], source=datasets.evaluation, batch=rows, mesh=mesh)
        return [round(found["eval_accuracy"], 5), round(found["eval_loss"], 5)]

    ready = [step.result() for step in steps]
    began = time.perf_counter()
    for phase, step in zip(plan.phases, ready, strict=True):
        for first in range(phase.first_sample, phase.end, phase.global_batch):
            batch = prefetch.to_global(
                prefetch.train_batch(datasets.train, seed=seed, first_sample=first, global_batch=phase.global_batch), mesh
            )
            state, metrics = step(
                state,
                batch | request_flags.none(programs.mesh(phase)),
                programs.hyperparameters(phase, programs.plan.learning_rate(first)),
            )
            losses.append(round(float(metrics["loss"]), 4))
            statistics = averaged(statistics, state.batch_stats)
            after = first + phase.global_batch
            if after < plan.total_samples and after // plan.examples > first // plan.examples:
                curve.append([round(after / plan.examples, 3), *judged(CURVE)])
                seconds = time.perf_counter() - began
                print(f"    {curve[-1]} {losses[-1]} {seconds:.0f} s {time.process_time():.0f} s", flush=True)
    programs.close()
    seconds = round(time.perf_counter() - began, 1)
    return {
        "seed": seed,
        "devices": jax.device_count(),
        "end": {d: judged(d) for d in statistics},
        "curve": curve,
        "losses": losses,
        "seconds": seconds,
    }


def keep(out: Path, candidate: str, result: dict) -> None:
    """Add a run to the record, which other processes may be adding to."""
    with open(out.with_suffix(".lock"), "w") as lock:
        flock(lock, LOCK_EX)
        record = json.loads(out.read_text()) if out.exists() else {"split": SPLIT, "rows": {}}
        record["provenance"] = provenance()
        record["rows"].setdefault(candidate, []).append(result)
        out.write_text(json.dumps(record, indent=None) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("candidates", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2])
    parser.add_argument("--devices", type=int, default=4, help="into which the CPU is split; more: smaller parts of a batch")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/digits_search.json")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    options.enable_compilation_cache(jaxdp.load_config("digits").compile)
    for seed in arguments.seeds:
        for candidate in arguments.candidates:
            rows = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else {}
            if any((row["seed"], row["devices"]) == (seed, arguments.devices) for row in rows.get(candidate, [])):
                continue
            result = run(shlex.split(candidate), seed)
            keep(arguments.out, candidate, result)
            print(candidate, seed, result["seconds"], "s", result["end"], flush=True)


if __name__ == "__main__":
    sys.exit(main())
