from types import SimpleNamespace

import jax
import pytest

from jaxdp.config import Config, Mesh
from jaxdp.distributed import runtime
from jaxdp.distributed.preemption import StopTraining
from jaxdp.errors import ConfigError
from jaxdp.setup.prepare import prepare


def test_start_on_a_machine_with_a_gpu_that_jax_does_not_see_raises_unless_the_cpu_is_requested(monkeypatch):
    monkeypatch.setattr(runtime, "nvidia_gpu_present", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ConfigError) as error:
        runtime.start(Mesh(cpu_devices=4))
    assert error.value.reason == "JAX does not see this machine's NVIDIA GPU"
    assert error.value.hint.startswith("install jaxdp with its extra cuda")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert len(runtime.start(Mesh(cpu_devices=4))) == 4


def test_start_with_more_cpu_devices_than_jax_runs_with_raises():
    with pytest.raises(ConfigError) as error:
        runtime.start(Mesh(cpu_devices=9))
    assert (error.value.field, error.value.value) == ("mesh.cpu_devices", 9)
    assert error.value.reason == "JAX already runs in this process with 8 CPU devices"
    assert 'call jax.config.update("jax_num_cpu_devices", 9) before the first use of JAX' in error.value.hint
    assert error.value.hint.endswith("or set --mesh.cpu-devices 8")


def test_start_with_fewer_cpu_devices_returns_the_first_ones():
    assert runtime.start(Mesh(cpu_devices=2)) == jax.devices()[:2]
    assert runtime.start(Mesh()) == jax.devices()[:1]


def test_the_start_of_jax_in_a_run_of_several_processes_can_be_stopped():
    """It waits for the others in native code, where the main thread would handle no signal."""

    def stop(function, *arguments):
        raise StopTraining("SIGTERM")

    with pytest.raises(StopTraining):
        prepare(Config(), group=SimpleNamespace(num_processes=2), run=stop)
