"""All checks of `jaxdp doctor`, and their report."""

from functools import partial
from pathlib import Path

from jaxdp.config import Config
from jaxdp.doctor import images, machine, network, packages, probe, software
from jaxdp.doctor.finding import Finding, Findings, guarded, told_apart

SECONDS = 60.0  # for all checks but JAX's own start
COLOURS = {"ok": "green", "warning": "yellow", "wrong": "red"}


def look(
    config: Config,
    workdir: Path,
    images_per_second: float | None = None,
    seconds: float = SECONDS,
    given: dict | None = None,
) -> list[Finding]:
    """The findings of every check, in the order in which they are told. images_per_second: that each device trains, if known;
    given: which processes make up the run, as to `cluster.find`.

    Nothing here raises, and nothing takes longer than the limits on a start of JAX and on all other checks together.
    """
    jax = probe.asked_in_time(config)
    devices, state_bytes, host_bytes = jax["devices"], jax["state_bytes"], jax["host_bytes"]
    gpus = sum(one["platform"] in ("gpu", "cuda") for one in devices)
    checks = {
        "python": packages.python,
        "packages": partial(packages.packages, broken=jax["broken"]),
        "devices": partial(_devices, jax=jax),
        "plan": partial(_plan, jax=jax),
        "cuda": partial(software.cuda, devices=devices),
        "nccl": partial(software.nccl, devices=devices),
        "variables": software.variables,
        "memory": partial(machine.memory, state_bytes=state_bytes, host_bytes=host_bytes),
        "cores": partial(machine.cores, config=config, images_per_second=images_per_second, devices=len(devices)),
        "disk": partial(machine.disk, config=config, workdir=workdir, state_bytes=state_bytes),
        "cache": partial(machine.cache, config=config),
        "data": partial(images.data, config=config),
        "open files": machine.limits,
        "/dev/shm": partial(machine.shared_memory, gpus=gpus),
        "host": partial(network.host, given=given),
        "interfaces": network.interfaces,
        "launcher": partial(network.launcher, given=given),
    }
    return guarded(checks, seconds)


def _devices(findings: Findings, jax: dict) -> None:
    """The devices that JAX finds."""
    kinds = {}
    for one in jax["devices"]:
        held = f", {machine.size(one['memory_bytes'])} each for JAX" if one["memory_bytes"] else ""
        key = f"{one['kind']} ({one['platform']}{held})"
        kinds[key] = kinds.get(key, 0) + 1
    if kinds:
        findings.ok(", ".join(f"{count} x {kind}" for kind, count in kinds.items()))
    if problem := jax["problem"]:
        findings.wrong(*told_apart(problem, "see what `python -m jaxdp.doctor.probe < /dev/null` says"))


def _plan(findings: Findings, jax: dict) -> None:
    """Whether batches and mesh of the recipe fit the devices and the data."""
    unplanned = jax["unplanned"]
    if unplanned and not unplanned.startswith("data."):  # which has a check of its own
        findings.wrong(*told_apart(unplanned, "see what `jaxdp plan` says"))
    else:
        findings.ok("the recipe fits" if jax["devices"] and not unplanned else "not known")


def table(findings: list[Finding]):
    """A rich table: state, check, what was found, and below it how to mend what is not as it should be."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for one in findings:
        shown.add_row(Text(one.state, COLOURS[one.state]), one.check, Text(one.found))
        if one.mend:
            shown.add_row("", "", Text(f"-> {one.mend}", "bold"))
    return shown
