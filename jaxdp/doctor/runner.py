"""The list of checks of `jaxdp doctor`, and their table."""

from functools import partial

from rich.table import Table
from rich.text import Text

from jaxdp.config import Config
from jaxdp.distributed import launchers
from jaxdp.doctor import cuda, dataset, jax_probe, machine, network, packages, storage
from jaxdp.doctor.check_result import Check, CheckResult, ResultBuilder, run_concurrently
from jaxdp.files import is_url
from jaxdp.setup.run_dir import local_workdir

TIMEOUT_SECONDS = 60.0  # of all checks together, after the probe of JAX
COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


def run_checks(
    config: Config,
    workdir: str,
    *,
    images_per_second: float | None = None,
    detect: network.Detect = launchers.detect,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[CheckResult]:
    """Run every check and return the results in the order in which they are printed.

    workdir: a directory or URL. images_per_second: training speed of one device, if known. detect: returns the processes of the
    run. Never raises, and takes at most the timeouts of the JAX probe and of the other checks.
    """
    path = local_workdir(workdir, config)
    probe = jax_probe.probe_with_deadline(config)
    gpus = sum(device["platform"] in ("gpu", "cuda") for device in probe.devices)
    checks: dict[str, Check] = {
        "python": packages.check_python,
        "packages": partial(packages.check_packages, broken=probe.broken),
        "devices": partial(_check_devices, probe=probe),
        "plan": partial(_check_plan, probe=probe),
        "cuda": partial(cuda.check_cuda, devices=probe.devices),
        "nccl": partial(cuda.check_nccl, devices=probe.devices),
        "variables": cuda.check_variables,
        "memory": partial(machine.check_memory, state_bytes=probe.state_bytes, input_bytes=probe.input_bytes),
        "cores": partial(machine.check_cores, config=config, images_per_second=images_per_second, devices=len(probe.devices)),
        "disk": partial(machine.check_disk, config=config, workdir=path, state_bytes=probe.state_bytes),
        "cache": partial(machine.check_compilation_cache, config=config),
        "data": partial(dataset.check_data, config=config),
        "open files": machine.check_open_files,
        "/dev/shm": partial(machine.check_shared_memory, gpus=gpus),
        "host": partial(network.check_host, detect=detect),
        "interfaces": network.check_interfaces,
        "launcher": partial(network.check_launcher, detect=detect),
    }
    if is_url(workdir):
        checks["storage"] = partial(storage.check_storage, url=workdir)
    return run_concurrently(checks, timeout_seconds)


def _check_devices(result: ResultBuilder, probe: jax_probe.Probe) -> None:
    """JAX starts and finds devices."""
    counts: dict[str, int] = {}
    for device in probe.devices:
        memory = f", {machine.format_bytes(device['memory_bytes'])} each for JAX" if device["memory_bytes"] else ""
        kind = f"{device['kind']} ({device['platform']}{memory})"
        counts[kind] = counts.get(kind, 0) + 1
    if counts:
        result.ok(", ".join(f"{count} x {kind}" for kind, count in counts.items()))
    if probe.start_problem:
        probe.start_problem.report(result, default_fix="run `python -m jaxdp.doctor.jax_probe < /dev/null` for details")


def _check_plan(result: ResultBuilder, probe: jax_probe.Probe) -> None:
    """Batches and mesh of the recipe fit the devices and the data set."""
    problem = probe.plan_problem
    if problem and not problem.field.startswith("data."):  # the check "data" reports those
        problem.report(result, default_fix="run `jaxdp plan` for details")
    else:
        result.ok("the recipe fits" if probe.devices and not problem else "unknown")


def make_table(results: list[CheckResult]) -> Table:
    """Status, name and message of every check; below a warning or an error, its fix."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for result in results:
        table.add_row(Text(result.status, COLORS[result.status]), result.check, Text(result.message))
        if result.fix:
            table.add_row("", "", Text(f"fix: {result.fix}", "bold"))
    return table
