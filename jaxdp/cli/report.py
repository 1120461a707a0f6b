"""`jaxdp report`: print a summary of runs and write the HTML page."""

import dataclasses
import json
import sys
from typing import Annotated

from jaxdp.cli.options import CheckpointName, Switch
from jaxdp.errors import ConfigError, print_safe, printable
from jaxdp.files import check_output, write_output
from jaxdp.flags import Arg, parse
from jaxdp.recipes import register_from

STDOUT = "-"


@dataclasses.dataclass(frozen=True)
class Report:
    """Print the accuracy of runs, and write one HTML page with their curves, times, classes and numbers.

    For ImageNet, the epochs to 75.9 % are compared with the MLPerf reference for the same batch size. The page,
    report.html, needs no network. Runs whose configs differ in the seed alone also get a mean and standard deviation.

    Examples:
      jaxdp report runs/digits
      jaxdp report runs/first runs/second --output runs/compared
      jaxdp report runs/first runs/second --json --no-html
      jaxdp report runs/first runs/second --csv metrics.csv --no-html
    """

    workdir: Annotated[tuple[str, ...], Arg("WORKDIR ...", positional=True)]
    """Directories or URLs of runs"""
    output: str | None = None
    """Directory of the page; None: WORKDIR/report for one run, ./report for several"""
    html: bool = True
    """HTML page; --no-html: print the summary only"""
    evaluate: bool = True
    """Evaluation of the held-out images by class, on the accelerators of this machine or on one CPU device"""
    checkpoint: CheckpointName = "result"
    config: str | None = None
    """Recipe file (.py) that registers the model or strategy of the runs, if they are not jaxdp's"""
    json: Switch = False
    """Output as one JSON document: a list with an object per run, whose metrics are the records of its metrics.jsonl, and whose
    seeds are the statistics of the runs that differ from it in the seed alone"""
    csv: str | None = None
    """CSV file to write, with a row for every record of all runs and for the statistics of several seeds; -: stdout"""
    overwrite: Switch = False
    """Overwrite an existing CSV file"""


def run(arguments: list[str], program: str) -> None:
    options = parse(Report, arguments, program)
    register_from(options.config)
    from jaxdp.report import as_text, metrics_csv, read_all, summarize
    from jaxdp.report.seeds import groups
    from jaxdp.run_records import without_nan

    if not options.html and options.output is not None:
        raise ConfigError("--output", options.output, reason="has no effect with --no-html", hint="leave one of them out")
    if options.csv == STDOUT and options.json:
        raise ConfigError("--csv", STDOUT, reason="not possible with --json, which writes to stdout too", hint="give a file")
    file = None if options.csv in (None, STDOUT) else check_output(options.csv, options.overwrite, "--csv")
    runs = read_all(options.workdir)
    summaries = [{"workdir": run.workdir} | summarize(run.config, run.records, run.damaged, lost=run.lost) for run in runs]
    repeated = groups(runs)
    if options.json:
        seeds = {run.label: group.summary() for group in repeated for run in group.runs}
        metrics = [{"metrics": [without_nan(record) for record in run.records], "seeds": seeds.get(run.label)} for run in runs]
        document = [summary | more for summary, more in zip(summaries, metrics, strict=True)]
        print_safe(json.dumps(document, indent=2))
    else:
        lines = [as_text(summary | {"name": printable(summary["workdir"], 4096)}) for summary in summaries]
        print_safe("\n".join([*lines, *map(str, repeated)]), sys.stderr if options.csv == STDOUT else sys.stdout)
    if options.csv is not None:
        rows = {run.label: run.records for run in runs}
        for group in repeated:
            rows |= zip((f"{group.label}: mean", f"{group.label}: standard deviation"), group.curves(), strict=True)
        table = metrics_csv(rows)
        data = table.encode("utf-8", "backslashreplace")  # a name that a callback has logged may not be Unicode
        if file is None:
            sys.stdout.write(data.decode())
        else:
            write_output(file, data)
    if options.html:
        from jaxdp.loggers.console import Screen
        from jaxdp.report import write

        info = Screen(sys.stderr).info
        page = write(runs, options.output, evaluate=options.evaluate, checkpoint=options.checkpoint, info=info)
        print_safe(f"page: {printable(page, 4096)}", sys.stderr if options.json or options.csv == STDOUT else sys.stdout)
