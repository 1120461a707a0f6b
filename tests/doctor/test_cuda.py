"""Checks of CUDA, with a fake nvidia-smi, and of variables."""

import pytest
from helpers.doctor import run_check

from jaxdp.doctor import cuda
from jaxdp.doctor.check_result import output_of


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
        monkeypatch.setattr(cuda, "nvidia_gpu_present", lambda: gpu_present)
        monkeypatch.setattr(cuda, "installed_plugins", lambda: plugins)
        monkeypatch.setattr(cuda, "installed_version", {"jax": "0.10.2"}.get)

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
    result = run_check(cuda.check_cuda)
    assert (result.status, bool(result.fix)) == (status, status != "ok")
    assert message in result.message


def test_check_variables_lists_them_and_warns_of_those_that_slow_nccl(monkeypatch, gpu_machine):
    gpu_machine(False, {})  # OpenCV sets LD_LIBRARY_PATH for processes that it starts, which matters with a plugin
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert "NCCL_DEBUG=INFO" in run_check(cuda.check_variables).message
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert run_check(cuda.check_variables).fix == "unset NCCL_P2P_DISABLE unless it works around a fault"
