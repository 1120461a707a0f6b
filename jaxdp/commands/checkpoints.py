"""`jaxdp checkpoints`."""

import dataclasses
import json
from typing import Annotated

import tyro

from jaxdp.flags import parse


def run(arguments, program):
    @dataclasses.dataclass(frozen=True)
    class Checkpoints:
        """List the checkpoints of a run, the oldest first; every byte of each is read and checked.

        Examples:
          jaxdp checkpoints --workdir runs/digits
        """

        workdir: str = "runs/digits"
        """of the run"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document on stdout: a list with an object for every checkpoint"""

    chosen = parse(Checkpoints, arguments, program)
    from jaxdp.training.restored import listed

    rows = listed(chosen.workdir)
    if chosen.json:
        print(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    from jaxdp.training.console import Screen

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("samples", "epoch", "steps", "accuracy", "size"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for row in rows:
        known = row["epoch"] is not None
        numbers = (f"{row['epoch']:.2f}", f"{row['steps']:,}") if known else ("", "")
        accuracy = "" if row["accuracy"] is None else f"{100 * row['accuracy']:.2f} %"
        size = f"{row['bytes'] / 1e6:,.1f} MB" if known else ""
        table.add_row(str(row["samples"]), *numbers, accuracy, size, (row["damage"] or "sound").replace(f"{row['path']}/", ""))
    screen = Screen()
    screen.table(table) if rows else screen.say(f"{chosen.workdir} holds no checkpoint")
