"""Reports: one self-contained page with curves, bounds, spectra, radii, pictures and what is not guaranteed."""

from equipoise.report.audits import audit_network, audit_source, load_audit, save_audit
from equipoise.report.collect import collect
from equipoise.report.data import Attacks, Audit, Checked, Margins, Picture, ReportData, Series, Spectrum, load_margins
from equipoise.report.gallery import data_uri, load_gallery, png, save_gallery
from equipoise.report.page import plotly_source, render, write_report

__all__ = [
    "Attacks", "Audit", "Checked", "Margins", "Picture", "ReportData", "Series", "Spectrum", "audit_network",
    "audit_source", "collect", "data_uri", "load_audit", "load_gallery", "load_margins", "plotly_source", "png",
    "render", "save_audit", "save_gallery", "write_report",
]  # fmt: skip
