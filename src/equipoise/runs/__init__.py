"""Runs over datasets, sampled or proved: one directory each, killed and continued at will."""

from equipoise.runs.attack import AttackSummary, attack_run, predict_run
from equipoise.runs.jobs import Job, certify, merge_runs, preflight, prepare, prove, start
from equipoise.runs.run import Results, Run, Summary, Violation, open_run
from equipoise.runs.sources import normalised, portable
from equipoise.runs.store import AttackRow, Row, Settings, is_run, versions

__all__ = [
    "AttackRow", "AttackSummary", "Job", "Results", "Row", "Run", "Settings",
    "Summary", "Violation", "attack_run", "certify", "is_run", "merge_runs", "normalised", "open_run", "portable", "predict_run",
    "preflight", "prepare", "prove", "start", "versions",
]  # fmt: skip
