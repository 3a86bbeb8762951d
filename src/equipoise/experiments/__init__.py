"""Every table and figure of the thesis as a command: a claim, settings at two scales, a run, a verdict."""

from equipoise.experiments.experiment import Context, Experiment, Label, Row, Verdict
from equipoise.experiments.runner import Outcome, reproduce, reproduce_all
from equipoise.experiments.table import MODULES, every, find

__all__ = [
    "MODULES",
    "Context",
    "Experiment",
    "Label",
    "Outcome",
    "Row",
    "Verdict",
    "every",
    "find",
    "reproduce",
    "reproduce_all",
]
