"""Reports: one self-contained page with curves, bounds, spectra, radii, pictures and what is not guaranteed."""

from equipoise.report.audits import Audit, audit_network, audit_source, load_audit, save_audit
from equipoise.report.collect import (
    Attacks,
    Checked,
    Picture,
    ReportData,
    Series,
    as_document,
    collect,
    load_gallery,
    save_gallery,
)
from equipoise.report.page import data_uri, render, write_report

__all__ = [
    "Attacks", "Audit", "Checked", "Picture", "ReportData", "Series", "as_document", "audit_network", "audit_source", "collect",
    "data_uri", "load_audit", "load_gallery", "render", "save_audit", "save_gallery", "write_report",
]  # fmt: skip
