"""`jaxdp report` and `jaxdp watch`: summaries of runs, and one page about them, made from their directories."""

from jaxdp.report.output import write
from jaxdp.report.run_history import read_all
from jaxdp.report.summary import as_text, metrics_csv, report, summarize

__all__ = ["as_text", "metrics_csv", "read_all", "report", "summarize", "write"]
