"""`jaxdp report`: a summary of runs as text or JSON, and an HTML page with plots and tables, made from their directories."""

from jaxdp.report.page import write
from jaxdp.report.summary import as_text, report

__all__ = ["as_text", "report", "write"]
