"""CUDA, NCCL and the variables that steer them."""

import os
import re
import shutil
from pathlib import Path

from jaxdp.doctor.finding import Findings, output_of
from jaxdp.doctor.packages import installed
from jaxdp.parallel.distributed import nvidia_gpu_present

OLDEST_DRIVER = {"12": 525, "13": 580}  # by CUDA's major version, as JAX's installation page has it
SMI_SECONDS = 20.0
BUSY = 0.1  # of a GPU's memory, held before a run begins
STEERING = re.compile(r"(JAX|XLA|CUDA|LIBTPU)_.*")
SLOWING = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


def plugins() -> dict[str, str]:
    """CUDA's major version -> the version of JAX's plugin for it."""
    found = {major: installed(f"jax-cuda{major}-plugin") for major in OLDEST_DRIVER}
    return {major: one for major, one in found.items() if one}


def cuda(findings: Findings, devices: list[dict]) -> None:
    """Driver, plugin and whether JAX uses the GPUs that are there."""
    there, here = nvidia_gpu_present(), plugins()
    seen = [one for one in devices if one["platform"] in ("gpu", "cuda")]
    _driver(findings, there, here)
    told = ", ".join(f"jax-cuda{major}-plugin {one}" for major, one in here.items())
    findings.ok(f"plugin {told}" if here else "no CUDA plugin of JAX")
    jax = installed("jax")
    for major, one in here.items():
        if jax and one != jax:
            findings.wrong(f"the plugin {one} is not for jax {jax}", f"pip install -U 'jax[cuda{major}]=={jax}'")
    if there and not here:
        findings.wrong("a GPU is here and cannot be used", "pip install -e '.[cuda13]', or '.[cuda12]' for an older driver")
    elif there and not seen:
        asked = os.environ.get("JAX_PLATFORMS", "")
        if "cpu" in asked.split(","):
            findings.warn(f"a GPU is here and JAX_PLATFORMS={asked} leaves it out", "unset JAX_PLATFORMS to train on it")
        else:
            findings.wrong("a GPU is here and JAX does not see it", "see `python -c 'import jax; jax.devices()'` for why")


def _driver(findings: Findings, there: bool, here: dict[str, str]) -> None:
    if shutil.which("nvidia-smi") is None:
        if there:
            findings.warn("a GPU, and no nvidia-smi", "put nvidia-smi on the PATH, so that driver and GPUs can be told")
        else:
            findings.ok("no NVIDIA GPU and no nvidia-smi")
        return
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        rows = [[word.strip() for word in line.split(",")] for line in output_of(asked, SMI_SECONDS).splitlines()]
        gpus = [(name, driver, float(total), float(used)) for name, driver, total, used in rows]
    except (OSError, ValueError) as error:
        say = findings.wrong if there else findings.warn
        say(str(error), "mend the driver: nvidia-smi must list the GPUs" if there else "harmless where no GPU is meant to be")
        return
    if not gpus:
        findings.warn("nvidia-smi lists no GPU", "give this machine or container its GPUs, as by docker run --gpus all")
        return
    driver = gpus[0][1]
    findings.ok(f"{len(gpus)} x {gpus[0][0]}, driver {driver}")
    for major in here:
        if int(driver.split(".")[0]) < OLDEST_DRIVER[major] and len(here) == 1:
            findings.wrong(
                f"CUDA {major} wants a driver of {OLDEST_DRIVER[major]} or newer",
                "update the driver" + (", or install the extra cuda12" if major == "13" else ""),
            )
    busy = [number for number, (_, _, total, used) in enumerate(gpus) if used > BUSY * total]
    if busy:
        told = ", ".join(f"GPU {number} has {gpus[number][3] / 1024:.1f} GiB in use" for number in busy)
        findings.warn(told, "see by nvidia-smi whose processes hold the memory, and end them before a run")


def nccl(findings: Findings, devices: list[dict]) -> None:
    """The library by which GPUs exchange, and the variables that steer it."""
    found = [(name, installed(name)) for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13")]
    found = [f"{name} {one}" for name, one in found if one]
    several = sum(one["platform"] in ("gpu", "cuda") for one in devices) > 1
    if found or not several:
        findings.ok(", ".join(found) or "not installed; only GPUs need it")
    else:
        findings.warn("not installed as a package", "pip install -e '.[cuda13]' brings it, unless the system has one")
    values = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    findings.ok("set: " + ", ".join(f"{name}={value}" for name, value in values.items()) if values else "no NCCL_* is set")
    for name in SLOWING:
        if values.get(name, "0") not in ("", "0"):
            findings.warn(f"{name} takes a fast way out of use", f"unset {name} unless a fault asks for it")


def variables(findings: Findings) -> None:
    """What is set that changes how JAX and XLA work."""
    found = {name: value for name, value in sorted(os.environ.items()) if STEERING.fullmatch(name)}
    findings.ok(", ".join(f"{name}={value}" for name, value in found.items()) or "none is set")
    begun = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")  # libraries have changed it since
    path = next((one for one in begun if one.startswith("LD_LIBRARY_PATH=") and not one.endswith("=")), None)
    if path and plugins():
        findings.warn(path, "unset LD_LIBRARY_PATH unless JAX finds its GPUs: it may bring in another CUDA than the plugin's")
