"""The checks of `jaxdp doctor`: versions, devices, CUDA, variables, object storage and images; and their table."""

import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from jaxdp import __version__
from jaxdp.bench.environment import PACKAGES
from jaxdp.choices import SOURCES
from jaxdp.config import MAX_CLASSES, Config
from jaxdp.data.batch_sources import DataError, DecodedImages
from jaxdp.data.datasets import stated_classes
from jaxdp.data.sources import source_of
from jaxdp.distributed.runtime import nvidia_gpu_present
from jaxdp.doctor.check_result import Check, CheckResult, ResultBuilder, output_of, run_concurrently
from jaxdp.doctor.devices import check_devices
from jaxdp.errors import StorageError, plural
from jaxdp.xla import jax_options

TIMEOUT_SECONDS = 120.0  # of all checks together
COLORS = {"ok": "green", "warning": "yellow", "error": "red"}
OLDEST_DRIVERS = {"12": 525, "13": 580}  # by CUDA's major version, from JAX's installation page
NVIDIA_SMI_SECONDS = 20.0
BUSY_SHARE = 0.1  # of a GPU's memory, in use before a run starts
CONFIGURING_VARIABLES = re.compile(r"(JAX|XLA|CUDA|LIBTPU|NCCL)_.*")
SLOW_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
SLOW_REQUEST_SECONDS = 1.0
IMAGES_HINT = "replace or remove what cannot be read, or train with --data.on-bad-image skip"
IMAGES_AT_A_TIME, LISTED = 4096, 100


def run_checks(config: Config, url: str | None) -> list[CheckResult]:
    """Run every check and return the results in the order of the output. url: of a run in object storage."""
    checks: dict[str, Check] = {
        "versions": _check_versions,
        "devices": partial(check_devices, config=config),
        "cuda": check_cuda,
        "variables": check_variables,
    }
    if url is not None:
        checks["storage"] = partial(check_storage, url=url)
    return run_concurrently(checks, TIMEOUT_SECONDS)


def _check_versions(result: ResultBuilder) -> None:
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    result.ok(f"Python {platform.python_version()}, jaxdp {__version__}, {packages}")


def make_table(results: list[CheckResult]) -> Table:
    """Status, name and message of every check; below a warning or an error, its fix."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for result in results:
        table.add_row(Text(result.status, COLORS[result.status]), result.check, Text(result.message))
        if result.fix:
            table.add_row("", "", Text(f"fix: {result.fix}", "bold"))
    return table


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


def check_storage(result: ResultBuilder, url: str) -> None:
    """Objects can be written, read, listed and removed at the URL of a run, and created only once. Raises ConfigError."""
    from jaxdp.cloud.retry import open_patiently

    location, name, content = open_patiently(url, "--workdir"), f".doctor-{secrets.token_hex(4)}", b"x" * 1000
    began = time.monotonic()
    try:
        location.create(name, content)
        created_again = location.create(name, content)
        is_same = location.read(name) == content and name in location.top_sizes()
        location.remove([name])
    except StorageError as error:
        fix = "check the URL, the credentials and their permissions: reading, writing, listing, removing"
        result.error(str(error), fix)
        return
    seconds = (time.monotonic() - began) / 5
    message = f"{url} can be written and read, {1000 * seconds:.0f} ms a request"
    if not is_same:
        result.error(f"{url} does not return what was written", "use another URL")
    elif created_again:
        fix = "do not start two runs there at the same moment"
        result.warning(f"{message}; it does not support conditional writes", fix)
    elif seconds > SLOW_REQUEST_SECONDS:
        result.warning(message, "use a bucket in the region of this machine")
    else:
        result.ok(message)


def check_images(result: ResultBuilder, config: Config, info: Callable[[str], None]) -> None:
    """Decode every image of the training and the evaluation split with the threads of training.

    info: receives progress. Raises ConfigError or StorageError for a data set that cannot be opened.
    """
    if SOURCES[config.data.source].in_memory:
        return result.ok(f"{config.data.source}: no files needed")
    report = result.warning if config.data.on_bad_image == "skip" else result.error
    for name, split in source_of(config).splits(config):
        total = plural(len(split), "image", ",")
        info(f"decoding {total} of {name} ...")
        loader = DecodedImages(
            split,
            transform=lambda pixels, out, position: None,
            size=1,
            classes=stated_classes(split) or MAX_CLASSES,  # data given by a function may not state it
            threads=config.data.threads,
            on_bad_image="ignore",
            kind=f"image of {name}",
        )
        for start in range(0, len(split), IMAGES_AT_A_TIME):
            rows = np.arange(start, min(start + IMAGES_AT_A_TIME, len(split)))
            loader.read_ahead([rows])
            try:
                loader.batch(rows, rows)
            except DataError as error:
                result.error(str(error), "correct the data set")
                break
        bad = loader.bad_images
        if bad:
            listed = [f"{file} ({reason})" for file, reason in list(bad.items())[:LISTED]]
            listed += [f"and {len(bad) - LISTED} more"] * (len(bad) > LISTED)
            report(f"{len(bad)} of {total} of {name} cannot be used: {', '.join(listed)}", IMAGES_HINT)
        else:
            result.ok(f"{total} of {name} decoded")
