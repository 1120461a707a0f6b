"""`jaxdp doctor` as a whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdp.cli import main

ROOT = Path(__file__).parents[2]


def test_doctor_with_a_jax_that_does_not_start_runs_the_other_checks(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")  # as after a crash of the driver in the probe
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert stopped.value.code == 1
    checks = {check["check"]: check for check in report["checks"]}
    assert checks["devices"]["status"] == "error"
    assert "JAX does not start" in checks["devices"]["message"]
    assert checks["python"]["status"] == "ok"
    assert report["error"] == sum(check["status"] == "error" for check in report["checks"]) >= 1
    assert all(check["fix"] for check in report["checks"] if check["status"] != "ok")


@pytest.mark.slow
def test_doctor_without_a_home_directory_reports_the_problems_of_the_recipe(tmp_path):
    environment = os.environ | {"HOME": "/proc/none", "XDG_CACHE_HOME": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    flags = ["--mesh.cpu-devices", "2", "--batch.0.global-batch", "2000"]
    command = [sys.executable, "-m", "jaxdp", "doctor", *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = " ".join(done.stdout.split())
    assert "ok devices 2 x cpu (cpu)" in lines
    assert "error plan batch.0.global_batch" in lines
    assert "1437" in lines
    assert "warning cache /proc/none/.cache/jaxdp/programs/" in lines
    assert done.stdout.splitlines()[0] == "checks for the recipe digits"
    assert done.stdout.splitlines()[-1].startswith("1 error: plan")
    assert "\x1b" not in done.stdout
    assert "Traceback" not in done.stderr
