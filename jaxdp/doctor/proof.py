"""Result of one proof: a measured difference, compared with a tolerance."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import first_line


@dataclass(frozen=True)
class Proof:
    """Result of a proof or of a measurement.

    comparison: what was compared with what. difference, tolerance: None for a measurement. passed: None for a measurement.
    error: exception that prevented the comparison.
    """

    name: str
    comparison: str
    difference: float | None
    tolerance: float | None
    passed: bool | None
    seconds: float
    error: str | None = None

    @property
    def outcome(self) -> str:
        return {None: "measured", True: "passed", False: "FAILED"}[self.passed]

    def to_dict(self) -> dict:
        return asdict(self) | {"outcome": self.outcome}


def prove(
    name: str,
    comparison: str,
    *,
    tolerance: float,
    difference: Callable[[], float],
    group: ProcessGroup | None = None,
) -> Proof:
    """Prove that `difference()` is at most `tolerance`; an exception or a NaN fails the proof.

    group: the processes, all of which call this with the same name; the largest difference of any process counts.
    """
    start = time.perf_counter()
    value: float | None = None
    error: str | None = None
    try:
        value = float(difference())
    except Exception as exception:  # of a compiler, a driver, or jaxdp itself
        error = f"{type(exception).__name__}: {first_line(exception)}"
    if group is not None and group.num_processes > 1:
        value, error = worst(group.all_gather_object(f"the result of {name}", [value, error]))
    passed = value is not None and value <= tolerance
    return Proof(name, comparison, value, tolerance, passed, time.perf_counter() - start, error)


def worst(results: list) -> tuple[float | None, str | None]:
    """The worst (difference, error) of all ranks: an error, else a NaN, else the largest difference."""
    for rank, (difference, error) in enumerate(results):
        if difference is None:
            return None, f"rank {rank}: {error}"
    return max((difference for difference, _ in results), key=lambda value: (math.isnan(value), value)), None


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
