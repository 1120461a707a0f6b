"""`jaxdp doctor` without third-party packages: checks of Python and of the packages, printed as plain text."""

import json
import sys
from functools import partial

from jaxdp.doctor import packages
from jaxdp.doctor.check_result import Check, CheckResult, output_of, run_concurrently, summarize, to_dict

TIMEOUT_SECONDS = 120.0


def run_checks() -> list[CheckResult]:
    """Run the checks that need no third-party package."""
    lines = output_of([sys.executable, "-m", "jaxdp.doctor.packages"], TIMEOUT_SECONDS).splitlines()
    checks: dict[str, Check] = {
        "python": packages.check_python,
        "packages": partial(packages.check_packages, broken=json.loads(lines[-1])),
    }
    return run_concurrently(checks, TIMEOUT_SECONDS)


def print_report(as_json: bool) -> None:
    """Run the checks and print the results to stdout."""
    results = run_checks()
    if as_json:
        print(json.dumps(to_dict(results, None), indent=2))
        return
    for result in results:
        print(f"{result.status:<7}  {result.check:<8}  {result.message}")
        if result.fix:
            print(f"{'':<19}fix: {result.fix}")
    print(f"{summarize(results)}. Fix these first; the remaining checks were skipped.")
