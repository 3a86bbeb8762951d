"""What a run says: certified accuracy at each ε, abstentions, failures, draws and what it all rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from equipoise.core import InputError, round_down
from equipoise.smoothing import Certificates
from equipoise.smoothing.partitions import Ints


@dataclass(frozen=True)
class Summary:
    """Figures over the finished inputs; failed ones count as not certified.

    Without labels `accuracy` is the share of inputs with a certificate of that radius, whatever the answer.
    """

    total: int
    done: int
    failed: int
    abstained: int
    accuracy: dict[float, float]
    average_radius: float
    draws: int
    seconds: float
    sigma: float
    alpha: float
    procedure: str
    about: str
    notes: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    labelled: bool = True
    reasons: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether every input of the run was worked off."""
        return self.done == self.total

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain = asdict(self) | {"finished": self.finished, "notes": list(self.notes), "reasons": list(self.reasons)}
        key = "certified_accuracy" if self.labelled else "certified_share"
        plain["accuracy"] = [{"epsilon": e, key: a} for e, a in self.accuracy.items()]
        return plain

    def lines(self) -> list[str]:
        """The figures as sentences; radii rounded down."""
        head = f"{self.done} of {self.total} inputs"
        if not self.finished:
            head += ", not finished: run the same command to continue"
        lines = [
            f"{head}; sigma {self.sigma:g}, {self.procedure} at alpha {self.alpha:g}",
            f"{self.abstained} abstained, {self.failed} failed; average certified radius "
            f"{round_down(self.average_radius, 4)}; {self.draws:,} draws, {self.seconds:.1f} s of sampling",
        ]
        if self.failures:
            name, reason = next(iter(self.failures.items()))
            lines.append(f"first failure, input {name}: {reason}")
        return [*lines, *self.reasons, self.about, *self.notes]


def summarise(
    certificates: Certificates,
    labels: Ints,
    epsilons: Sequence[float] | None,
    *,
    total: int,
    draws: int,
    seconds: float,
    notes: Sequence[str] = (),
) -> Summary:
    """Figures of derived certificates."""
    levels = default_epsilons(certificates.sigma) if epsilons is None else [float(e) for e in epsilons]
    if any(not e >= 0 for e in levels):
        raise InputError(f"epsilon must be non-negative, got {levels}")
    failures: dict[str, str] = certificates.details.get("failures", {})
    labelled = bool((np.asarray(labels) >= 0).any())
    if not labelled:
        labels = certificates.prediction
    accuracy = np.atleast_1d(certificates.accuracy(labels, levels)) if levels else np.array([])
    return Summary(
        total, len(certificates), len(failures), int(certificates.abstain.sum()) - len(failures),
        dict(zip(levels, (float(a) for a in accuracy), strict=True)), certificates.average_radius(labels), draws, seconds,
        certificates.sigma, certificates.alpha, certificates.procedure, certificates.about, tuple(notes), failures, labelled,
    )  # fmt: skip


def default_epsilons(sigma: float) -> list[float]:
    """0, ½σ, σ … 3σ.

    >>> default_epsilons(0.5)
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    """
    return [k * sigma / 2 for k in range(7)]
