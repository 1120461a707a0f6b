"""Accuracy on the digits when gradients are computed from parameters that are tau updates old.

    python benchmarks/staleness.py [--seeds 0 1 2] [--plot]

Asynchronous SGD with a parameter server (Downpour; Dean et al., NIPS 2012), simulated deterministically in one process: tau + 1
workers push in turn, so every gradient belongs to the parameters of tau updates earlier. For comparison, synchronous runs with
the same number of workers: with the same images per update, normalized together (equal to tau = 0 for any number of workers),
and with as many images on each worker and a linearly scaled rate. A narrow ResNet-18 (8 channels in its first stage). Writes
benchmarks/results/staleness.json and docs/staleness.png.
"""

import argparse
import json
from collections import deque
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import jax
import numpy as np
import optax

from jaxdp import models
from jaxdp.bench.environment import provenance
from jaxdp.config import Config, Data, Mesh, Model, Optimizer, Phase, Schedule
from jaxdp.data import prefetch
from jaxdp.data.sources import open_datasets
from jaxdp.distributed import runtime
from jaxdp.optim import build_optimizer
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import make_plan
from jaxdp.training.evaluation import evaluate, make_evaluation_step
from jaxdp.training.state import create_state
from jaxdp.training.step import local_gradient, make_train_step, update_statistics

ROOT = Path(__file__).parent.parent
EPOCHS, WARM_UP, BATCH, MOMENTUM = 8.0, 2.0, 32, 0.9
TAUS = (0, 1, 3, 7, 15)
RATES = (0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003125)
KINDS = {
    "asynchronous": "asynchronous, rate tuned for tau = 0",
    "tuned": "asynchronous, best rate",
    "synchronous": f"synchronous, {BATCH} images on each worker",
}


def config_for(rate: float, workers: int = 1, seed: int = 0, tuning=False) -> Config:
    split = {"train_split": "fit", "eval_split": "validation"} if tuning else {}
    return Config(
        name="staleness",
        seed=seed,
        epochs=EPOCHS,
        data=Data(augmentation="digits", **split),
        model=Model(depth=18, width=8, classes=10, norm_momentum=0.7),
        batch=(Phase(BATCH * workers, per_worker_batch=BATCH),),
        optimizer=Optimizer("sgd", momentum=MOMENTUM, weight_decay=1e-4),
        schedule=Schedule(
            "cosine", rate * workers, warmup_epochs=WARM_UP, start=min(rate, rate * workers) if workers > 1 else 0.0
        ),
        mesh=Mesh(cpu_devices=1),
    )


def train_with_stale_gradients(state, gradient, update, steps, tau: int):
    """The state after all steps; each gradient is computed from the parameters of `tau` updates earlier."""
    seen = deque([state.params], maxlen=tau + 1)
    for step in steps:
        state = update(state, gradient(seen[0], state, step), step)
        seen.append(state.params)
    return state


class Trainer:
    """The digits, the network and its compiled functions, shared by all runs."""

    def __init__(self, config: Config):
        self.model, self.mesh = models.create(config.model), make_mesh(1, 1)
        self.datasets = open_datasets(config)
        self.pixels = (self.datasets.mean, self.datasets.std)
        self.evaluation = make_evaluation_step(config, self.model, self.mesh, pixel_stats=self.pixels)
        self.gradient = jax.jit(partial(local_gradient, config, self.model, pixel_stats=self.pixels, scale=1.0))
        self.update = jax.jit(partial(self._update, config))
        self.synchronous = {}

    @staticmethod
    def _update(config, state, gradient, moments, rate):
        updates, opt_state = build_optimizer(config.optimizer, rate, MOMENTUM).update(gradient, state.opt_state, state.params)
        statistics = update_statistics(state.batch_stats, moments, config.model.norm_momentum)
        return state._replace(params=optax.apply_updates(state.params, updates), batch_stats=statistics, opt_state=opt_state)

    def accuracy(self, state) -> float:
        """Held-out accuracy; 0 if parameters are not finite."""
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params)):
            return 0.0
        metrics = evaluate(self.evaluation, *state.evaluated, source=self.datasets.evaluation, batch=(360, 360), mesh=self.mesh)
        return metrics["eval_accuracy"]

    def asynchronous_accuracy(self, config: Config, tau: int) -> float:
        """Update t takes the gradient of the parameters after update t - tau, or of the first ones while t < tau."""
        plan = make_plan(config, examples=len(self.datasets.train), devices=1)

        def gradient(params, state, samples):
            batch = prefetch.train_batch(self.datasets.train, seed=config.seed, first_sample=samples, global_batch=BATCH)
            return self.gradient(params, batch_stats=state.batch_stats, batch=batch)

        def update(state, pushed, samples):
            return self.update(state, pushed[0], pushed[1]["moments"], np.float32(plan.learning_rate(samples)))

        state = create_state(config, self.model, self.mesh)
        return self.accuracy(train_with_stale_gradients(state, gradient, update, range(0, plan.total_samples, BATCH), tau))

    def synchronous_accuracy(self, config: Config, workers: int) -> float:
        """One update for the mean of all workers' gradients."""
        plan = make_plan(config, examples=len(self.datasets.train), devices=1)
        (phase,) = plan.phases
        if workers not in self.synchronous:
            self.synchronous[workers] = make_train_step(
                config, self.model, self.mesh, pixel_stats=self.pixels, accumulation=phase.accumulation
            )
        state = create_state(config, self.model, self.mesh)
        for samples in range(0, plan.total_samples, phase.global_batch):
            batch = prefetch.to_global(
                prefetch.train_batch(
                    self.datasets.train, seed=config.seed, first_sample=samples, global_batch=phase.global_batch
                ),
                self.mesh,
            )
            hyperparameters = {"learning_rate": np.float32(plan.learning_rate(samples)), "momentum": np.float32(MOMENTUM)}
            hyperparameters["seed"] = np.uint32(config.seed)
            state, _ = self.synchronous[workers](state, batch, hyperparameters)
        return self.accuracy(state)


def measure(seeds) -> dict:
    tuner, trainer = Trainer(config_for(0.1, tuning=True)), Trainer(config_for(0.1))
    best = {}
    for tau in TAUS:
        scores = {rate: tuner.asynchronous_accuracy(config_for(rate, tuning=True), tau) for rate in RATES}
        best[tau] = max(scores, key=scores.get)
        print("tau", tau, "rates", scores, flush=True)
    rows = []
    for tau in TAUS:
        runs = {
            "asynchronous": [trainer.asynchronous_accuracy(config_for(best[0], seed=seed), tau) for seed in seeds],
            "tuned": [trainer.asynchronous_accuracy(config_for(best[tau], seed=seed), tau) for seed in seeds],
            "synchronous": [trainer.synchronous_accuracy(config_for(best[0], tau + 1, seed), tau + 1) for seed in seeds],
        }
        rows += [{"tau": tau, "kind": kind, "accuracies": scores} for kind, scores in runs.items()]
        print(tau, runs, flush=True)
    return {"provenance": provenance(), "rates": {str(tau): rate for tau, rate in best.items()}, "rows": rows}


def scores_of(record, tau, kind) -> list[float]:
    return [100 * a for r in record["rows"] if (r["tau"], r["kind"]) == (tau, kind) for a in r["accuracies"]]


def table(record) -> str:
    lines = ["| tau | workers | " + " | ".join(KINDS.values()) + " |", "|---" * (len(KINDS) + 2) + "|"]
    for tau in TAUS:
        cells = []
        for kind in KINDS:
            scores = scores_of(record, tau, kind)
            rate = f" (rate {record['rates'][str(tau)]:g})" if kind == "tuned" else ""
            cells.append(f"{mean(scores):.2f}{f' +- {stdev(scores):.2f}' if len(scores) > 1 else ''}{rate}")
        lines.append(f"| {tau} | {tau + 1} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(record, path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for (kind, label), color, shift in zip(KINDS.items(), ("#D55E00", "#E69F00", "#0072B2"), (-0.06, 0.0, 0.06), strict=True):
        scores = [scores_of(record, tau, kind) for tau in TAUS]
        spread = [stdev(s) if len(s) > 1 else 0.0 for s in scores]
        places = [place + shift for place in range(len(TAUS))]
        axes.errorbar(places, [mean(s) for s in scores], spread, marker="o", capsize=3, color=color, label=label)
    start = mean(scores_of(record, 0, "asynchronous"))
    axes.axhline(start, color="#999999", linestyle="--", label=f"synchronous, {BATCH} images shared (tau = 0)")
    axes.set(xlabel="tau: updates between a gradient's parameters and its use", ylabel="held-out accuracy (%)")
    axes.set_xticks(range(len(TAUS)), [str(tau) for tau in TAUS])
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plot", action="store_true", help="only draw the plot from the results")
    arguments = parser.parse_args()
    results = ROOT / "benchmarks/results/staleness.json"
    if not arguments.plot:
        runtime.start(Mesh(cpu_devices=1))
        results.write_text(json.dumps(measure(arguments.seeds), indent=1) + "\n")
    record = json.loads(results.read_text())
    draw(record, ROOT / "docs/staleness.png")
    print(table(record))


if __name__ == "__main__":
    main()
