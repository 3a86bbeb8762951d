"""Every table and figure of the thesis as a command: a claim, settings at two scales, a run, a verdict."""

from equipoise.lab.experiments.catalogue import catalogue, every, find
from equipoise.lab.experiments.experiment import Context, Experiment, Label, Row, Verdict
from equipoise.lab.experiments.runner import Outcome, reproduce, reproduce_all

__all__ = [
    "Context",
    "Experiment",
    "Label",
    "Outcome",
    "Row",
    "Verdict",
    "catalogue",
    "every",
    "find",
    "reproduce",
    "reproduce_all",
]
