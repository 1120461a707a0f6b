"""Checks of every step that end or warn about a run: losses that are not finite, skipped steps, an exploded loss."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from jaxdp.choices import LOSSES, TASKS
from jaxdp.config import Config
from jaxdp.errors import TrainingError
from jaxdp.training.callback import Callback
from jaxdp.training.ending import LOWER_THE_RATE
from jaxdp.training.result import TrainResult
from jaxdp.training.run import Run

MOST_SKIPPED_STEPS = 10  # with `guard.non_finite=skip`: a run survives a few bad batches, but does not continue if it diverges
GIVE_UP_AFTER = 50  # skipped steps in a row, with dynamic loss scaling
EXPLODED = 4.0  # times the chance-level loss: a loss with a larger mean over LossWatch.WINDOW steps has exploded


class StepChecks(Callback):
    """Ends the run at a step that makes it fail, or at a save that rejected the state.

    Warns once if the loss has exploded; the newest checkpoint from before the explosion is then never removed. Warns at the end
    if the loss is above chance level.
    """

    def on_start(self, run: Run) -> None:
        scale = math.inf if run.config.optimizer.class_weights else 1.0  # the scale of weighted losses is the user's
        self.loss_watch = LossWatch(scale * _chance_loss(run.config), reported=run.progress.loss_exploded)

    def after_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        check_step(metrics, run.config)
        run.checkpoints.check()
        samples = self.loss_watch.last_good_samples(metrics)
        if samples is None:
            return
        retained = run.checkpoints.retain_latest(samples)
        run.progress.loss_exploded, run.progress.retained = True, [*run.checkpoints.retention.retained]
        path = retained and retained.path
        kept = f"the last checkpoint before that, {path}, is kept" if path else "there is no checkpoint from before that"
        run.info(self.loss_watch.warning(metrics, kept))

    def on_end(self, run: Run, result: TrainResult | None) -> None:
        if result is None:
            return
        epoch = result.epochs if result.best_epoch is None else result.best_epoch
        if warning := chance_level_warning(result.loss, epoch=epoch, chance=_chance_loss(run.config)):
            run.info(warning)


def chance_level_warning(loss: float, *, epoch: float, chance: float) -> str | None:
    """A warning if the final held-out loss is above the chance-level loss to three decimals; else None.

    Before the second epoch a loss at chance level is no sign of an error.
    """
    loss = round(loss, 3)
    if loss <= round(chance, 3) or epoch < 2:
        return None
    return f"held-out loss {loss:.3f} exceeds chance level, {chance:.3f}; check labels and learning rate"


def check_step(record: Mapping[str, Any], config: Config) -> None:
    """Raise TrainingError if the loss or gradient of a step is not finite.

    With dynamic loss scaling or `guard.non_finite=skip` such steps are skipped; then raise if too many were skipped.
    """
    scaling, guard = config.optimizer.loss_scale, config.guard
    if scaling != "dynamic" and guard.non_finite != "skip":
        _check_finite(record, scaling)
    if scaling == "dynamic" and record["skipped_in_a_row"] >= GIVE_UP_AFTER:
        raise TrainingError(
            f"{record['skipped_in_a_row']} steps in a row were skipped, up to {_position(record)}, loss scale "
            f"{record['loss_scale']:g}): the gradient is not finite at any scale; use --model.dtype bfloat16, or "
            f"{LOWER_THE_RATE}"
        )
    if guard.non_finite == "skip" and record["skipped_steps"] > MOST_SKIPPED_STEPS:
        raise TrainingError(
            f"{record['skipped_steps']} steps with non-finite gradients were skipped, up to {_position(record)}), more than "
            f"{MOST_SKIPPED_STEPS}: {LOWER_THE_RATE}"
        )


def _check_finite(record: Mapping[str, Any], scaling: str | float) -> None:
    for name in ("loss", "gradient_norm"):
        if not math.isfinite(record[name]):
            hint = LOWER_THE_RATE
            if isinstance(scaling, float):
                hint = (
                    f"if the scale {scaling:g} is too large for float16, lower optimizer.loss_scale or use "
                    f"--optimizer.loss-scale dynamic; else {LOWER_THE_RATE}"
                )
            raise TrainingError(f"{name} is {record[name]} at {_position(record)}): {hint}")


def _position(record: Mapping[str, Any]) -> str:
    return f"step {record['step']} (samples {record['samples']}, learning rate {record['learning_rate']:.6g}"


class LossWatch:
    """Detects an exploded loss: its mean over WINDOW steps exceeds EXPLODED times the chance-level loss.

    reported: whether the explosion was reported in an earlier session; it is reported once.
    """

    WINDOW = 20

    def __init__(self, chance: float, *, reported: bool = False) -> None:
        self.limit, self.reported = EXPLODED * chance, reported
        self.losses: deque[float] = deque(maxlen=self.WINDOW)
        self.samples: deque[int] = deque(maxlen=self.WINDOW)  # before each of these steps

    def last_good_samples(self, record: Mapping[str, Any]) -> int | None:
        """The samples seen before the window, when the explosion is first detected; else None. Call with every step."""
        if math.isfinite(record["loss"]):
            self.losses.append(record["loss"])
            self.samples.append(record["samples"] - record["global_batch"])
        if self.reported or len(self.losses) < self.WINDOW or sum(self.losses) / self.WINDOW <= self.limit:
            return None
        self.reported = True
        return self.samples[0]

    def warning(self, record: Mapping[str, Any], checkpoint: str) -> str:
        """The text of the warning. checkpoint: a clause about the last checkpoint before the explosion."""
        return (
            f"the loss has exploded: {self.WINDOW} steps up to {_position(record)}) have a mean above {self.limit:.4g}, "
            f"{EXPLODED:g} times the chance-level loss; {checkpoint}"
        )


def _chance_loss(config: Config) -> float:
    """The chance-level loss: the loss of equal scores for all classes, without class weights; infinite for another task."""
    return math.inf if TASKS[config.task].own else LOSSES[config.optimizer.loss].chance(config.model.class_count)
