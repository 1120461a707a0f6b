"""What a proof has compared, and what came of it."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from jaxdp.errors import first_line


@dataclass(frozen=True)
class Proof:
    """difference, allowed: None where nothing is compared; passed: None where something is only measured; reason: of a failure
    that is no difference."""

    proof: str
    compared: str
    difference: float | None
    allowed: float | None
    passed: bool | None
    seconds: float
    reason: str | None = None

    @property
    def verdict(self) -> str:
        return {None: "measured", True: "passed", False: "FAILED"}[self.passed]

    def as_dict(self) -> dict:
        return asdict(self)


def proven(name: str, compared: str, allowed: float, difference_of: Callable[[], float]) -> Proof:
    """The proof that `difference_of()` is at most `allowed`; that it raises is a failure of the proof, not of the report."""
    began = time.perf_counter()
    try:
        difference, reason = float(difference_of()), None
    except Exception as error:  # of a compiler, a driver, the program itself
        difference, reason = None, f"{type(error).__name__}: {first_line(error)}"
    passed = difference is not None and difference <= allowed  # not for a NaN
    return Proof(name, compared, difference, allowed, passed, time.perf_counter() - began, reason)


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Between two dicts of arrays: 0 only where every bit is the same, infinity where names or shapes differ."""
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        return float("inf")
    largest = 0.0
    for name, value in one.items():
        if value.tobytes() != other[name].tobytes():
            apart = np.abs(value.astype(np.float64) - other[name].astype(np.float64)).max()
            tiniest = np.finfo(np.float64).tiny  # bits that differ without a difference, as -0 and 0
            largest = max(largest, float("inf") if np.isnan(apart) else float(apart), tiniest)
    return largest
