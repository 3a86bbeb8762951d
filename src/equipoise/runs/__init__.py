"""Runs over datasets, sampled or proved: one directory each, killed and continued at will."""

from equipoise.runs.attack import AttackSummary, attack_run
from equipoise.runs.engines import Execution
from equipoise.runs.jobs import Job, certify, merge_runs, prepare, prove, start
from equipoise.runs.predict import Answer, predict_run
from equipoise.runs.run import Results, Run, Summary, open_run
from equipoise.runs.settings import Settings, is_run, versions
from equipoise.runs.store import Attacked, AttackRow, Row

__all__ = [
    "Answer", "AttackRow", "AttackSummary", "Attacked", "Execution", "Job", "Results", "Row", "Run", "Settings", "Summary",
    "attack_run", "certify", "is_run", "merge_runs", "open_run", "predict_run", "prepare", "prove", "start", "versions",
]  # fmt: skip
