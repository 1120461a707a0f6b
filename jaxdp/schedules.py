"""Learning rates and momentum as functions of epoch and batch, in float64.

An epoch is samples seen / number of training examples, so a rate does not depend on the batch size.
"""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from typing_extensions import Doc

from jaxdp.errors import ConfigError
from jaxdp.fields import FromList, NonNegative, Positive, RegisteredName, Section
from jaxdp.registry import Choice, Choices

MOMENTUM_BATCH = 32768  # the global batch at which Mikami et al. state the momentum of their rules
GOYAL_BATCH = 256  # the global batch of the learning rate that the schedule goyal gives


class Position(NamedTuple):
    """A point in a schedule of `epochs` epochs: the current epoch and the global batch of its phase."""

    epoch: float
    epochs: float
    global_batch: int = GOYAL_BATCH


SCHEDULES = Choices(
    "schedule.name",
    {
        "cosine": Choice("warm-up, then half a cosine down to `end`", implementation=lambda: cosine),
        "polynomial": Choice("warm-up, then (1 - progress)^power down to `end`", implementation=lambda: polynomial),
        "goyal": Choice("step decay, scaled linearly with the batch (Goyal et al.)", implementation=lambda: goyal),
        "sony_a": Choice("configuration A of Mikami et al., polynomial", implementation=lambda: polynomial, like="polynomial"),
        "sony_b": Choice("configuration B of Mikami et al., with step decay", implementation=lambda: sony_b),
    },
    other=Choice("or a name registered with `jaxdp.register_schedule`"),
    other_reads="",
    function="register_schedule",
)
"""Learning-rate schedules, each implemented by a function of (schedule, position)."""


@dataclass(frozen=True)
class EverySchedule(Section):
    """What every built-in schedule reads; registered ones read their epoch alone."""

    name: Annotated[RegisteredName, Doc(f"Learning-rate schedule. {SCHEDULES.help}")] = "cosine"
    learning_rate: Positive = 1.0
    """Peak learning rate; for goyal the rate at a global batch of 256"""
    warmup_epochs: NonNegative = 5.0
    """Length of the linear warm-up, in epochs"""


@dataclass(frozen=True, kw_only=True)
class WarmUp(EverySchedule):
    """Warm-up from a rate of the user's."""

    start: NonNegative = 0.0
    """Learning rate at epoch 0 of the warm-up (all but goyal, which starts at `learning_rate`, or lower with a batch below
    256)"""


@dataclass(frozen=True, kw_only=True)
class Cosine(WarmUp):
    """Decay to a rate of the user's."""

    end: NonNegative = 0.0
    """Learning rate at the last epoch (cosine, polynomial, sony_a)"""


@dataclass(frozen=True, kw_only=True)
class Power(WarmUp):
    """Decay by a power of the rest of the run."""

    power: Positive = 2.0
    """Exponent of the decay (polynomial, sony_a, sony_b)"""


@dataclass(frozen=True, kw_only=True)
class Polynomial(Power, Cosine):
    """Polynomial decay."""


@dataclass(frozen=True, kw_only=True)
class Steps(EverySchedule):
    """Step decay."""

    boundaries: Annotated[tuple[Positive, ...], FromList] = ()
    """Epochs at which the rate is multiplied by `factor` (goyal, sony_b)"""
    factor: Positive = 0.1
    """Learning-rate multiplier at each boundary (goyal, sony_b)"""

    def check(self) -> None:
        """Boundaries increase, and the warm-up ends before the first one."""
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ConfigError("schedule.boundaries", self.boundaries, reason="must increase")
        if self.boundaries and self.warmup_epochs > self.boundaries[0]:
            reason = f"must not exceed the first of schedule.boundaries ({self.boundaries[0]:g})"
            raise ConfigError("schedule.warmup_epochs", self.warmup_epochs, reason=reason)


@dataclass(frozen=True, kw_only=True)
class SonyB(Steps, Power):
    """Polynomial decay with steps."""


@dataclass(frozen=True)
class Schedule(SonyB, Polynomial):
    """Learning rate as a function of epochs."""

    from_epoch: NonNegative = 0.0
    """Epoch of the run at which the schedule begins, and from which warm-up and boundaries count; `--schedule-from-now` sets
    it"""


SCHEDULES.read("schedule", cosine=Cosine, polynomial=Polynomial, goyal=Steps, sony_b=SonyB)


def learning_rate(schedule: Schedule, epoch: float, *, epochs: float, global_batch: int) -> float:
    """The learning rate of a schedule at `epoch` of a run of `epochs`. Raises ConfigError before the schedule begins."""
    first = schedule.from_epoch
    if epoch < first:
        raise ConfigError("epoch", epoch, reason=f"must be at least {first:g}, where the schedule begins")
    return SCHEDULES.implementation(schedule.name)(schedule, Position(epoch - first, epochs - first, global_batch))


def cosine(schedule: Cosine, at: Position) -> float:
    """Linear warm-up, then half a cosine down to `end` (Loshchilov & Hutter, arXiv 1608.03983)."""
    if at.epoch < schedule.warmup_epochs:
        return _warm_up(schedule, at.epoch, start=schedule.start, peak=schedule.learning_rate)
    return schedule.end + (schedule.learning_rate - schedule.end) * 0.5 * (1.0 + math.cos(math.pi * _progress(schedule, at)))


def polynomial(schedule: Polynomial, at: Position) -> float:
    """Linear warm-up, then (1 - progress)^power down to `end`.

    With power 2 the schedule of MLPerf's reference, and configuration A of Mikami et al. (arXiv 1811.05233, section 3.1).
    """
    if at.epoch < schedule.warmup_epochs:
        return _warm_up(schedule, at.epoch, start=schedule.start, peak=schedule.learning_rate)
    decay = (1.0 - _progress(schedule, at)) ** schedule.power
    return schedule.end + (schedule.learning_rate - schedule.end) * decay


def goyal(schedule: Steps, at: Position) -> float:
    """Linear scaling rule with gradual warm-up and steps (Goyal et al., arXiv 1706.02677, sections 2.1, 2.2 and 5.1).

    The rate is learning_rate * global_batch / GOYAL_BATCH after a linear warm-up from `learning_rate`, multiplied by `factor`
    at each of `boundaries`. The paper warms up to larger batches only: with a smaller one the rate is the scaled one at once.
    """
    peak = schedule.learning_rate * at.global_batch / GOYAL_BATCH
    if at.epoch < schedule.warmup_epochs:
        return _warm_up(schedule, at.epoch, start=min(schedule.learning_rate, peak), peak=peak)
    return peak * schedule.factor ** _boundaries_passed(schedule, at)


def sony_b(schedule: SonyB, at: Position) -> float:
    """Configuration B of Mikami et al. (arXiv 1811.05233, section 3.1), with its two jumps.

    Linear warm-up from `start`, then learning_rate * (1 - epoch / epochs)^power, counted from epoch 0 (so the rate drops at the
    end of the warm-up), multiplied by `factor` at each of `boundaries` (the peak 29 becomes 50 at epoch 30). Without boundaries
    it is the schedule of the paper's Reference.
    """
    if at.epoch < schedule.warmup_epochs:
        return _warm_up(schedule, at.epoch, start=schedule.start, peak=schedule.learning_rate)
    peak = schedule.learning_rate * schedule.factor ** _boundaries_passed(schedule, at)
    return peak * max(0.0, 1.0 - at.epoch / at.epochs) ** schedule.power


def _warm_up(schedule: EverySchedule, epoch: float, *, start: float, peak: float) -> float:
    return start + (peak - start) * epoch / schedule.warmup_epochs


def _progress(schedule: EverySchedule, at: Position) -> float:
    return min((at.epoch - schedule.warmup_epochs) / (at.epochs - schedule.warmup_epochs), 1.0)


def _boundaries_passed(schedule: Steps, at: Position) -> int:
    return sum(at.epoch >= boundary for boundary in schedule.boundaries)


MOMENTUM_RULES = Choices(
    "optimizer.momentum_rule",
    {
        "constant": Choice("the same for all batches", implementation=lambda: lambda base, batch: base),
        "noise_scale": Choice(
            "keeps learning rate / (batch * (1 - momentum)) constant",
            implementation=lambda: lambda base, batch: 1.0 - (1.0 - base) * (MOMENTUM_BATCH / batch),
        ),
        "as_printed": Choice(
            "the formula printed by Mikami et al.",
            implementation=lambda: lambda base, batch: 1.0 - (1.0 - base) * (batch / MOMENTUM_BATCH),
        ),
    },
)
"""Momentum as a function of the batch, each implemented by a function of (momentum at MOMENTUM_BATCH, batch)."""


def momentum(rule: str, base: float, *, global_batch: int) -> float:
    """The momentum of a batch phase. base: momentum at MOMENTUM_BATCH. Raises ConfigError for an unknown rule.

    noise_scale: learning rate / (batch * (1 - momentum)) is constant (Smith & Le, arXiv 1710.06451). as_printed: the formula
    printed by Mikami et al. (section 2.1); negative if the batch exceeds MOMENTUM_BATCH / (1 - base). constant: `base`.
    """
    return MOMENTUM_RULES.implementation(rule)(base, global_batch)
