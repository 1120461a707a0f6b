"""`jaxdp report`."""

import dataclasses
import json
import sys
from typing import Annotated

import tyro

from jaxdp.config import ConfigError
from jaxdp.flags import parse
from jaxdp.recipes import register_from


def run(arguments, program):
    @dataclasses.dataclass(frozen=True)
    class Report:
        """Print what runs have reached, and make one page of their curves, times, classes and numbers.

        For ImageNet the epochs to 75.9 % stand beside MLPerf's reference for the same batch. The page, report.html, needs
        neither network nor JavaScript; its pictures lie beside it as PNG.

        Examples:
          jaxdp report runs/digits
          jaxdp report runs/first runs/second --output runs/compared
          jaxdp report runs/first runs/second --json --no-html
          jaxdp report runs/digits --communication
        """

        workdir: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="WORKDIR ...")]]
        """directories of runs"""
        output: str | None = None
        """directory of the page; default: WORKDIR/report for one run, ./report for several"""
        html: bool = True
        """make the page; --no-html: only print"""
        evaluate: bool = True
        """count the held-out images by class, on the accelerators of this machine or on one CPU device; --no-evaluate: leave
        that out"""
        checkpoint: str = "newest"
        """which one is evaluated: newest, best (by accuracy), or its samples"""
        config: str | None = None
        """a recipe's file (.py) that registers the runs' model or strategy; None: they are jaxdp's own"""
        communication: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """measure how much of the steps' time is exposed communication, on the devices that the run was on; kept for later
        reports"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document: a list with an object for every run"""

    chosen = parse(Report, arguments, program)
    register_from(chosen.config)
    from jaxdp.report import as_text, report, write

    if not chosen.workdir:
        raise ConfigError("workdir: () is not allowed; give at least one run's directory")
    if not chosen.html and chosen.output is not None:
        raise ConfigError(f"--output: {chosen.output!r} is not allowed with --no-html, which writes nothing; leave one out")
    if not chosen.html and chosen.communication:
        raise ConfigError("--communication: True is not allowed with --no-html; what it measures is shown on the page")
    told = [{"workdir": workdir} | report(workdir) for workdir in chosen.workdir]
    lines = [as_text(one | {"name": one["workdir"]}) for one in told]
    print(json.dumps(told, indent=2) if chosen.json else "\n".join(lines), flush=True)
    if chosen.html:
        from jaxdp.training.console import Screen

        say = Screen(sys.stderr).say
        page = write(
            chosen.workdir, chosen.output, chosen.evaluate, chosen.checkpoint, communication=chosen.communication, say=say
        )
        print(f"page: {page}", file=sys.stderr if chosen.json else sys.stdout)
