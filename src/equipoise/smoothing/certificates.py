"""What a certification returns, for a batch of inputs, and Cohen's published logs (idx, label, predict, radius, …)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core import (
    Floats,
    InputError,
    Ints,
    Mask,
    average_certified_radius,
    certified_accuracy,
    explained,
)
from equipoise.core.files import read_bounded

ABSTAIN = -1

#: what no certificate of this package covers, repeated in every report
NOT_COVERED = (
    "Not covered: rounding inside the network's forward pass, noise drawn in floating point instead of real numbers, "
    "a model or input range other than the one sampled, perturbations measured in another norm than ℓ2."
)


@dataclass(frozen=True)
class Certificates:
    """Certificates of N inputs; arrays of shape (N,), or of the batch shape given to `certify_counts`.

    For each input, with probability ≥ 1 − alpha over the draws: if `prediction ≥ 0`, the smoothed classifier named in
    `about` answers `prediction` at every x' with `‖x' − x‖₂ < radius`. `prediction = −1` is an abstention, radius 0.
    `selected` is the class the selection sample chose; `p_lower` bounds its score from below, `p_upper` all others'
    from above (where a margin was bounded itself, `direct`: the pair about ½ of the same radius); `buckets` is the number of
    classes or groups with bounds of their own.
    """

    prediction: Ints
    radius: Floats
    selected: Ints
    p_lower: Floats
    p_upper: Floats
    buckets: Ints
    procedure: str
    sigma: float
    alpha: float
    draws: Ints
    about: str
    direct: Mask
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def abstain(self) -> Mask:
        """Where nothing was certified."""
        return self.prediction == ABSTAIN

    def __len__(self) -> int:
        return int(np.size(self.prediction))

    def accuracy(self, labels: ArrayLike, epsilon: ArrayLike = 0.0) -> Floats:
        """Certified accuracy at each ε: the share of inputs predicted right with radius ≥ ε.

        Args:
            labels: class numbers.
            epsilon: radii.
        """
        return certified_accuracy(self.radius, self._correct(labels), epsilon)

    def average_radius(self, labels: ArrayLike) -> float:
        """Average certified radius: the radius where the prediction is right, 0 elsewhere."""
        return average_certified_radius(self.radius, self._correct(labels))

    def _correct(self, labels: ArrayLike) -> Mask:
        labels = np.asarray(labels)
        if labels.shape != self.prediction.shape:
            raise InputError(
                f"labels have shape {labels.shape}, the certificates {self.prediction.shape}"
            )
        return (self.prediction == labels) & ~self.abstain


_LARGEST = 1_000_000_000  # bytes of a log
_COLUMNS = {
    "idx": np.int64,
    "label": np.int64,
    "predict": np.int64,
    "radius": np.float64,
    "correct": np.int64,
    "time": "U64",
}


@dataclass(frozen=True)
class CertificationLog:
    """One log: arrays of the same length; `predict = −1` is an abstention."""

    idx: Ints
    label: Ints
    predict: Ints
    radius: Floats
    correct: Mask
    time: NDArray[np.str_]

    def accuracy(self, epsilon: ArrayLike = 0.0) -> Floats:
        """Certified accuracy at each ε, as in the published tables: right, and radius ≥ ε."""
        return certified_accuracy(self.radius, self.correct, epsilon)

    def average_radius(self) -> float:
        """Average certified radius."""
        return average_certified_radius(self.radius, self.correct)


def read_log(path: str | Path) -> CertificationLog:
    """Read a log; a malformed line is named."""
    with explained(f"{path} is not a text file"):
        lines = read_bounded(path, _LARGEST).decode("utf-8").splitlines()
    if not lines or lines[0].split("\t") != list(_COLUMNS):
        raise InputError(f"{path}: expected the header {' '.join(_COLUMNS)}")
    if len(lines) < 2:
        raise InputError(f"{path}: the log has no rows")
    kinds = list(_COLUMNS.items())
    with explained(f"{path}, counting rows after the header"):
        rows = np.loadtxt(lines[1:], kinds, comments=None, delimiter="\t", ndmin=1)
    right = (rows["radius"] >= 0) & np.isin(rows["correct"], (0, 1))
    if not right.all():
        bad = rows[~right][0]
        raise InputError(f"{path}: a radius must be ≥ 0 and correct 0 or 1, got {bad}")
    columns = {name: rows[name] for name in _COLUMNS}
    return CertificationLog(**columns | {"correct": rows["correct"] == 1})
