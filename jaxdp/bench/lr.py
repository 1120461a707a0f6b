"""`jaxdp bench lr`: the learning-rate range test, for the recipe's data, batch, model and optimizer.

Training starts anew with a small learning rate that grows by a constant factor per step. The loss falls once the rate is large
enough and diverges when it is too large (L. N. Smith, Cyclical Learning Rates for Training Neural Networks, arXiv 1506.01186,
section 3.3; the exponential growth is a common variant).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from rich.table import Table

from jaxdp import schedules
from jaxdp.bench.environment import provenance
from jaxdp.bench.step_runner import describe
from jaxdp.config import Config
from jaxdp.errors import ConfigError, plural
from jaxdp.fields import LARGEST
from jaxdp.loggers.smoothing import moving_average
from jaxdp.models import finetune
from jaxdp.setup.prepare import make_compiler, prepare
from jaxdp.training import request_flags
from jaxdp.training.run import open_batches
from jaxdp.training.state import create_state, with_values

DIVERGED, RECENT = 2.0, 5  # the test ends when the mean of RECENT losses exceeds the smallest smoothed loss by this factor
MARGIN = 4.0  # the suggestion is the rate of the smallest smoothed loss divided by this; see benchmarks/lr_range.py
FEWEST_STEPS = 20
RANGE = (1e-3, 1e2)  # of the learning rates, relative to the recipe's peak


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether the last loss is not finite, or the mean of the last `RECENT` is far above the smallest smoothed loss."""
    if not math.isfinite(losses[-1]):
        return True
    recent, smallest = float(np.mean(losses[-RECENT:])), float(moving_average(losses).min())
    return len(losses) >= FEWEST_STEPS and recent > DIVERGED * smallest


def suggest(rates: Sequence[float], losses: Sequence[float]) -> dict[str, float | None]:
    """What the test says about a peak learning rate.

    rates, losses: of the steps until divergence. Returns smallest_loss (rate of the smallest smoothed loss) and suggested
    (smallest_loss / MARGIN). Both are None if the loss never falls by 5 %.
    """
    finite = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
    smoothed = moving_average([losses[index] for index in finite])
    if len(finite) < FEWEST_STEPS or smoothed.min() > 0.95 * smoothed[:RECENT].mean():
        return {"smallest_loss": None, "suggested": None}
    smallest = rates[finite[int(np.argmin(smoothed))]]
    return {"smallest_loss": smallest, "suggested": smallest / MARGIN}


def field_for(config: Config, rate: float) -> float:
    """The value of schedule.learning_rate with which the schedule's peak at the first phase's batch is `rate`."""
    batch = config.batch[0].global_batch
    peak_epoch = config.schedule.from_epoch + config.schedule.warmup_epochs
    at = schedules.learning_rate(config.schedule, peak_epoch, epochs=math.inf, global_batch=batch)
    return rate * config.schedule.learning_rate / at


def _check(steps: int, *, lowest: float, highest: float) -> None:
    if steps < FEWEST_STEPS:
        raise ConfigError("--steps", steps, reason=f"must be at least {FEWEST_STEPS}")
    if not 0 < lowest < math.inf:
        raise ConfigError("--lowest", lowest, reason="must be greater than 0")
    if not lowest < highest < LARGEST:
        raise ConfigError("--highest", highest, reason=f"must be greater than --lowest ({lowest:g}) and at most {LARGEST:g}")


def run(
    config: Config,
    *,
    steps: int = 100,
    lowest: float | None = None,
    highest: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train `steps` steps of the first phase with growing learning rates.

    lowest, highest: the rates of the first and the last step, as the optimizer receives them (None: the recipe's peak times
    `RANGE`). Nothing is saved. Raises ConfigError if the run cannot start.
    """
    if config.schedule.name not in schedules.SCHEDULES.builtin:
        reason, hint = "a registered schedule has no peak to suggest", "use a built-in one, such as --schedule.name cosine"
        raise ConfigError("schedule.name", config.schedule.name, reason=reason, hint=hint)
    peak = config.schedule.learning_rate / field_for(config, 1.0)
    lowest, highest = (factor * peak if rate is None else rate for factor, rate in zip(RANGE, (lowest, highest), strict=True))
    _check(steps, lowest=lowest, highest=highest)
    config, weights = finetune.read_weights(config)
    plan, devices, datasets = prepare(config)
    config, phase = plan.config, dataclasses.replace(plan.phases[0], steps=steps)
    compiler = make_compiler(plan, devices, datasets)
    mesh = compiler.mesh(phase)
    progress(f"compiling the step of {plural(phase.global_batch, 'image')} ...")
    step = compiler.prepare_train(phase).result()
    state = create_state(config, compiler.model, mesh)
    if (values := finetune.initial_values(config, weights)) is not None:
        state = with_values(state, values, mesh)
    state = compiler.layout(phase).place(state)
    rates, losses = np.geomspace(lowest, highest, steps).tolist(), list[float]()
    hyperparameters = compiler.hyperparameters(phase, 0.0)
    with closing(compiler), closing(open_batches(compiler, datasets, phase)) as batches:
        for number, rate in enumerate(rates, 1):
            hyperparameters["learning_rate"] = np.float32(rate)
            batch = batches.next()
            assert batch is not None  # the phase has as many steps as there are rates
            state, metrics = step(state, batch | request_flags.none(mesh), hyperparameters)
            losses.append(float(jax.device_get(metrics["loss"])))
            if number % max(1, steps // 10) == 0:
                progress(f"step {number} of {steps}: learning rate {rate:.3g}, loss {losses[-1]:.4g}")
            if has_diverged(losses):
                progress(f"the loss diverges at the learning rate {rate:.3g}")
                break
    return {
        "provenance": provenance(),
        "config": config.name,
        "model": describe(config),
        "optimizer": config.optimizer.name,
        "schedule": config.schedule.name,
        "momentum": phase.momentum,
        "global_batch": phase.global_batch,
        "epochs": len(losses) * phase.global_batch / plan.examples,
        "rates": rates[: len(losses)],
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
        "diverged": has_diverged(losses),
        "recipe": config.schedule.learning_rate,
        **(found := suggest(rates, losses)),
        "suggested_field": None if found["suggested"] is None else field_for(config, found["suggested"]),
    }


def render(record: dict[str, Any]) -> Iterator[Table | str]:
    """A table of the test and the suggestion."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.title = f"{record['config']}: {record['model']}, {record['optimizer']}, batch {record['global_batch']:,}"
    steps, last = plural(len(record["rates"]), "step"), record["rates"][-1]
    table.add_row("learning rates", f"{record['rates'][0]:.3g} to {last:.3g} in {steps} ({record['epochs']:.2f} epochs)")
    if record["smallest_loss"] is None:
        table.add_row("loss", "does not fall")
        yield table
        yield "no suggestion: raise --highest or --steps, or check the data and the model"
        return
    table.add_row("smallest loss", f"at {record['smallest_loss']:.3g}")
    table.add_row("divergence", f"at {last:.3g}" if record["diverged"] else f"not up to {last:.3g}")
    yield table
    yield (
        f"suggestion: --schedule.learning-rate {record['suggested_field']:.2g} (the recipe has {record['recipe']:g}), "
        f"1/{MARGIN:g} of the rate at which the loss was smallest. Compare both rates in a short run."
    )
    if not record["diverged"]:
        yield "the loss did not diverge, so larger rates may be possible: raise --highest"


def draw(record: dict[str, Any], path: str | Path | IO[bytes]) -> None:
    """Plot the loss against the learning rate, with the suggestion."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    points = [(rate, loss) for rate, loss in zip(record["rates"], record["losses"], strict=True) if loss is not None]
    rates, losses = [rate for rate, _ in points], [loss for _, loss in points]
    smoothed = moving_average(losses)
    axes.plot(rates, losses, ".", color="#9ecae1", label="loss of a step")
    axes.plot(rates, smoothed, color="#0072B2", label="moving average")
    if record["suggested"] is not None:
        axes.axvline(record["suggested"], color="#D55E00", label=f"suggestion {record['suggested']:.2g}")
        axes.axvline(record["smallest_loss"], color="#666666", linestyle=":", label=f"smallest {record['smallest_loss']:.2g}")
    axes.set_ylim(0.9 * min(losses), 1.05 * min(max(losses), DIVERGED * smoothed[0]))
    axes.set(xscale="log", xlabel="learning rate of the step", ylabel="training loss")
    axes.set_title(f"{record['config']}: {record['optimizer']}, batch {record['global_batch']:,}", fontsize="medium")
    axes.grid(True, color="#e6e6e6")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
