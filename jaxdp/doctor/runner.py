"""The list of checks of `jaxdp doctor`, and their table."""

import platform
from functools import partial
from importlib.metadata import version

from rich.table import Table
from rich.text import Text

from jaxdp import __version__, sizes
from jaxdp.bench.environment import PACKAGES
from jaxdp.config import Config
from jaxdp.data.sources import inspect
from jaxdp.doctor import cuda, devices, machine
from jaxdp.doctor.check_result import Check, CheckResult, ResultBuilder, run_concurrently
from jaxdp.errors import ConfigError, StorageError
from jaxdp.files import is_url
from jaxdp.setup.run_dir import local_workdir

TIMEOUT_SECONDS = 120.0  # of all checks together
COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


def run_checks(config: Config, workdir: str) -> list[CheckResult]:
    """Run every check and return the results in the order of the output. workdir: a directory or URL."""
    path = local_workdir(workdir, config)
    state_bytes = _state_bytes(config)
    checks: dict[str, Check] = {
        "versions": _check_versions,
        "devices": partial(devices.check_devices, config=config),
        "cuda": cuda.check_cuda,
        "variables": cuda.check_variables,
        "memory": partial(machine.check_memory, state_bytes=state_bytes),
        "disk": partial(machine.check_disk, config=config, workdir=path, state_bytes=state_bytes),
        "limits": machine.check_limits,
    }
    if is_url(workdir):
        checks["storage"] = partial(machine.check_storage, url=workdir)
    return run_concurrently(checks, TIMEOUT_SECONDS)


def _state_bytes(config: Config) -> int | str:
    """Bytes of parameters, optimizer and statistics; or why they are unknown, as without the data that state the classes."""
    try:
        if config.model.classes is None:
            config, _ = inspect(config)
        parts = sizes.model_summary(config)["state_bytes"]
    except (ConfigError, StorageError) as error:
        return f"the size of a checkpoint is unknown: {error}"
    return sum(parts.values()) - parts["gradients"]


def _check_versions(result: ResultBuilder) -> None:
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    result.ok(f"Python {platform.python_version()}, jaxdp {__version__}, {packages}")


def make_table(results: list[CheckResult]) -> Table:
    """Status, name and message of every check; below a warning or an error, its fix."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for result in results:
        table.add_row(Text(result.status, COLORS[result.status]), result.check, Text(result.message))
        if result.fix:
            table.add_row("", "", Text(f"fix: {result.fix}", "bold"))
    return table
