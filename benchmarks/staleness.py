"""Accuracy on the digits when gradients are computed from parameters that are tau updates old.

    python benchmarks/staleness.py [--seeds 0 1 2]

Asynchronous SGD with a parameter server (Downpour; Dean et al., NIPS 2012), simulated deterministically in one process: tau + 1
workers push in turn, so every gradient belongs to the parameters of tau updates earlier. For comparison, synchronous runs with
the same number of workers: with the same images per update, normalized together (equal to tau = 0 for any number of workers),
and with as many images on each worker and a linearly scaled rate. A narrow ResNet-18 (8 channels in its first stage). Writes
benchmarks/results/staleness.json and docs/staleness.png.
"""

from collections import deque
from functools import partial
from statistics import mean

import jax
import numpy as np
import optax
from common import ROOT, accuracy_of, arguments, draw_accuracies, markdown, mean_and_deviation, narrow_resnet, read, write
from jax.sharding import PartitionSpec

from jaxdp import models
from jaxdp.bench.environment import provenance
from jaxdp.config import Config, Mesh, Optimizer, Phase, Schedule
from jaxdp.data import prefetch
from jaxdp.data.sources import open_datasets
from jaxdp.distributed import runtime
from jaxdp.optim import build_optimizer
from jaxdp.parallel.mesh import AXES, make_mesh
from jaxdp.planning import make_plan
from jaxdp.training.batch_statistics import update_statistics
from jaxdp.training.evaluation import evaluate, make_evaluation_step
from jaxdp.training.state import create_state
from jaxdp.training.step import make_layout, step_gradient, without_reduction

EPOCHS, WARM_UP, BATCH, MOMENTUM = 8.0, 2.0, 32, 0.9
TAUS = (0, 1, 3, 7, 15)
RATES = (0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003125)
KINDS = {
    "asynchronous": "asynchronous, rate tuned for tau = 0",
    "tuned": "asynchronous, best rate",
    "synchronous": f"synchronous, {BATCH} images on each worker",
}


def config_for(rate: float, workers: int = 1, seed: int = 0, tuning=False) -> Config:
    return narrow_resnet(
        "staleness",
        tuning,
        seed=seed,
        epochs=EPOCHS,
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
        layout = make_layout(config, self.model, self.mesh)

        def gradient(state, batch):
            return step_gradient(without_reduction(config), layout, pixel_stats=self.pixels)(state, batch, config.seed)

        everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
        mapped = jax.shard_map(gradient, mesh=self.mesh, in_specs=(everywhere, rows), out_specs=everywhere, check_vma=False)
        self.gradient = jax.jit(mapped)
        self.update = jax.jit(partial(self._update, config))

    @staticmethod
    def _update(config, state, gradient, moments, rate):
        updates, opt_state = build_optimizer(config.optimizer, rate, MOMENTUM).update(gradient, state.opt_state, state.params)
        statistics = update_statistics(state.batch_stats, moments, config.model.norm_momentum)
        return state._replace(params=optax.apply_updates(state.params, updates), batch_stats=statistics, opt_state=opt_state)

    def accuracy(self, state) -> float:
        """Held-out accuracy; 0 if parameters are not finite."""
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params)):
            return 0.0
        metrics = evaluate(
            self.evaluation, *state.eval_variables, source=self.datasets.evaluation, batch=(360, 360), mesh=self.mesh
        )
        return metrics["eval_accuracy"]

    def asynchronous_accuracy(self, config: Config, tau: int) -> float:
        """Update t takes the gradient of the parameters after update t - tau, or of the first ones while t < tau."""
        plan = make_plan(config, examples=len(self.datasets.train), devices=1)

        def gradient(params, state, samples):
            rows = prefetch.BatchRows.of_batch(np.arange(BATCH), first=samples, global_batch=BATCH)
            batch = prefetch.load_images(self.datasets.train, config.seed, rows)
            return self.gradient(state._replace(params=params), batch)

        def update(state, pushed, samples):
            return self.update(state, pushed[0], pushed[1]["moments"], np.float32(plan.learning_rate(samples)))

        state = create_state(config, self.model, self.mesh)
        return self.accuracy(train_with_stale_gradients(state, gradient, update, range(0, plan.total_samples, BATCH), tau))


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
            "synchronous": [accuracy_of(config_for(best[0], tau + 1, seed)) or 0.0 for seed in seeds],
        }
        rows += [{"tau": tau, "kind": kind, "accuracies": scores} for kind, scores in runs.items()]
        print(tau, runs, flush=True)
    return {"provenance": provenance(), "rates": {str(tau): rate for tau, rate in best.items()}, "rows": rows}


def percents_by_case(record: dict) -> dict[tuple[int, str], list[float]]:
    """(tau, kind) -> accuracies in %."""
    return {(row["tau"], row["kind"]): [100 * one for one in row["accuracies"]] for row in record["rows"]}


def table(record: dict) -> str:
    rows, percents = [], percents_by_case(record)
    for tau in TAUS:
        cells = {kind: mean_and_deviation(percents[tau, kind]) for kind in KINDS}
        cells["tuned"] += f" (rate {record['rates'][str(tau)]:g})"
        rows.append((str(tau), str(tau + 1), *cells.values()))
    return markdown(("tau", "workers", *KINDS.values()), rows)


def draw(record: dict) -> None:
    percents, series = percents_by_case(record), {}
    for (kind, label), color, shift in zip(KINDS.items(), ("#D55E00", "#E69F00", "#0072B2"), (-0.06, 0.0, 0.06), strict=True):
        series[label] = color, [place + shift for place in range(len(TAUS))], [percents[tau, kind] for tau in TAUS]
    baseline = mean(percents[0, "asynchronous"]), f"synchronous, {BATCH} images shared (tau = 0)"
    axis = {
        "xlabel": "tau: updates between a gradient's parameters and its use",
        "xticks": range(len(TAUS)),
        "xticklabels": TAUS,
    }
    draw_accuracies(ROOT / "docs/staleness.png", series, baseline=baseline, **axis)


def main():
    seeds = arguments(__doc__, seeds=[0, 1, 2]).seeds
    runtime.start(Mesh(cpu_devices=1))
    write("staleness", measure(seeds), table)
    draw(read("staleness"))


if __name__ == "__main__":
    main()
