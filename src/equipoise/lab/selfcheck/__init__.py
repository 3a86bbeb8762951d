"""Guarantees tested on the user's own hardware: random and trained operators and whole networks, attacked in float64.

`SUITES` is the table of what is tested; a later floor adds its guarantees as a row.
"""

from equipoise.lab.selfcheck.runner import Check, Report, run
from equipoise.lab.selfcheck.table import CHECKS, SUITES
from equipoise.lab.selfcheck.tally import REFERENCE_ROUNDING, Tally

__all__ = ["CHECKS", "REFERENCE_ROUNDING", "SUITES", "Check", "Report", "Tally", "run"]
