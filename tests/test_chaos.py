"""A short form of benchmarks/chaos.py: killed wherever, a run ends as if it had not been."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "benchmarks/chaos.py"
spec = importlib.util.spec_from_file_location("chaos", PATH)
chaos = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chaos)


@pytest.mark.slow
def test_runs_that_are_killed_end_bit_by_bit_like_one_left_alone(tmp_path):
    alone = chaos.to_the_end(tmp_path / "alone")
    record = {"runs": 2, "equal": 0, "interruptions": []}
    for number in range(2):
        done, left = chaos.run(tmp_path, number, seed=1, kills=2)
        record["interruptions"].append(done)
        record["equal"] += left == alone
    print(chaos.table(record))
    assert record["equal"] == 2
