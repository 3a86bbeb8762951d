"""The old name of `equipoise.lab.selfcheck`, for one release."""

from equipoise.core.imports import moved

__getattr__ = moved(__name__, "equipoise.lab.selfcheck", ("CHECKS", "Check", "Report", "Tally", "run"))
