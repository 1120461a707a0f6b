"""What a run's directory tells: a line for people, and a page with curves, times, classes and tables."""

from jaxdp.report.page import write
from jaxdp.report.reached import as_text, report

__all__ = ["as_text", "report", "write"]
