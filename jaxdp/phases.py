"""Batch phases and intervals in epochs, as exact arithmetic on samples."""

import math
from fractions import Fraction
from functools import cache

from jaxdp.config import Phase


def interval_elapsed(every: float | None, *, unit: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` units of `unit` samples lies in (before, after]; False if `every` is None.

    The interval is exact for the decimal digits of `every`: 0.7 epochs of 50 samples are 35 samples.
    """
    if every is None:
        return False
    numerator, denominator = _interval(every, unit)
    return before * denominator // numerator < after * denominator // numerator


@cache
def _interval(every: float, unit: int) -> tuple[int, int]:
    """`every` units of `unit` samples, as (numerator, denominator)."""
    return (Fraction(str(every)) * unit).as_integer_ratio()


def samples_until(epoch: float, examples: int) -> int:
    """The first whole number of samples at or after `epoch`, which counts as the decimal that was written, without rounding."""
    return math.ceil(Fraction(str(epoch)) * examples)


def phase_steps(phases: tuple[Phase, ...], epochs: float, examples: int) -> list[tuple[int, int]]:
    """(first sample, number of steps) of every phase.

    A phase starts at the first step at which the samples seen reach the end of the previous phase. Steps are not split, so a
    phase may end up to one step late, and a phase inside that step has no steps.
    """
    seen, result = 0, []
    for phase in phases:
        end = samples_until(epochs if phase.until_epoch is None else phase.until_epoch, examples)
        steps = max(0, -(-(end - seen) // phase.global_batch))
        result.append((seen, steps))
        seen += steps * phase.global_batch
    return result
