"""The records of several runs as one table in CSV."""

import csv
import io
import math
from typing import Any

from jaxdp.records import RECORD_FIELDS

POSITION = ("samples", "step", "epoch")  # the first columns after the name of the run


def metrics_csv(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for every record of several runs, with the name of its run; as in RFC 4180, lines end in CR LF.

    runs: records of the log by name of the run. Columns: run, samples, step, epoch, and all other fields in the order of
    `RECORD_FIELDS`. A cell is empty if its record lacks the field, and NaN if the value was not finite (null in the log).
    """
    fields = {name for records in runs.values() for record in records for name in record}
    known = [name for name in RECORD_FIELDS if name in fields and name not in POSITION]
    columns = [*POSITION, *known, *sorted(fields.difference(POSITION, known))]
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["run", *columns])
    for run, records in runs.items():
        writer.writerows([run, *(_cell(record.get(name, "")) for name in columns)] for record in records)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return "NaN" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value
