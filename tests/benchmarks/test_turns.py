"""Alternating timing of processes, with steps of known duration."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SLEEPING = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import turns
turns.serve(lambda: (lambda count: time.sleep(count * float(sys.argv[1])), {{"slept": sys.argv[1]}}))
"""
DYING = f"""
import os, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import turns
calls = iter(range(4))  # the first step, the warm-up, one to know how long it takes, the first round
turns.serve(lambda: (lambda count: os._exit(4) if next(calls, None) is None else print("of a library"), {{}}))
"""


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import turns

    return turns


def test_time_alternately_failed_contender_is_reported(turns):
    script = ["-c", SLEEPING]
    makers = {name: partial(turns.Contender, name, [*script, name]) for name in ("0.02", "0.2")}
    makers["broken"] = partial(turns.Contender, "broken", ["-c", "print('of a library'); raise SystemExit(3)"])
    makers["dying"] = partial(turns.Contender, "dying", ["-c", DYING])
    makers["hanging"] = partial(turns.Contender, "hanging", ["-c", "import time; time.sleep(10_000)"], start_seconds=0.5)
    kept = []
    rows, failed = turns.time_alternately(makers, 8, 3, 0.1, keep=lambda rows, failed: kept.append([*rows]))
    assert failed == {
        "broken": "broken answered 'of a library\\n'",
        "dying": "dying ended with 4",
        "hanging": "hanging did not answer within 0 s",
    }
    assert len(kept) == len(makers) + 3  # after each start and each round
    for name, row in rows.items():
        assert row["slept"] == name
        assert len(row["seconds"]) == 3
        assert min(row["seconds"]) >= float(name)  # of one step, however many were taken
        assert row["step_seconds"] == np.median(row["seconds"])
        assert row["images_per_second"] == 8 / row["step_seconds"]
    assert rows["0.02"]["steps_a_round"] >= rows["0.2"]["steps_a_round"] == 1


def test_ratio_compares_paired_rounds(turns):
    base = {"seconds": [1.0, 10.0, 1.0]}
    assert turns.ratio({"seconds": [0.5, 5.0, 0.5]}, base) == 2.0
    assert turns.ratio({"seconds": [0.5, 5.0, 2.0]}, base) == np.median([2.0, 2.0, 0.5])
