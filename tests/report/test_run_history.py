"""Runs read from their directories, and the parts of their wall time."""

import json

import pytest
from helpers.report import write_result, write_run

from jaxdp.errors import ConfigError
from jaxdp.report.run_history import read, read_all


def test_read_all_with_equal_directory_names_labels_runs_by_their_paths(tmp_path):
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "run")
    runs = read_all([tmp_path / "x/run", tmp_path / "y/run"])
    assert [run.label for run in runs] == [str(tmp_path / "x/run"), str(tmp_path / "y/run")]


def test_seconds_of_a_finished_run_add_up_to_its_wall_time(tmp_path):
    run = write_run(tmp_path)
    assert read(run).seconds() == {}
    write_result(run)
    seconds = {"input": 1.5, "steps": 8.5, "evaluation": 3.0, "saving": 0.5, "compilation": 4.0, "rest": 2.5}
    assert read(run).seconds() == seconds | {"exposed": None}


def test_exposed_share_is_weighted_by_the_steps_of_the_phases(tmp_path):
    """10 steps of 30 ms, 20 ms without reductions; 20 steps of 50 ms, 45 ms without."""
    run = write_run(tmp_path)
    write_result(run)
    phases = [
        {"steps": 10, "step_seconds": 0.03, "without_reduction_seconds": 0.02},
        {"steps": 20, "step_seconds": 0.05, "without_reduction_seconds": 0.045},
    ]
    config = json.loads((run / "config.json").read_text())
    (run / "communication.json").write_text(json.dumps({"config": config, "phases": phases}))
    seconds = read(run).seconds()
    assert (seconds["exposed"], seconds["steps"]) == pytest.approx((8.5 * 0.2 / 1.3, 8.5 * 1.1 / 1.3))
    assert sum(seconds.values()) == pytest.approx(20.0)
    for damaged in ({"config": {}, "phases": phases}, {"phases": phases}, {"config": config, "phases": 3}, [], 7):
        (run / "communication.json").write_text(json.dumps(damaged))
        assert read(run).seconds()["exposed"] is None
    write_result(run, devices=1, mesh=(1, 1))
    assert read(run).seconds()["exposed"] == 0.0


def test_read_with_a_damaged_result_raises_an_error_that_names_it(tmp_path):
    (write_run(tmp_path) / "result.json").write_text('{"accuracy": 1}')
    with pytest.raises(ConfigError, match=r"result\.json"):
        read(tmp_path)
