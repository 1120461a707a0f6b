"""`jaxdp report`."""

import dataclasses
import json
from typing import Annotated

import tyro

from jaxdp.config import ConfigError
from jaxdp.flags import parse


def run(arguments, program):
    @dataclasses.dataclass(frozen=True)
    class Report:
        """Print a run's accuracy, and for ImageNet its epochs to 75.9 % beside MLPerf's reference for the same batch.

        Examples:
          jaxdp report runs/digits
          jaxdp report runs/first runs/second --json
        """

        workdir: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="WORKDIR ...")]]
        """directories of runs"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document: a list with an object for every run"""

    chosen = parse(Report, arguments, program)
    from jaxdp.report import as_text, report

    if not chosen.workdir:
        raise ConfigError("workdir: () is not allowed; give at least one run's directory")
    told = [report(workdir) for workdir in chosen.workdir]
    print(json.dumps(told, indent=2) if chosen.json else "\n".join(as_text(one) for one in told))
