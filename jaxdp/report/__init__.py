"""`jaxdp report` and `jaxdp watch`: summaries of runs, and one page about them, made from their directories.

The writer of the page is imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from jaxdp.report.run_history import read_all
from jaxdp.report.summary import as_text, metrics_csv, report, summarize

if TYPE_CHECKING:
    from jaxdp.report.output import write

__all__ = ["as_text", "metrics_csv", "read_all", "report", "summarize", "write"]


def __getattr__(name: str) -> Any:
    if name == "write":
        from jaxdp.report.output import write

        return write
    raise AttributeError(name)
