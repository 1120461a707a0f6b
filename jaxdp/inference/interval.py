"""Confidence interval of a share."""

import math
from statistics import NormalDist


def wilson_interval(successes: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """(lower, upper) bound of the probability of success, by Wilson's score interval, which also holds near 0 and 1.

    total: at least 1. Wilson, "Probable inference, the law of succession, and statistical inference", J. Am. Stat. Assoc. 22
    (1927); compared with others in Brown, Cai & DasGupta, "Interval estimation for a binomial proportion", Stat. Sci. 16.
    """
    z2 = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    failures = total - successes
    center = (successes + z2 / 2) / (total + z2)
    half = math.sqrt(z2 * (successes * failures / total + z2 / 4)) / (total + z2)
    return (max(0.0, center - half) if successes else 0.0), (min(1.0, center + half) if failures else 1.0)
