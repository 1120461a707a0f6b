"""The checks of `jaxdp doctor`: versions, devices, CUDA, variables, object storage and images; and their table."""

import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from jaxdp import __version__
from jaxdp.bench.environment import PACKAGES
from jaxdp.choices import SOURCES
from jaxdp.config import MAX_CLASSES, Config, Mesh
from jaxdp.data.batch_sources import DataError, DecodedImages
from jaxdp.data.datasets import stated_classes
from jaxdp.data.sources import source_of
from jaxdp.distributed import runtime, tpu
from jaxdp.distributed.runtime import nvidia_gpu_present
from jaxdp.errors import ConfigError, StorageError, first_line, plural, print_safe
from jaxdp.validation import from_json, to_json
from jaxdp.xla import jax_options

OK, WARNING, ERROR = "ok", "warning", "error"
WORST_FIRST = (ERROR, WARNING, OK)
THREAD_PREFIX = "check: "
TIMEOUT_SECONDS, DEVICES_SECONDS = 120.0, 100.0  # of all checks together, and for JAX to start
COLORS = {"ok": "green", "warning": "yellow", "error": "red"}
OLDEST_DRIVERS = {"12": 525, "13": 580}  # by CUDA's major version, from JAX's installation page
NVIDIA_SMI_SECONDS = 20.0
BUSY_SHARE = 0.1  # of a GPU's memory, in use before a run starts
CONFIGURING_VARIABLES = re.compile(r"(JAX|XLA|CUDA|LIBTPU|NCCL|TPU|MEGASCALE)_.*")
SLOW_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
SLOW_REQUEST_SECONDS = 1.0
IMAGES_HINT = "replace or remove what cannot be read, or train with --data.on-bad-image skip"
IMAGES_AT_A_TIME, LISTED = 4096, 100


@dataclass
class CheckResult:
    """Outcome of one check. status: the worst of its messages, ok, warning or error. fixes: what to do about them."""

    check: str
    status: str = OK
    messages: list[str] = field(default_factory=list)
    fixes: list[str] = field(default_factory=list)

    def ok(self, message: str) -> None:
        self.add(OK, message)

    def warning(self, message: str, fix: str) -> None:
        self.add(WARNING, message, fix)

    def error(self, message: str, fix: str) -> None:
        self.add(ERROR, message, fix)

    def add(self, status: str, message: str, fix: str = "") -> None:
        """Add a message. fix: unused if the status is ok."""
        self.status = min(self.status, status, key=WORST_FIRST.index)
        self.messages.append(message)
        if status != OK:
            self.fixes.append(fix)

    @property
    def message(self) -> str:
        return "; ".join(self.messages)

    @property
    def fix(self) -> str | None:
        return "; ".join(dict.fromkeys(self.fixes)) or None

    def to_dict(self) -> dict[str, str | None]:
        return {"check": self.check, "status": self.status, "message": self.message, "fix": self.fix}


Check = Callable[[CheckResult], None]


def run_checks(config: Config, url: str | None) -> list[CheckResult]:
    """Run every check and return the results in the order of the output. url: of a run in object storage."""
    checks: dict[str, Check] = {
        "versions": _check_versions,
        "devices": partial(check_devices, config=config),
        "cuda": check_cuda,
        "variables": check_variables,
    }
    if tpu.chip_drivers() or installed_version("libtpu"):
        checks["tpu"] = check_tpu
    if url is not None:
        checks["storage"] = partial(check_storage, url=url)
    return run_concurrently(checks, TIMEOUT_SECONDS)


def _check_versions(result: CheckResult) -> None:
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    result.ok(f"Python {platform.python_version()}, jaxdp {__version__}, {packages}")


def run_concurrently(checks: dict[str, Check], timeout_seconds: float) -> list[CheckResult]:
    """Run every check in a thread and return the results in the order of `checks`, a dict from name to function.

    A check that raises gets a warning; one that does not return within `timeout_seconds` gets an error, and its thread is left
    running: the caller must end the process by `os._exit` if `any_running()`.
    """
    results: dict[str, CheckResult] = {}

    def run(name: str) -> None:
        result = CheckResult(name)
        try:
            checks[name](result)
        except Exception as error:  # depends on the machine
            result.warning(f"check failed: {type(error).__name__}: {first_line(error)}", "check this manually")
        results[name] = result

    threads = {name: threading.Thread(target=run, args=(name,), name=THREAD_PREFIX + name, daemon=True) for name in checks}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + timeout_seconds
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if name not in results:
            results[name] = CheckResult(name)
            results[name].error(f"no answer in {timeout_seconds:g} s", "check this manually: a run may hang too")
    return [results[name] for name in checks]


def any_running() -> bool:
    """Whether the thread of a check that timed out is still running."""
    return any(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate())


def output_of(command: list[str], timeout_seconds: float, *, stdin: str | None = None) -> str:
    """The stdout of a command. Raises OSError with a one-line reason if it is missing, fails or times out."""
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]}: no answer in {timeout_seconds:g} s") from None
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise OSError(f"{command[0]} failed with exit code {done.returncode}: {output[-1]}")
    return done.stdout


def to_dict(results: list[CheckResult], recipe: str) -> dict:
    """The report as one JSON document: {"recipe", "checks": [...]} and the number of results by status."""
    counts = {status: sum(result.status == status for result in results) for status in reversed(WORST_FIRST)}
    return {"recipe": recipe, "checks": [result.to_dict() for result in results], **counts}


def summarize(results: list[CheckResult]) -> str:
    """The names of the checks with errors and warnings, in one line."""
    lines = []
    for status in (ERROR, WARNING):
        if checks := [result.check for result in results if result.status == status]:
            lines.append(f"{len(checks)} {status}{'s' * (len(checks) > 1)}: {', '.join(checks)}")
    return "; ".join(lines) or "no problems found"


def make_table(results: list[CheckResult]) -> Table:
    """Status, name and message of every check; below a warning or an error, its fix."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for result in results:
        table.add_row(Text(result.status, COLORS[result.status]), result.check, Text(result.message))
        if result.fix:
            table.add_row("", "", Text(f"fix: {result.fix}", "bold"))
    return table


def check_devices(result: CheckResult, config: Config) -> None:
    """A run would start on the devices of this machine. JAX starts in a subprocess, which may crash, and then frees them."""
    command = [sys.executable, "-m", "jaxdp.doctor.checks"]
    try:
        output = output_of(command, DEVICES_SECONDS, stdin=to_json(Config(mesh=config.mesh)))
        found = json.loads(output.splitlines()[-1])
    except (OSError, ValueError, LookupError) as error:
        found = {"kinds": [], "problem": f"JAX does not start: {first_line(error).replace(sys.executable, 'python')}"}
    if found["kinds"]:
        result.ok(", ".join(f"{count} x {kind}" for kind, count in Counter(found["kinds"]).items()))
    if found["problem"]:
        result.error(found["problem"], "run `python -c 'import jax; jax.devices()'` for details")


def start_devices(mesh: Mesh) -> dict:
    """Start JAX in this process, as a run does. kinds: of each device; problem: why a run would not start there, or None."""
    try:
        devices = runtime.start(mesh)
    except ConfigError as error:
        return {"kinds": [], "problem": str(error)}
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    memory = [f", {limit / 2**30:,.1f} GiB for JAX" if limit else "" for limit in limits]
    kinds = [f"{device.device_kind} ({device.platform}{text})" for device, text in zip(devices, memory, strict=True)]
    return {"kinds": kinds, "problem": None}


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


def check_cuda(result: CheckResult) -> None:
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


def _check_driver(result: CheckResult, gpu_present: bool, plugins: dict[str, str]) -> None:
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


def check_tpu(result: CheckResult, root: Path = Path("/")) -> None:
    """The chips have a driver, libtpu is the version that JAX requires, and no other process uses them."""
    drivers, libtpu, jax = tpu.chip_drivers(root), installed_version("libtpu"), installed_version("jax")
    result.ok(f"{plural(len(drivers), 'TPU chip')}, driver {', '.join(sorted(set(drivers))) or 'none'}")
    if "none" in drivers:
        result.error("a chip has no driver", "use an image for TPU VMs")
    required = next((one.split(";")[0].strip() for one in requires("jax") or () if one.startswith("libtpu")), "")
    if libtpu is None:
        result.error("libtpu is not installed", "pip install jaxdp with its extra tpu")
    elif not f"libtpu=={libtpu}.".startswith(required.rstrip("*")):
        result.error(f"libtpu {libtpu} does not match jax {jax}, which needs {required}", f"pip install -U 'jax[tpu]=={jax}'")
    else:
        result.ok(f"libtpu {libtpu}, jax {jax}")
    if users := tpu.users(root):
        result.error(f"{users} uses the TPU", "end it before a run: one process at a time can use the chips")


def check_variables(result: CheckResult) -> None:
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


def check_storage(result: CheckResult, url: str) -> None:
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


def check_images(result: CheckResult, config: Config, info: Callable[[str], None]) -> None:
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
            target=stated_classes(split) or MAX_CLASSES,  # data given by a function may not state it
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


if __name__ == "__main__":  # for `check_devices`: reads a config from stdin, and prints what `start_devices` returns
    print_safe(json.dumps(start_devices(from_json(sys.stdin.read()).mesh)))
