"""Result of one proof: a measured difference, compared with a tolerance."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np

from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import first_line

T = TypeVar("T")


@dataclass(frozen=True)
class Proof:
    """Result of a proof. comparison: what was compared with what. error: exception that prevented the comparison."""

    name: str
    comparison: str
    difference: float | None
    tolerance: float
    passed: bool
    seconds: float
    error: str | None = None

    @property
    def outcome(self) -> str:
        return "passed" if self.passed else "FAILED"

    def to_dict(self) -> dict:
        """For JSON, which has no infinity and no NaN: null."""
        finite = self.difference is not None and math.isfinite(self.difference)
        return asdict(self) | {"difference": self.difference if finite else None, "outcome": self.outcome}

    def __str__(self) -> str:
        difference = "" if self.difference is None else f", difference {self.difference:.1e}"
        text = f"{self.name} ({self.comparison}): {self.outcome}{difference}, {self.tolerance:g} allowed, {self.seconds:.1f} s"
        return f"{text}; {self.error}" if self.error else text


def prove(
    name: str,
    comparison: str,
    *,
    tolerance: float,
    difference: Callable[[], float],
    group: ProcessGroup | None = None,
) -> Proof:
    """Prove that `difference()` is at most `tolerance`; an exception or a NaN fails the proof.

    group: the processes; all call this with the same name; the largest difference of any process counts.
    """
    start = time.perf_counter()
    value: float | None = None
    error: str | None = None
    try:
        value = float(difference())
    except Exception as exception:  # of a compiler, a driver, or jaxdp itself
        error = _describe(exception)
    if group is not None and group.num_processes > 1:
        value, error = worst(group.all_gather_object(f"the result of {name}", [value, error]))
    passed = value is not None and value <= tolerance
    return Proof(name, comparison, value, tolerance, passed, time.perf_counter() - start, error)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def worst(results: list) -> tuple[float | None, str | None]:
    """The worst (difference, error) of all ranks: an error, else a NaN, else the largest difference."""
    for rank, (difference, error) in enumerate(results):
        if difference is None:
            return None, f"rank {rank}: {error}"
    return max((difference for difference, _ in results), key=lambda value: (math.isnan(value), value)), None


def build_on_all_ranks(group: ProcessGroup, name: str, build: Callable[[], T]) -> T:
    """Return `build()` after it succeeded on all processes, so that no process waits in a collective for one that failed.

    Raises RuntimeError on all processes, with the rank and the error, if it fails on one.
    """
    if group.num_processes == 1:
        return build()
    error = None
    try:
        built = build()
    except Exception as exception:  # of a compiler or a driver
        error = _describe(exception)
    for rank, reason in enumerate(group.all_gather_object(f"the program of {name}", error)):
        if reason is not None:
            raise RuntimeError(f"rank {rank}: {reason}")
    return built


def largest_difference(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest absolute difference of two dicts of arrays: 0 only if all bits are equal, infinity if names or shapes differ."""
    if actual.keys() != expected.keys() or any(actual[name].shape != expected[name].shape for name in actual):
        return float("inf")
    largest = 0.0
    for name, value in actual.items():
        if value.tobytes() != expected[name].tobytes():
            difference = np.abs(value.astype(np.float64) - expected[name].astype(np.float64)).max()
            smallest = np.finfo(np.float64).tiny  # for different bits of equal numbers, such as -0 and 0
            largest = max(largest, float("inf") if np.isnan(difference) else float(difference), smallest)
    return largest
