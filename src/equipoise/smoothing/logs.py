"""Cohen's published certification logs: tab-separated rows (idx, label, predict, radius, correct, time)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core import InputError, round_down
from equipoise.core.accuracy import average_certified_radius, certified_accuracy
from equipoise.core.files import read_bounded, write_whole
from equipoise.smoothing.certificates import ABSTAIN, Certificates
from equipoise.smoothing.partitions import Ints
from equipoise.smoothing.ramp import Floats

_LARGEST = 1_000_000_000  # bytes of a log
_COLUMNS = ("idx", "label", "predict", "radius", "correct", "time")


@dataclass(frozen=True)
class CertificationLog:
    """One log: arrays of the same length; `predict = −1` is an abstention."""

    idx: Ints
    label: Ints
    predict: Ints
    radius: Floats
    correct: NDArray[np.bool_]
    time: tuple[str, ...]

    def accuracy(self, epsilon: ArrayLike = 0.0) -> Floats:
        """Certified accuracy at each ε, as in the published tables: right, and radius ≥ ε."""
        return certified_accuracy(self.radius, self.correct, epsilon)

    def average_radius(self) -> float:
        """Average certified radius."""
        return average_certified_radius(self.radius, self.correct)


def read_log(path: str | Path) -> CertificationLog:
    """Read a log; a malformed line is named with its number."""
    try:
        lines = read_bounded(path, _LARGEST).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file: {error.reason} at byte {error.start}") from error
    if not lines or tuple(lines[0].split("\t")) != _COLUMNS:
        raise InputError(f"{path}: expected the header {' '.join(_COLUMNS)}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = line.split("\t")
        try:
            idx, label, predict, radius, correct, time = cells
            rows.append((int(idx), int(label), int(predict), float(radius), int(correct), time))
            if max(map(abs, rows[-1][:3])) >= 2**63:
                raise ValueError("a number beyond 64 bits")
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error} in {line[:200]!r}") from error
        if not rows[-1][3] >= 0 or rows[-1][4] not in (0, 1):
            raise InputError(f"{path}, line {number}: a radius must be ≥ 0 and correct 0 or 1, got {line[:200]!r}")
    if not rows:
        raise InputError(f"{path}: the log has no rows")
    idx_, label_, predict_, radius_, correct_, time_ = zip(*rows, strict=True)
    return CertificationLog(
        np.asarray(idx_, dtype=np.int64),
        np.asarray(label_, dtype=np.int64),
        np.asarray(predict_, dtype=np.int64),
        np.asarray(radius_, dtype=np.float64),
        np.asarray(correct_, dtype=bool),
        time_,
    )


def write_log(path: str | Path, certificates: Certificates, labels: ArrayLike, idx: ArrayLike | None = None) -> None:
    """Write certificates in Cohen's format, radii rounded *down* to four digits."""
    labels = np.asarray(labels, dtype=np.int64)
    if labels.shape != certificates.prediction.shape or labels.ndim != 1:
        raise InputError(f"expected {len(certificates)} labels, got shape {labels.shape}")
    names = np.arange(len(labels)) if idx is None else np.asarray(idx)
    lines = ["\t".join(_COLUMNS)]
    for i, y, k, r in zip(names, labels, certificates.prediction, certificates.radius, strict=True):
        right = int(k == y and k != ABSTAIN)
        lines.append(f"{i}\t{y}\t{k}\t{round_down(float(r), 4)}\t{right}\t")
    write_whole(path, "\n".join(lines) + "\n")


def accuracy_table(logs: dict[str, CertificationLog], epsilon: ArrayLike) -> dict[str, list[float]]:
    """Certified accuracy of several logs at the same ε, and the best of them: the layout of the published tables."""
    levels = np.atleast_1d(np.asarray(epsilon, dtype=np.float64))
    if not logs:
        raise InputError("no logs given")
    table = {name: log.accuracy(levels).tolist() for name, log in logs.items()}
    table["best"] = [max(column) for column in zip(*table.values(), strict=True)]
    return table
