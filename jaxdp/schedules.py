"""Learning rates as functions of epochs, in float64, and batch phases as arithmetic on samples.

An epoch is samples seen / number of training examples, so a rate keeps its meaning when the batch size changes.
"""

import math
from fractions import Fraction

from jaxdp.config import Phase, Schedule


def cosine(epoch, epochs, learning_rate, warmup_epochs=0.0, start=0.0, end=0.0) -> float:
    """Linear warm-up to `learning_rate`, then half a cosine down to `end` (Loshchilov & Hutter, arXiv 1608.03983)."""
    if epoch < warmup_epochs:
        return _warm_up(epoch, warmup_epochs, start, learning_rate)
    progress = min((epoch - warmup_epochs) / (epochs - warmup_epochs), 1.0)
    return end + (learning_rate - end) * 0.5 * (1.0 + math.cos(math.pi * progress))


def polynomial(epoch, epochs, learning_rate, warmup_epochs=0.0, start=0.0, end=0.0, power=2.0) -> float:
    """Linear warm-up to `learning_rate`, then (1 - progress)^power down to `end` (MLPerf's reference with power 2)."""
    if epoch < warmup_epochs:
        return _warm_up(epoch, warmup_epochs, start, learning_rate)
    progress = min((epoch - warmup_epochs) / (epochs - warmup_epochs), 1.0)
    return end + (learning_rate - end) * (1.0 - progress) ** power


def goyal(epoch, global_batch, learning_rate=0.1, warmup_epochs=5.0, boundaries=(30.0, 60.0, 80.0), factor=0.1) -> float:
    """Linear scaling rule with gradual warm-up and steps (Goyal et al., arXiv 1706.02677, sections 2.1, 2.2 and 5.1).

    The rate is learning_rate * global_batch / 256, reached linearly from `learning_rate` over the warm-up, and multiplied
    by `factor` at each of `boundaries` (epochs).
    """
    peak = learning_rate * global_batch / 256
    if epoch < warmup_epochs:
        return _warm_up(epoch, warmup_epochs, learning_rate, peak)
    return peak * factor ** sum(epoch >= boundary for boundary in boundaries)


def sony_a(epoch, epochs=90.0, warmup_epochs=34.0, learning_rate=34.0, start=1e-5, end=1e-4) -> float:
    """Configuration A of Mikami et al. (arXiv 1811.05233, section 3.1, from TensorFlow's TPU repository): `polynomial`."""
    return polynomial(epoch, epochs, learning_rate, warmup_epochs, start, end, power=2.0)


def sony_b(
    epoch, epochs=90.0, warmup_epochs=5.0, learning_rate=29.0, start=0.2, power=2.0, boundaries=(30.0,), factor=50 / 29
) -> float:
    """Configuration B of Mikami et al. (arXiv 1811.05233, section 3.1), with its two jumps.

    Linear warm-up from `start`, then learning_rate * (1 - epoch / epochs)^power, counted from epoch 0 (so that the rate drops
    where the warm-up ends), multiplied by `factor` from each of `boundaries` on (29 becomes 50 at epoch 30). Without
    boundaries it is the schedule of the paper's Reference.
    """
    if epoch < warmup_epochs:
        return _warm_up(epoch, warmup_epochs, start, learning_rate)
    peak = learning_rate * factor ** sum(epoch >= boundary for boundary in boundaries)
    return peak * max(0.0, 1.0 - epoch / epochs) ** power


def momentum(rule: str, base: float, global_batch: int, reference_batch: int) -> float:
    """The momentum of a batch phase; `base` is that of the reference batch.

    noise_scale: learning rate / (batch * (1 - momentum)) stays what it is at the reference batch (Smith & Le, arXiv
    1710.06451), so 1 - momentum shrinks as the batch grows. as_printed: the formula as Mikami et al. print it (section 2.1), in
    which 1 - momentum grows with the batch; it is negative where the batch exceeds reference / (1 - base). constant: `base`.
    """
    ratio = {"constant": 1.0, "noise_scale": reference_batch / global_batch, "as_printed": global_batch / reference_batch}
    return 1.0 - (1.0 - base) * ratio[rule] if rule != "constant" else base


def _warm_up(epoch, warmup_epochs, start, peak):
    return start + (peak - start) * epoch / warmup_epochs


def learning_rate(schedule: Schedule, epochs: float, epoch: float, global_batch: int) -> float:
    """The rate that a config's schedule gives at `epoch` of a run of `epochs`, with this global batch."""
    s = schedule
    if s.name == "goyal":
        return goyal(epoch, global_batch, s.learning_rate, s.warmup_epochs, s.boundaries, s.factor)
    if s.name == "sony_b":
        return sony_b(epoch, epochs, s.warmup_epochs, s.learning_rate, s.start, s.power, s.boundaries, s.factor)
    if s.name in ("polynomial", "sony_a"):
        return polynomial(epoch, epochs, s.learning_rate, s.warmup_epochs, s.start, s.end, s.power)
    return cosine(epoch, epochs, s.learning_rate, s.warmup_epochs, s.start, s.end)


def samples_until(epoch: float, examples: int) -> int:
    """The first whole number of samples at or past `epoch`; the decimal that was written counts, not its binary rounding."""
    return math.ceil(Fraction(str(epoch)) * examples)


def phase_steps(phases: tuple[Phase, ...], epochs: float, examples: int) -> list[tuple[int, int]]:
    """(first sample, steps) of every phase.

    A phase begins at the first step whose samples seen reach the end of the phase before it; no step is cut, so a phase
    may run past its end by less than one step, and one that lies wholly inside such an overrun has no step.
    """
    seen, result = 0, []
    for phase in phases:
        end = samples_until(epochs if phase.until_epoch is None else phase.until_epoch, examples)
        steps = max(0, -(-(end - seen) // phase.global_batch))
        result.append((seen, steps))
        seen += steps * phase.global_batch
    return result
