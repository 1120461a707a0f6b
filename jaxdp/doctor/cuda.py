"""Checks of CUDA and of the environment variables that configure it, NCCL and JAX."""

import os
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jaxdp.distributed.runtime import nvidia_gpu_present
from jaxdp.doctor.check_result import ResultBuilder, output_of
from jaxdp.xla import jax_options

OLDEST_DRIVERS = {"12": 525, "13": 580}  # by CUDA's major version, from JAX's installation page
NVIDIA_SMI_SECONDS = 20.0
BUSY_SHARE = 0.1  # of a GPU's memory, in use before a run starts
CONFIGURING_VARIABLES = re.compile(r"(JAX|XLA|CUDA|LIBTPU|NCCL)_.*")
SLOW_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


def installed_version(package: str) -> str | None:
    """Version of a package from its metadata, without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_plugins() -> dict[str, str]:
    """Version of JAX's CUDA plugin by CUDA's major version."""
    found = {major: installed_version(f"jax-cuda{major}-plugin") for major in OLDEST_DRIVERS}
    return {major: plugin for major, plugin in found.items() if plugin}


def check_cuda(result: ResultBuilder) -> None:
    """Driver, plugin and JAX match, and the GPUs are free."""
    gpu_present, plugins = nvidia_gpu_present(), installed_plugins()
    _check_driver(result, gpu_present, plugins)
    names = ", ".join(f"jax-cuda{major}-plugin {plugin}" for major, plugin in plugins.items())
    result.ok(f"plugin {names}" if plugins else "no CUDA plugin of JAX")
    jax = installed_version("jax")
    for major, plugin in plugins.items():
        if jax and plugin != jax:
            result.error(f"plugin {plugin} does not match jax {jax}", f"pip install -U 'jax[cuda{major}]=={jax}'")
    if gpu_present and not plugins:
        result.error("the GPU cannot be used without a plugin", "pip install jaxdp with its extra cuda13, or cuda12")


def _check_driver(result: ResultBuilder, gpu_present: bool, plugins: dict[str, str]) -> None:
    if shutil.which("nvidia-smi") is None:
        if gpu_present:
            result.warning("nvidia-smi not found, although a GPU is present", "add nvidia-smi to the PATH")
        else:
            result.ok("no NVIDIA GPU and no nvidia-smi")
        return
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        gpus = [re.split(r"\s*,\s*", line.strip()) for line in output_of(command, NVIDIA_SMI_SECONDS).splitlines()]
        used_shares = [float(used) / float(total) for _, _, total, used in gpus]
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
            fix = "update the driver" + (", or install the extra cuda12" if major == "13" else "")
            result.error(f"CUDA {major} needs driver {OLDEST_DRIVERS[major]} or newer", fix)
    busy = [f"{100 * share:.0f} % of GPU {i}'s memory is in use" for i, share in enumerate(used_shares) if share > BUSY_SHARE]
    if busy:
        result.warning(", ".join(busy), "end the processes that nvidia-smi lists before a run")


def check_variables(result: ResultBuilder) -> None:
    """List the variables that configure JAX, XLA, CUDA and NCCL, and options of JAX that have no effect on a run.

    Warns of variables that disable NCCL's fast transports, and of an LD_LIBRARY_PATH that may hide the plugin's CUDA.
    """
    variables = {name: value for name, value in sorted(os.environ.items()) if CONFIGURING_VARIABLES.fullmatch(name)}
    result.ok(", ".join(f"{name}={value}" for name, value in variables.items()) or "none is set")
    for name in SLOW_VARIABLES:
        if variables.get(name, "0") not in ("", "0"):
            result.warning(f"{name} disables a fast transport", f"unset {name} unless it works around a fault")
    if without_effect := jax_options.set_aside():
        result.ok(jax_options.describe(without_effect))
    initial = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")  # before libraries changed it
    path = next((entry for entry in initial if entry.startswith("LD_LIBRARY_PATH=") and not entry.endswith("=")), None)
    if path and installed_plugins():
        result.warning(path, "unset LD_LIBRARY_PATH unless JAX finds its GPUs: it may load another CUDA than the plugin's")
