"""`jaxdp doctor` where a package that jaxdp needs is missing or broken: Python and the packages alone, in plain text."""

import json
import sys
from functools import partial

from jaxdp.doctor import packages
from jaxdp.doctor.finding import Finding, as_dict, guarded, output_of, summary

SECONDS = 120.0


def look() -> list[Finding]:
    """The findings of the checks that need no package."""
    lines = output_of([sys.executable, "-m", "jaxdp.doctor.packages"], SECONDS).splitlines()
    return guarded({"python": packages.python, "packages": partial(packages.packages, broken=json.loads(lines[-1]))}, SECONDS)


def show(as_json: bool) -> None:
    """Print the report."""
    findings = look()
    if as_json:
        print(json.dumps(as_dict(findings, None), indent=2))
        return
    for one in findings:
        print(f"{one.state:<7}  {one.check:<8}  {one.found}")
        if one.mend:
            print(f"{'':<19}-> {one.mend}")
    print(f"{summary(findings)}; everything else can be looked at when that is mended")
