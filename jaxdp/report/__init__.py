"""`jaxdp report` and `jaxdp watch`: summaries of runs, and one page about them, made from their directories.

The page imports matplotlib, which takes a second, and is imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from jaxdp.report.metrics import metrics_csv
from jaxdp.report.run_history import labels_of
from jaxdp.report.summary import as_text, read_run, report, summarize

if TYPE_CHECKING:
    from jaxdp.report.output import write

__all__ = ["as_text", "labels_of", "metrics_csv", "read_run", "report", "summarize", "write"]


def __getattr__(name: str) -> Any:
    if name == "write":
        from jaxdp.report.output import write

        return write
    raise AttributeError(name)
