"""Reports: one self-contained page with curves, bounds, radii and what is not guaranteed."""

from equipoise.report.collect import Attacks, Checked, ReportData, Series, as_document, collect
from equipoise.report.page import render, write_report

__all__ = ["Attacks", "Checked", "ReportData", "Series", "as_document", "collect", "render", "write_report"]  # fmt: skip
