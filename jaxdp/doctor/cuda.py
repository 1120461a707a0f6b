"""Checks of CUDA, NCCL and the environment variables that configure them."""

import os
import re
import shutil
from pathlib import Path

from jaxdp.distributed.runtime import nvidia_gpu_present
from jaxdp.doctor.check_result import ResultBuilder, output_of
from jaxdp.doctor.packages import installed_version
from jaxdp.xla import jax_options

OLDEST_DRIVERS = {"12": 525, "13": 580}  # by CUDA's major version, from JAX's installation page
NVIDIA_SMI_SECONDS = 20.0
BUSY_SHARE = 0.1  # of a GPU's memory, in use before a run starts
CONFIGURING_VARIABLES = re.compile(r"(JAX|XLA|CUDA|LIBTPU)_.*")
SLOW_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


def installed_plugins() -> dict[str, str]:
    """Version of JAX's CUDA plugin by CUDA's major version."""
    versions = {major: installed_version(f"jax-cuda{major}-plugin") for major in OLDEST_DRIVERS}
    return {major: version for major, version in versions.items() if version}


def check_cuda(result: ResultBuilder, devices: list[dict]) -> None:
    """Driver, plugin and JAX match, and JAX uses the GPUs of this machine. devices: of `jax_probe.Probe`."""
    gpu_present, plugins = nvidia_gpu_present(), installed_plugins()
    _check_driver(result, gpu_present, plugins)
    names = ", ".join(f"jax-cuda{major}-plugin {version}" for major, version in plugins.items())
    result.ok(f"plugin {names}" if plugins else "no CUDA plugin of JAX")
    jax = installed_version("jax")
    for major, version in plugins.items():
        if jax and version != jax:
            result.error(f"plugin {version} does not match jax {jax}", f"pip install -U 'jax[cuda{major}]=={jax}'")
    if gpu_present and not plugins:
        result.error(
            "the GPU cannot be used without a plugin", "pip install -e '.[cuda13]', or '.[cuda12]' for an older driver"
        )
    elif gpu_present and not any(device["platform"] in ("gpu", "cuda") for device in devices):
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if "cpu" in platforms.split(","):
            result.warning(f"JAX_PLATFORMS={platforms} excludes the GPU", "unset JAX_PLATFORMS to train on it")
        else:
            result.error("JAX does not see the GPU", "run `python -c 'import jax; jax.devices()'` for the reason")


def _check_driver(result: ResultBuilder, gpu_present: bool, plugins: dict[str, str]) -> None:
    if shutil.which("nvidia-smi") is None:
        if gpu_present:
            result.warning("nvidia-smi not found, although a GPU is present", "add nvidia-smi to the PATH")
        else:
            result.ok("no NVIDIA GPU and no nvidia-smi")
        return
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        lines = output_of(command, NVIDIA_SMI_SECONDS).splitlines()
        gpus = [
            (name, driver, float(total), float(used))
            for name, driver, total, used in (re.split(r"\s*,\s*", line.strip()) for line in lines)
        ]
    except (OSError, ValueError) as error:
        if gpu_present:
            result.error(str(error), "repair the driver: nvidia-smi must list the GPUs")
        else:
            result.warning(str(error), "harmless on a machine without GPUs")
        return
    if not gpus:
        result.warning("nvidia-smi lists no GPU", "give this machine or container its GPUs, e.g. docker run --gpus all")
        return
    name, driver, _, _ = gpus[0]
    result.ok(f"{len(gpus)} x {name}, driver {driver}")
    for major in plugins:
        if int(driver.split(".")[0]) < OLDEST_DRIVERS[major] and len(plugins) == 1:
            result.error(
                f"CUDA {major} needs driver {OLDEST_DRIVERS[major]} or newer",
                "update the driver" + (", or install the extra cuda12" if major == "13" else ""),
            )
    busy = [
        f"GPU {i} has {used / 1024:.1f} GiB in use" for i, (*_, total, used) in enumerate(gpus) if used > BUSY_SHARE * total
    ]
    if busy:
        result.warning(", ".join(busy), "end the processes that nvidia-smi lists before a run")


def check_nccl(result: ResultBuilder, devices: list[dict]) -> None:
    """NCCL is installed if there are several GPUs, and no variable disables its fast transports."""
    packages = {name: installed_version(name) for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13")}
    versions = [f"{name} {version}" for name, version in packages.items() if version]
    several_gpus = sum(device["platform"] in ("gpu", "cuda") for device in devices) > 1
    if versions or not several_gpus:
        result.ok(", ".join(versions) or "not installed; only needed for several GPUs")
    else:
        result.warning("not installed as a package", "pip install -e '.[cuda13]', unless the system has NCCL")
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    if variables:
        result.ok("set: " + ", ".join(f"{name}={value}" for name, value in variables.items()))
    else:
        result.ok("no NCCL_* variable is set")
    for name in SLOW_VARIABLES:
        if variables.get(name, "0") not in ("", "0"):
            result.warning(f"{name} disables a fast transport", f"unset {name} unless it works around a fault")


def check_variables(result: ResultBuilder) -> None:
    """List the variables that configure JAX, XLA and CUDA, and options of JAX that have no effect on a run.

    Warns of an LD_LIBRARY_PATH that may hide the plugin's CUDA.
    """
    variables = {name: value for name, value in sorted(os.environ.items()) if CONFIGURING_VARIABLES.fullmatch(name)}
    result.ok(", ".join(f"{name}={value}" for name, value in variables.items()) or "none is set")
    if without_effect := jax_options.set_aside():
        result.ok(jax_options.describe(without_effect))
    initial = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")  # before libraries changed it
    path = next((entry for entry in initial if entry.startswith("LD_LIBRARY_PATH=") and not entry.endswith("=")), None)
    if path and installed_plugins():
        result.warning(path, "unset LD_LIBRARY_PATH unless JAX finds its GPUs: it may load another CUDA than the plugin's")
