"""The list of checks of `jaxdp doctor`, and their table."""

import platform
from functools import partial
from importlib.metadata import version

from rich.table import Table
from rich.text import Text

from jaxdp import __version__
from jaxdp.bench.environment import PACKAGES
from jaxdp.config import Config
from jaxdp.doctor import cuda, devices, storage
from jaxdp.doctor.check_result import Check, CheckResult, ResultBuilder, run_concurrently

TIMEOUT_SECONDS = 120.0  # of all checks together
COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


def run_checks(config: Config, url: str | None) -> list[CheckResult]:
    """Run every check and return the results in the order of the output. url: of a run in object storage."""
    checks: dict[str, Check] = {
        "versions": _check_versions,
        "devices": partial(devices.check_devices, config=config),
        "cuda": cuda.check_cuda,
        "variables": cuda.check_variables,
    }
    if url is not None:
        checks["storage"] = partial(storage.check_storage, url=url)
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
