"""A certification procedure: the selected class, two rivals one by one, all others as one bucket."""

from __future__ import annotations

from typing import Any

import numpy as np

from equipoise.smoothing import Option, Procedure, Split
from equipoise.smoothing.procedures import Partition


def two_rivals(selection: Any) -> Partition:
    """Drawn up on the selection sample alone, so that the estimation sample is independent of it."""
    order = np.argsort(-selection, axis=1, kind="stable")
    return Partition(order, np.full(len(selection), min(2, selection.shape[1] - 1)))


TWO_RIVALS = Procedure(
    "two-rivals",
    (Option(two_rivals, Split(0.5)),),
    True,
    False,
    "two rivals apart, the rest pooled",
    "this package",
)
