"""Certification runs over datasets: counts stored, radii derived, killed and continued at will."""

from equipoise.runs.attacks.run import AttackSummary, attack_run
from equipoise.runs.engines import ENGINES, Engine, Execution
from equipoise.runs.jobs import Job, certify, describe, start
from equipoise.runs.parameters import Settings
from equipoise.runs.reasons import Summary
from equipoise.runs.run import Run, open_run
from equipoise.runs.store import AttackRow
from equipoise.runs.tasks import TaskSpec, Worker

__all__ = [
    "ENGINES", "AttackRow", "AttackSummary", "Engine", "Execution", "Job", "Run", "Settings", "Summary", "TaskSpec",
    "Worker", "attack_run", "certify", "describe", "open_run", "start",
]  # fmt: skip
