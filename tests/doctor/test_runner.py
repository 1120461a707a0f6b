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
    monkeypatch.setattr(sys, "executable", "/bin/false")  # as after a crash of the driver
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert stopped.value.code == 1
    checks = {check["check"]: check for check in report["checks"]}
    assert checks["devices"]["status"] == "error"
    assert "JAX does not start" in checks["devices"]["message"]
    assert "Python" in checks["versions"]["message"]
    assert report["error"] == sum(check["status"] == "error" for check in report["checks"]) >= 1
    assert all(check["fix"] for check in report["checks"] if check["status"] != "ok")


def test_doctor_checks_images_although_the_number_of_classes_is_unknown(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit):
        main.main(["doctor", "--json", "--check-images", "--data.source", "folder", "--data.directory", str(tmp_path)])
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["images"]["status"] == "error"


@pytest.mark.slow
def test_doctor_starts_jax_and_reports_its_devices(tmp_path):
    environment = os.environ | {"HOME": "/proc/none", "XDG_CACHE_HOME": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "jaxdp", "doctor", "--mesh.cpu-devices", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "ok devices 2 x cpu (cpu)" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[0] == "checks for the recipe digits"
    assert "\x1b" not in done.stdout
    assert "Traceback" not in done.stderr
