"""The old name of `equipoise.lab.experiments`, for one release."""

from equipoise.core.imports import moved

NAMES = ("Context", "Experiment", "Label", "Outcome", "Row", "Verdict", "every", "find", "reproduce", "reproduce_all")
__getattr__ = moved(__name__, "equipoise.lab.experiments", NAMES)
