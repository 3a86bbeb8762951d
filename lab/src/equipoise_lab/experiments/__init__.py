"""Every table and figure of the thesis as a command: a claim, settings at three scales, a run, a verdict."""

from equipoise_lab.experiments.experiment import Context, Experiment, Label, Power, Row, Verdict
from equipoise_lab.experiments.runner import (
    Outcome,
    catalogue,
    every,
    find,
    reproduce,
    reproduce_all,
)

__all__ = [
    "Context", "Experiment", "Label", "Outcome", "Power", "Row", "Verdict", "catalogue", "every", "find",
    "reproduce", "reproduce_all",
]  # fmt: skip
