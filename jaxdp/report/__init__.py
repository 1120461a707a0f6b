"""`jaxdp report`: a summary of runs as text or JSON, and an HTML page with plots and tables, made from their directories."""

from jaxdp.report.metrics import metrics_csv
from jaxdp.report.page import write
from jaxdp.report.run_history import labels_of
from jaxdp.report.summary import as_text, read_run, report, summarize

__all__ = ["as_text", "labels_of", "metrics_csv", "read_run", "report", "summarize", "write"]
