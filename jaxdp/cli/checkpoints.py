"""`jaxdp checkpoints`: list, verify and delete the checkpoints of a run."""

import dataclasses
import json
import sys
from typing import Any

from jaxdp.cli.options import Switch
from jaxdp.config import Config
from jaxdp.errors import EXIT_FAILURE, print_safe
from jaxdp.flags import parse
from jaxdp.metrics import METRICS, bare, title_of
from jaxdp.recipes import register_from


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """List the checkpoints of a run, oldest first, and verify all their checksums; or delete what is not needed.

    The exit code is 1 if a checkpoint is corrupt or cannot be read.

    Examples:
      jaxdp checkpoints --workdir runs/digits
      jaxdp checkpoints --workdir runs/digits --keep best,newest
    """

    workdir: str
    """Working directory of the run"""
    keep: str | None = None
    """Names or samples of the checkpoints to keep, separated by commas: result, newest (or last), best, 4096; all others
    are deleted before the list is shown"""
    config: str | None = None
    """Recipe file (.py) that registers the metric of `stop.metric`, if it is not jaxdp's"""
    json: Switch = False
    """Output as one JSON document: a list with an object per checkpoint"""


def run(arguments: list[str], program: str) -> None:
    options = parse(Checkpoints, arguments, program)
    register_from(options.config)
    from jaxdp.inference.checkpoints import delete_all_but, list_checkpoints
    from jaxdp.setup.run_dir import run_config

    if options.keep is not None:
        names = [{"last": "newest"}.get(name.strip(), name.strip()) for name in options.keep.split(",")]
        deleted = delete_all_but(options.workdir, names)
        print_safe(f"deleted: {', '.join(map(str, reversed(deleted))) or 'none'}", sys.stderr)
    rows = list_checkpoints(options.workdir)
    if options.json:
        print_safe(json.dumps(rows, indent=2))
    else:
        from jaxdp.loggers.console import Screen

        screen = Screen()
        if rows:
            screen.table(_table(rows, run_config(options.workdir)))
        else:
            screen.info(f"{options.workdir} contains no checkpoint")
    if any(row["error"] for row in rows):
        sys.exit(EXIT_FAILURE)


def _table(rows: list[dict[str, Any]], config: Config) -> Any:
    """config: of the run."""
    from rich.table import Table

    shown = dict.fromkeys((config.first_metric, config.deciding_metric))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("samples", "epoch", "steps", *map(title_of, shown), "size"):
        table.add_column(name, justify="right")
    for name in ("name", "state"):
        table.add_column(name)
    for row in rows:
        known = row["epoch"] is not None
        numbers = (f"{row['epoch']:.2f}", f"{row['steps']:,}") if known else ("", "")
        values = (METRICS[name].shown(row.get(bare(name))) for name in shown)
        size = f"{row['bytes'] / 1e6:,.1f} MB" if known else ""
        state = (row["error"] or "valid").replace(f"{row['path']}/", "")
        table.add_row(str(row["samples"]), *numbers, *values, size, ", ".join(row["names"]), state)
    return table
