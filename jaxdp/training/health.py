"""Checks that end or warn about a run: losses that are not finite, skipped steps, an exploded loss, memory."""

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxdp.config import Config, LossScale, chance_loss
from jaxdp.errors import ConfigError, TrainingError, first_line, plural
from jaxdp.planning import FEW_VALUES, Plan, PlannedPhase
from jaxdp.training.callback import Callback

if TYPE_CHECKING:
    from jaxdp.training.run import Run

MOST_SKIPPED_STEPS = 10  # with `guard.non_finite=skip`: a few bad batches are survived, a diverging run is not prolonged
EXPLODED = 4.0  # times the chance-level loss: the mean of LossWatch.WINDOW steps of a loss that has exploded
LOWER_THE_RATE = "lower schedule.learning_rate or lengthen schedule.warmup_epochs, in a new --workdir or with --resume never"


class StepChecks(Callback):
    """Ends the run at a step that makes it fail, or at a save that rejected the state; warns once if the loss has exploded.

    The newest checkpoint from before the explosion is then never removed.
    """

    def on_start(self, run: "Run") -> None:
        self.loss_watch = LossWatch(chance_loss(run.config), reported=run.progress.loss_exploded)

    def after_step(self, run: "Run", metrics: Mapping[str, Any]) -> None:
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


def check_step(record: Mapping[str, Any], config: Config) -> None:
    """Raise TrainingError if the loss or gradient of a step is not finite.

    With dynamic loss scaling or `guard.non_finite=skip` such steps are skipped; then raise if too many were skipped.
    """
    scaling, guard = config.loss_scale, config.guard
    if scaling.name != "dynamic" and guard.non_finite != "skip":
        _check_finite(record, scaling)
    if scaling.name == "dynamic" and record["skipped_in_a_row"] >= scaling.GIVE_UP_AFTER:
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


def _check_finite(record: Mapping[str, Any], scaling: LossScale) -> None:
    for name in ("loss", "gradient_norm"):
        if not math.isfinite(record[name]):
            hint = LOWER_THE_RATE
            if scaling.name == "static":
                hint = (
                    f"if the scale {scaling.initial:g} is too large for float16, lower loss_scale.initial or use "
                    f"--loss-scale.name dynamic; else {LOWER_THE_RATE}"
                )
            raise TrainingError(f"{name} is {record[name]} at {_position(record)}): {hint}")


def _position(record: Mapping[str, Any]) -> str:
    return f"step {record['step']} (samples {record['samples']}, learning rate {record['learning_rate']:.6g}"


def check_skipped(skipped: int, steps: int, scaling: LossScale) -> None:
    """Raise TrainingError if a run skipped all of its steps."""
    if skipped == steps:
        scales = f" at loss scales of {scaling.MINIMUM:g} to {scaling.initial:g}" if scaling.name != "none" else ""
        hint = "use --model.dtype bfloat16" if scales else LOWER_THE_RATE
        raise TrainingError(f"all {steps} steps were skipped because no gradient was finite{scales}: {hint}")


def check_evaluation(record: Mapping[str, Any]) -> None:
    """Raise TrainingError if the held-out loss after the last step is not finite."""
    if not math.isfinite(record["eval_loss"]):
        raise TrainingError(
            f"the held-out loss is {record['eval_loss']} after the last step ({record['step']}, samples {record['samples']}): "
            f"the parameters are no longer finite; {LOWER_THE_RATE}"
        )


def chance_level_warning(record: dict[str, Any], chance: float) -> str | None:
    """A warning if the final held-out loss is above the chance-level loss to three decimals; else None.

    Before the second epoch a loss at chance level is no sign of an error.
    """
    loss = round(record["eval_loss"], 3)
    if loss <= round(chance, 3) or record["epoch"] < 2:
        return None
    return f"held-out loss {loss:.3f} exceeds chance level, {chance:.3f}; check labels and learning rate"


def small_worker_warning(plan: Plan, *, has_batch_norm: bool) -> str | None:
    """A warning, a line for each phase, of batch normalization over few values, or over workers of few images into which the
    devices divide the batch; None if there are none."""
    synchronized, lines = plan.config.model.norm == "synchronized", []
    for phase in plan.phases:
        given, values, worker = plan.config.batch[phase.index], phase.normalized_values, phase.per_worker_batch
        can_synchronize = phase.devices > 1 and not synchronized
        is_divided = has_batch_norm and can_synchronize and given.per_worker_batch is None
        if values is None and not (is_divided and worker <= FEW_VALUES):
            continue
        flag, images = f"--batch.{phase.index}.", worker * (phase.devices if synchronized else 1)
        reason, larger = f"workers of {plural(worker, 'image')} each, few for batch normalization", f"{flag}per-worker-batch"
        if images == phase.global_batch:
            larger = f"{flag}global-batch" + f" and {larger}" * (given.per_worker_batch is not None)
        if values not in (None, worker):
            reason = f"batch normalization averages over {values} values of each channel"
        if values and values > images:  # the maps have several positions
            reason += f", with images of {phase.image_size}x{phase.image_size}"
            larger += f", or {'--data.' if given.image_size is None else flag}image-size"
        larger += ", or --model.norm synchronized" * can_synchronize
        lines.append(f"batch.{phase.index}: {reason}; set a larger {larger}")
    return "\n".join(lines) or None


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
            f"the loss has exploded: {self.WINDOW} steps up to step {record['step']} (samples {record['samples']}, "
            f"learning rate {record['learning_rate']:.6g}) "
            f"have a mean above {self.limit:.4g}, {EXPLODED:g} times the chance-level loss; {checkpoint}"
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of JAX or NumPy reports that a device or the host has run out of memory."""
    if isinstance(error, MemoryError):
        return True
    pattern = r"RESOURCE_EXHAUSTED|out of memory"
    return isinstance(error, RuntimeError) and re.search(pattern, str(error), re.IGNORECASE) is not None


@contextmanager
def out_of_memory_as_config_error(phase: PlannedPhase) -> Iterator[None]:
    """Turn an out-of-memory error in the block into a ConfigError that names the field to change."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_error(phase, error) from None


def out_of_memory_error(phase: PlannedPhase, error: Exception) -> ConfigError:
    """The error for a phase that does not fit into memory.

    Its hint is the largest per-worker batch that keeps the global batch and is at most half the present one.
    """
    reason = first_line(error, "no memory left")
    if isinstance(error, MemoryError):
        return ConfigError(
            f"batch.{phase.index}.global_batch",
            phase.global_batch,
            reason=f"the images of a batch do not fit into the memory of this host ({reason})",
            hint="use smaller images (data.image_size, data.stored_size), a smaller batch or more hosts",
        )
    per_device = phase.per_device_batch
    smaller = [size for size in range(1, phase.per_worker_batch // 2 + 1) if per_device % size == 0]
    hint = "it cannot be smaller, so use a smaller model, smaller images or more devices"
    if smaller:
        best = max(smaller)
        hint = (
            f"try --batch.{phase.index}.per-worker-batch {best}, which keeps the global batch {phase.global_batch} by "
            f"accumulating {per_device // best} micro-batches"
        )
    field = f"batch.{phase.index}.per_worker_batch"
    return ConfigError(field, phase.per_worker_batch, reason=f"out of memory ({reason})", hint=hint)
