"""What a certification returns: predictions, radii and the numbers they came from, for a batch of inputs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core import InputError
from equipoise.core.accuracy import average_certified_radius, certified_accuracy
from equipoise.smoothing.partitions import Ints
from equipoise.smoothing.ramp import Floats

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
    from above (where a margin was bounded itself: the pair about ½ of the same radius); `buckets` is the number of classes or
    groups told apart.
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
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def abstain(self) -> NDArray[np.bool_]:
        """Where nothing was certified."""
        return np.asarray(self.prediction == ABSTAIN)

    def __len__(self) -> int:
        return int(np.size(self.prediction))

    def accuracy(self, labels: ArrayLike, epsilon: ArrayLike = 0.0) -> Floats:
        """Certified accuracy at each ε: the share of inputs predicted right with radius ≥ ε."""
        return certified_accuracy(self.radius, self._correct(labels), epsilon)

    def average_radius(self, labels: ArrayLike) -> float:
        """Average certified radius: the radius where the prediction is right, 0 elsewhere."""
        return average_certified_radius(self.radius, self._correct(labels))

    def _correct(self, labels: ArrayLike) -> NDArray[np.bool_]:
        labels = np.asarray(labels)
        if labels.shape != self.prediction.shape:
            raise InputError(f"labels have shape {labels.shape}, the certificates {self.prediction.shape}")
        return np.asarray((self.prediction == labels) & ~self.abstain)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers; radii keep every digit."""
        return {k: v.tolist() if isinstance(v, np.ndarray | np.generic) else v for k, v in asdict(self).items()}

    def to_json(self) -> str:
        """One JSON object; infinite radii are written as the string "inf", so any JSON parser reads it."""
        plain = self.to_dict()
        plain["radius"] = _finite(plain["radius"])
        return json.dumps(plain, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Certificates:
        """The inverse of `to_json`."""
        plain = json.loads(text)
        for key in ("prediction", "selected", "buckets", "draws"):
            plain[key] = np.asarray(plain[key], dtype=np.int64)
        for key in ("radius", "p_lower", "p_upper"):
            plain[key] = np.asarray(plain[key], dtype=np.float64)
        return cls(**plain)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value if np.isfinite(value) else "inf"
