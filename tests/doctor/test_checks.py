"""Checks of `jaxdp doctor`: CUDA with a fake nvidia-smi, variables, the recipe's images, and the command as a whole."""

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import jaxdp
from jaxdp.cli import main
from jaxdp.config import Config, Data, Model
from jaxdp.doctor import checks
from jaxdp.doctor.checks import CheckResult, output_of

ROOT = Path(__file__).parents[2]


def run_check(check, *args, **kwargs) -> CheckResult:
    """The result of one check."""
    result = CheckResult("check")
    check(result, *args, **kwargs)
    return result


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """nvidia_smi(script): put a fake nvidia-smi on the PATH."""

    def make(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    return make


@pytest.fixture
def gpu_machine(monkeypatch):
    """gpu_machine(gpu_present, plugins): set what this machine seems to have; JAX is 0.10.2."""

    def make(gpu_present, plugins):
        monkeypatch.setattr(checks, "nvidia_gpu_present", lambda: gpu_present)
        monkeypatch.setattr(checks, "installed_plugins", lambda: plugins)
        monkeypatch.setattr(checks, "installed_version", {"jax": "0.10.2"}.get)

    return make


def test_output_of_a_hanging_or_failing_command_is_an_error_of_one_line(nvidia_smi):
    nvidia_smi("exec sleep 30")
    with pytest.raises(OSError, match=r"^nvidia-smi: no answer in 0\.2 s$"):
        output_of(["nvidia-smi"], 0.2)
    nvidia_smi("echo one; echo the driver is gone >&2; exit 9")
    with pytest.raises(OSError, match=r"^nvidia-smi failed with exit code 9: the driver is gone$"):
        output_of(["nvidia-smi"], 5)


H200 = "echo 'NVIDIA H200, {driver}, 143771, {used}'"


@pytest.mark.parametrize(
    ("script", "gpu_present", "plugins", "status", "message"),
    [
        (H200.format(driver="580.65.06", used=3), True, {"13": "0.10.2"}, "ok", "1 x NVIDIA H200, driver 580.65.06; plugin"),
        (H200.format(driver="550.54.15", used=3), True, {"13": "0.10.2"}, "error", "CUDA 13 needs driver 580 or newer"),
        (H200.format(driver="550.54.15", used=3), True, {"12": "0.10.2"}, "ok", "driver 550.54.15"),
        (H200.format(driver="580.65.06", used=90000), True, {"13": "0.10.2"}, "warning", "63 % of GPU 0's memory is in use"),
        (H200.format(driver="580.65.06", used=3), True, {"13": "0.9.0"}, "error", "plugin 0.9.0 does not match jax 0.10.2"),
        (H200.format(driver="580.65.06", used=3), True, {}, "error", "the GPU cannot be used without a plugin"),
        ("exit 9", True, {"13": "0.10.2"}, "error", "nvidia-smi failed with exit code 9: no output"),
        ("exit 9", False, {}, "warning", "nvidia-smi failed with exit code 9"),
        ("true", False, {}, "warning", "nvidia-smi lists no GPU"),
    ],
)
def test_check_cuda_compares_driver_plugin_and_devices(nvidia_smi, gpu_machine, script, gpu_present, plugins, status, message):
    nvidia_smi(script)
    gpu_machine(gpu_present, plugins)
    result = run_check(checks.check_cuda)
    assert (result.status, bool(result.fix)) == (status, status != "ok")
    assert message in result.message


def test_check_variables_lists_them_and_warns_of_those_that_slow_nccl(monkeypatch, gpu_machine):
    gpu_machine(False, {})  # OpenCV sets LD_LIBRARY_PATH for processes that it starts, which matters with a plugin
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert "NCCL_DEBUG=INFO" in run_check(checks.check_variables).message
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert run_check(checks.check_variables).fix == "unset NCCL_P2P_DISABLE unless it works around a fault"


def test_check_images_decodes_every_image_and_lists_those_that_cannot_be_used(tmp_path, monkeypatch):
    from jaxdp.bench.input import make_images

    for split in ("train", "val"):
        make_images(tmp_path / split, 4, height=50, width=50)
    (tmp_path / "train/class0/00002.jpg").write_bytes(b"\xff\xd8 no picture")
    (tmp_path / "train/class1/00003.jpg").write_bytes(b"")
    lines = []

    def check(on_bad_image):
        config = Config(data=Data(source="folder", directory=str(tmp_path), on_bad_image=on_bad_image))
        return run_check(partial(checks.check_images, info=lines.append), config)

    result = check("stop")
    assert (result.status, result.message.count("00002.jpg")) == ("error", 1)
    assert result.message.startswith("2 of 4 images of train cannot be used: ")
    assert result.message.endswith("; 4 images of val decoded")
    assert "--data.on-bad-image skip" in result.fix
    assert lines == ["decoding 4 images of train ...", "decoding 4 images of val ..."]
    monkeypatch.setattr(checks, "LISTED", 1)
    result = check("skip")
    assert (result.status, "and 1 more" in result.message) == ("warning", True)


class Items:
    """Ten items; a label that is none in the second."""

    classes = 2

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"image": self.first if index == 0 else np.zeros((8, 8), np.uint8), "label": 5 if index == 1 else 0}


def test_items_that_are_dicts_are_read_as_in_training():
    jaxdp.register_dataset("items", lambda data: (Items(b""), Items(b"")))
    config = Config(data=Data(source="items"), model=Model(classes=2))
    result = run_check(partial(checks.check_images, info=print), config)
    assert "image of train 1: the label 5 is not an integer" in result.message
    assert "1 of 10 images of train cannot be used: image of train 0 " in result.message


def test_doctor_with_a_jax_that_does_not_start_runs_the_other_checks(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")  # as after a crash of the driver
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert stopped.value.code == 1
    found = {check["check"]: check for check in report["checks"]}
    assert found["devices"]["status"] == "error"
    assert "JAX does not start" in found["devices"]["message"]
    assert "Python" in found["versions"]["message"]
    assert report["error"] == sum(check["status"] == "error" for check in report["checks"]) >= 1
    assert all(check["fix"] for check in report["checks"] if check["status"] != "ok")


def test_doctor_checks_images_although_the_number_of_classes_is_unknown(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit):
        main.main(["doctor", "--json", "--check-images", "--data.source", "folder", "--data.directory", str(tmp_path)])
    found = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["images"]["status"] == "error"


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


def test_result_with_several_messages_keeps_the_worst_status():
    result = CheckResult("disk")
    result.ok("10 GiB free")
    result.error("full", "free space")
    result.warning("slow", "use another disk")
    assert (result.status, result.message) == ("error", "10 GiB free; full; slow")
    assert result.fix == "free space; use another disk"


def test_run_concurrently_with_a_raising_and_a_hanging_check_returns_every_result():
    until = threading.Event()

    def raising(result):
        raise RuntimeError("no such device\nand more")

    working = {"raising": raising, "hanging": lambda result: until.wait(), "working": lambda result: result.ok("fine")}
    raised, hung, worked = checks.run_concurrently(working, 1.0)
    assert checks.any_running()
    until.set()
    assert (raised.status, raised.message) == ("warning", "check failed: RuntimeError: no such device")
    assert (hung.status, hung.message) == ("error", "no answer in 1 s")
    assert (worked.status, worked.message, worked.fix) == ("ok", "fine", None)


def test_summaries_name_the_checks_with_problems():
    disk, data, cores = CheckResult("disk"), CheckResult("data"), CheckResult("cores")
    disk.error("full", "free space")
    data.error("missing", "download it")
    cores.warning("few", "use more")
    results = [disk, data, cores]
    assert checks.summarize(results) == "2 errors: disk, data; 1 warning: cores"
    report = checks.to_dict(results, "digits")
    assert (report["recipe"], report["ok"], report["warning"], report["error"]) == ("digits", 0, 1, 2)
    assert report["checks"][0] == {"check": "disk", "status": "error", "message": "full", "fix": "free space"}
