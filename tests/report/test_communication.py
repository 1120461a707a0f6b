"""Measurement of exposed communication for a finished run."""

import dataclasses
import json

import pytest
from helpers.report import write_result, write_run

from jaxdp import train
from jaxdp.config import Phase
from jaxdp.errors import ConfigError
from jaxdp.report.communication import measure_communication
from jaxdp.report.run_history import read


@pytest.mark.slow
def test_measure_communication_times_the_step_of_every_phase_with_and_without_reductions(tiny, tmp_path):
    config = dataclasses.replace(tiny, epochs=2.0, batch=(Phase(16, until_epoch=1.0), Phase(32)))
    result = train(config, tmp_path)
    progress = []
    measure_communication(read(tmp_path, "run"), info=progress.append)
    assert [line.partition(":")[0] for line in progress] == ["run, phase 0", "run, phase 1"]
    phases = json.loads((tmp_path / "communication.json").read_text())["phases"]
    assert sum(phase["steps"] for phase in phases) == result.steps
    assert [phase["global_batch"] for phase in phases] == [16, 32]
    assert all(phase["mesh"] == list(result.mesh) and phase["strategy"] == "torus" for phase in phases)
    assert all(min(phase["step_seconds"], phase["without_reduction_seconds"]) > 0 for phase in phases)
    assert read(tmp_path).exposed_share() is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "is not finished"),
        ({"devices": 64, "mesh": (8, 8)}, "had 64 x cpu, mesh 8x8, but this machine has 4 x cpu, mesh 2x2"),
        ({"processes": 2}, "has 2 processes"),
    ],
)
def test_measure_communication_of_another_machine_or_an_unfinished_run_is_refused(tiny, tmp_path, changes, reason):
    run = write_run(tmp_path, mesh=tiny.mesh)
    if changes is not None:
        write_result(run, **changes)
    with pytest.raises(ConfigError) as error:
        measure_communication(read(run))
    assert (error.value.field, error.value.reason) == ("--communication", f"the run {str(run)!r} {reason}")
    assert not (run / "communication.json").exists()
