"""A short form of benchmarks/chaos.py."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks/chaos.py"
spec = importlib.util.spec_from_file_location("chaos", PATH)
chaos = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chaos)


@pytest.mark.slow
def test_runs_killed_at_random_points_equal_an_uninterrupted_run(tmp_path):
    uninterrupted = chaos.train_to_the_end(tmp_path / "uninterrupted", 2)
    record = {"runs": 2, "processes": 2, "equal": 0, "interruptions": []}
    for number in range(2):
        interruptions, outcome = chaos.interrupted_run(tmp_path, number, seed=1, processes=2, kills=2)
        record["interruptions"].append(interruptions)
        record["equal"] += outcome == uninterrupted
    print(chaos.table(record))
    assert record["equal"] == 2
