import jax
import pytest

from jaxdp.config import ConfigError, Mesh
from jaxdp.parallel import distributed


def test_a_gpu_that_jax_does_not_see_is_an_error_unless_the_cpu_is_asked_for(monkeypatch):
    monkeypatch.setattr(distributed, "nvidia_gpu_present", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ConfigError, match="an NVIDIA GPU that JAX does not see: install jaxdp with its extra cuda"):
        distributed.start(Mesh(cpu_devices=4))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert len(distributed.start(Mesh(cpu_devices=4))) == 4


def test_more_cpu_devices_than_jax_has_started_with_are_refused():
    with pytest.raises(ConfigError, match=r"mesh.cpu_devices: 9 is not allowed; JAX runs in this process with 8"):
        distributed.start(Mesh(cpu_devices=9))


def test_fewer_cpu_devices_are_the_first_ones():
    assert distributed.start(Mesh(cpu_devices=2)) == jax.devices()[:2]
    assert distributed.start(Mesh()) == jax.devices()[:1]


def test_what_gloo_gives_up_on_is_told_with_what_to_do():
    told = distributed.of_gloo(RuntimeError("UNKNOWN: Gloo ReduceScatter failed: Read timeout [127.0.0.1]:41870"))
    assert "waits for 30 s" in told
    assert "--reduce.strategy psum" in told
    assert distributed.of_gloo(RuntimeError("UNKNOWN: Gloo AllReduce failed: Connection closed by peer")) == ""
