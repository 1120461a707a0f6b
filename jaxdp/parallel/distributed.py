"""Bringing JAX up: how many devices, on which platform, and a clear end where it is not what the user paid for."""

import contextlib
import os
from pathlib import Path

from jaxdp.config import ConfigError
from jaxdp.config import Mesh as MeshConfig
from jaxdp.errors import first_line

# Virtual devices share the cores: one may reach a collective long after another, and XLA's default patience is 40 s.
CPU_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def nvidia_gpu_present() -> bool:
    """Whether this machine has an NVIDIA GPU with its driver, whatever JAX sees."""
    return Path("/dev/nvidia0").exists() or any(Path("/proc/driver/nvidia/gpus").glob("*"))


def start(config: MeshConfig):
    """The devices of a run, JAX being started if it was not: all accelerators, or a CPU split into `cpu_devices`.

    Raises ConfigError where the machine has an NVIDIA GPU that JAX does not see (unless JAX_PLATFORMS=cpu asks for that),
    where JAX's platform does not start, or where it already runs in this process with fewer CPU devices.
    """
    if CPU_PATIENCE.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CPU_PATIENCE}".strip()
    import jax

    wanted = config.cpu_devices or 1
    with contextlib.suppress(RuntimeError):  # JAX has started: the devices there are decide below
        jax.config.update("jax_num_cpu_devices", wanted)
    try:
        devices = jax.devices()
    except Exception as error:  # by platform and release: RuntimeError, AssertionError, JaxRuntimeError
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = first_line(error)
        raise ConfigError(
            f"JAX_PLATFORMS: {asked!r} is not allowed; that platform does not start here ({reason}); "
            "unset it, or set it to cpu to train on the CPU"
        ) from None
    if devices[0].platform != "cpu":
        return devices
    if nvidia_gpu_present() and "cpu" not in os.environ.get("JAX_PLATFORMS", "").split(","):
        raise ConfigError(
            "this machine has an NVIDIA GPU that JAX does not see: install jaxdp with its extra cuda12 or cuda13 "
            "(pip install -e '.[cuda13]'), or set JAX_PLATFORMS=cpu to train on the CPU"
        )
    if len(devices) < wanted:
        raise ConfigError(
            f"mesh.cpu_devices: {wanted} is not allowed; JAX runs in this process with {len(devices)} CPU "
            f"device{'s' * (len(devices) > 1)} already; start a new process (or restart the kernel)"
        )
    return devices[:wanted]


def describe(devices) -> str:
    """Number and kind of devices, for people."""
    return f"{len(devices)} x {devices[0].device_kind}"
