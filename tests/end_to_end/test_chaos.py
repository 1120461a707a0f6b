"""A short form of benchmarks/chaos.py."""

import importlib
from pathlib import Path

import pytest
from helpers.processes import LONG, ONE_PHASE


@pytest.mark.slow
def test_a_run_of_three_processes_interrupted_at_a_random_point_equals_an_uninterrupted_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    chaos = importlib.import_module("chaos")
    sizes = ["--mesh.cpu-devices", "2", "--batch.0.global-batch", "12"]
    monkeypatch.setattr(chaos, "TRAINING", [*ONE_PHASE, *LONG, *sizes, "--checkpoint.every-epochs", "0.78"])
    monkeypatch.setattr(chaos, "EPOCH", 64)
    uninterrupted = chaos.train_to_the_end(tmp_path / "uninterrupted", 3)
    interruptions, outcome = chaos.interrupted_run(tmp_path, 0, seed=2, processes=3, kills=1)
    assert all(hit["as expected"] for hit in interruptions)
    assert outcome == uninterrupted
