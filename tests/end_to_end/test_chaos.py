"""A short form of benchmarks/chaos.py."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks/chaos.py"
spec = importlib.util.spec_from_file_location("chaos", PATH)
chaos = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chaos)


@pytest.mark.slow
def test_a_run_of_two_processes_interrupted_at_random_points_equals_an_uninterrupted_run(tmp_path):
    uninterrupted = chaos.train_to_the_end(tmp_path / "uninterrupted", 2)
    interruptions, outcome = chaos.interrupted_run(tmp_path, 0, seed=1, processes=2, kills=3)
    print(interruptions)
    assert outcome == uninterrupted
